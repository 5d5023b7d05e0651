"""A directory for each pool, locked while the pool lives; what a killed one left behind is swept by the next."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from torchdelta.errors import EnvironmentUnfit

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
