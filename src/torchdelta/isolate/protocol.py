"""What parent, zygote and workers say to each other: strict JSON, in lines and in files; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

Message = dict[str, Any]


def line_of(message: Message) -> bytes:
    """Return a message as one line; ValueError or TypeError for what strict JSON cannot hold."""
    return json.dumps(message, allow_nan=False).encode() + b"\n"


def message_in(text: bytes | str) -> Message:
    """Return the message that a line or a file holds."""
    message = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, found {type(message).__name__}")
    return message


def write_message(path: Path, message: Message) -> None:
    """Write a message so that whoever finds the file finds all of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(line_of(message))
    unfinished.replace(path)


class Lines:
    """The messages of a pipe, as they become complete."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[Message] | None:
        """Wait for more, and return what is complete by now; None when the other end is closed."""
        piece = os.read(self._descriptor, 1 << 16)
        if not piece:
            return None
        *complete, self._rest = (self._rest + piece).split(b"\n")
        return [message_in(line) for line in complete]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
