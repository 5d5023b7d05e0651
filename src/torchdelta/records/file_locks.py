"""Locks that end with their process: a file that is open and locked says that its process is still at work.

The system unlocks a file when its process ends, also after `kill -9`. So a lock is never stale, and a file without a
lock was left behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO


def open_locked(path: Path) -> IO[bytes] | None:
    """Return the file, opened and locked, or None if it cannot be locked or was removed or replaced meanwhile.

    It cannot be locked if it is locked already. The file is made if it does not exist. Closing it ends the lock.
    OSError if the file cannot be opened, for example because its directory does not exist.
    """
    file = path.open("ab")
    try:
        if _try_lock(file) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except FileNotFoundError:
        pass
    file.close()
    return None


def remove_locked(lock: IO[bytes]) -> None:
    """Remove the file of a lock, and end the lock."""
    if sys.platform == "win32":  # Windows cannot remove an open file
        lock.close()
    Path(lock.name).unlink(missing_ok=True)
    lock.close()


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file without waiting, and return whether that worked; closing the file unlocks it."""
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
