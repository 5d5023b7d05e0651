"""The directory of one query: what it was asked and answered, how far it came, what it printed, and its scratch.

A directory for each pool, locked while the pool lives; what a killed one left behind is swept by the next.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from torchdelta.errors import EnvironmentUnfit

_LAST_PARTS_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class QueryDirectory:
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


_LOCKED = ".lock"


class PoolDirectory:
    """A directory of one pool, from `with` to its end."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or _default_root()
        self._lock: IO[bytes] | None = None
        self.path = self._root

    def __enter__(self) -> PoolDirectory:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(self._root)
        sweep(self._root)
        while self._lock is None:
            self.path = self._root / f"pool-{os.urandom(6).hex()}"
            self._lock = _lock_of(self.path.with_suffix(_LOCKED))
        self.path.mkdir(mode=0o700)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        _remove(self.path, self._lock)
        self._lock = None


def sweep(root: Path) -> None:
    """Remove the directories of pools that are no more."""
    for path in root.glob(f"pool-*{_LOCKED}"):
        lock = _lock_of(path)
        if lock is not None:
            _remove(path.with_suffix(""), lock)


def _default_root() -> Path:
    # one for each user: nobody can remove, or lay in wait at, what another one's pools left
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"torchdelta-{user}"


def _require_own(root: Path) -> None:
    if hasattr(os, "getuid") and root.stat().st_uid != os.getuid():
        raise EnvironmentUnfit(f"{root} belongs to another user: remove it, or point TMPDIR to a directory of your own")


def _lock_of(path: Path) -> IO[bytes] | None:
    """Return the locked file; None if another process has the lock, or removed the file meanwhile."""
    file = path.open("ab")
    try:
        if _try_lock(file) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except FileNotFoundError:
        pass
    file.close()
    return None


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(directory: Path, lock: IO[bytes]) -> None:
    """Remove a directory, and its lock after it; what cannot be removed yet is left to the next sweep."""
    shutil.rmtree(directory, ignore_errors=True)
    path = Path(lock.name)
    if sys.platform == "win32":  # an open file cannot be removed there
        lock.close()
    if not directory.exists():
        path.unlink(missing_ok=True)
    lock.close()
