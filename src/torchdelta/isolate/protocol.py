"""Messages between parent, zygote and workers: strict JSON objects, one a line in pipes, one a file on disk.

Nothing is ever unpickled, so a task that went wrong cannot run code in the parent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

Message = dict[str, Any]


def line_of(message: Message) -> bytes:
    """Return a message as one line. Raise ValueError or TypeError if strict JSON cannot represent it."""
    return json.dumps(message, allow_nan=False).encode() + b"\n"


def message_in(text: bytes | str) -> Message:
    """Return the message in a line or a file. Raise ValueError if that is not a strict JSON object."""
    message = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, found {type(message).__name__}")
    return message


def write_message(path: Path, message: Message) -> None:
    """Write a message to a file that exists only once it is complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(line_of(message))
    unfinished.replace(path)


class Lines:
    """Reads messages from a pipe; a message that has arrived in part is kept until the rest arrives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[Message] | None:
        """Wait for bytes, and return the messages that are complete, or None if the other end is closed."""
        piece = os.read(self._descriptor, 1 << 16)
        if not piece:
            return None
        *complete, self._rest = (self._rest + piece).split(b"\n")
        return [message_in(line) for line in complete]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
