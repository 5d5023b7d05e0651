"""Messages between parent, zygote and workers: strict JSON objects, one a line in pipes, one a file on disk.

Nothing is ever unpickled, so a task that went wrong cannot run code in the parent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchdelta.records.strict_json import from_text, replace_file, to_text

Message = dict[str, Any]


def line_of(message: Message) -> bytes:
    """Return a message as one line; raise ValueError or TypeError if strict JSON cannot hold it."""
    return to_text(message).encode() + b"\n"


def message_in(text: bytes | str) -> Message:
    """Return the message that a line or a file holds; raise ValueError if it is not a JSON object."""
    message = from_text(text)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, found {type(message).__name__}")
    return message


def write_message(path: Path, message: Message) -> None:
    """Write a message to a file, or replace the file by it, in one step: a reader never sees a part of it.

    Raise ValueError or TypeError if strict JSON cannot hold the message, and OSError if the file cannot be written.
    """
    line = line_of(message)
    replace_file(path, lambda file: file.write_bytes(line))


class Lines:
    """Reads messages from a pipe; a message that has arrived in part is kept until the rest arrives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[Message] | None:
        """Wait for more bytes, and return the messages that are complete now; None if the other end is closed.

        The list is empty if only a part of a message has arrived. Raise ValueError if a line is not a JSON object.
        """
        piece = os.read(self._descriptor, 1 << 16)
        if not piece:
            return None
        *complete, self._rest = (self._rest + piece).split(b"\n")
        return [message_in(line) for line in complete]
