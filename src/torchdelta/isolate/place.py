"""The directory of one query: what it was asked and answered, how far it came, what it printed, and its scratch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LAST_PARTS_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one query runs. The parent reads the same files, also those of a worker that is dead."""

    directory: Path

    @property
    def request(self) -> Path:
        """The task and what it is asked."""
        return self.directory / "request.json"

    @property
    def answer(self) -> Path:
        """What the task returned or raised; there as soon as it is complete."""
        return self.directory / "answer.json"

    @property
    def output(self) -> Path:
        """Everything that the worker and its children printed."""
        return self.directory / "output"

    @property
    def scratch(self) -> Path:
        """A directory for the task's own files; gone after the query."""
        return self.directory / "scratch"

    @property
    def cache(self) -> Path:
        """Where compilers keep their graphs, for this query alone."""
        return self.directory / "cache"

    def lay_out(self) -> None:
        """Make the directories."""
        for directory in (self.directory, self.scratch, self.cache):
            directory.mkdir(mode=0o700)

    def tell(self, part: str) -> None:
        """Say which part begins now: when the worker dies, this is where."""
        # one write, straight to the file: nothing of it is lost when the next instruction is the last
        descriptor = os.open(self._told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, " ".join(part.split()).encode() + b"\n")
        finally:
            os.close(descriptor)

    def told_last(self) -> str:
        """Return the part that was told last; empty when none was."""
        lines = tail_of(self._told, _LAST_PARTS_BYTES).splitlines()
        return lines[-1] if lines else ""

    @property
    def _told(self) -> Path:
        return self.directory / "told"


def tail_of(path: Path, most_bytes: int) -> str:
    """Return the end of a text file; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
