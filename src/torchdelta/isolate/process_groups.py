"""A process group as one thing: asked to end, ended for good, and what it holds.

Nobody outlives whom it works for: also not after kill -9, and not while busy outside of Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

GRACE_S = 0.2
"""How long a group has after SIGTERM. A C++ compiler needs it: killed outright it leaves half a precompiled header."""

_PROC = Path("/proc")


def ask_to_end(group: int) -> None:
    """Send SIGTERM to every process of a group."""
    _send(group, signal.SIGTERM)


def end_for_good(group: int) -> None:
    """Send SIGKILL to every process of a group."""
    _send(group, signal.SIGKILL)


def is_gone(group: int) -> bool:
    """Tell whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # what is left of it is not ours
        return False
    return False


def held_bytes(group: int) -> int:
    """Return the memory of a group that is nobody else's file: mapped libraries and weights on disk do not count.

    Zero where the system does not tell; a limit then holds through the address space alone.
    """
    return sum(_anonymous_bytes(process) for process in _processes() if _group_of(process) == group)


def children_of(parent: int) -> list[int]:
    """Return the children of a process, those that it adopted included."""
    return [process for process in _processes() if _parent_of(process) == parent]


def _send(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _processes() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()] if _PROC.exists() else []


def _group_of(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:  # it ended meanwhile
        return None


def _parent_of(process: int) -> int | None:
    try:
        text = (_PROC / str(process) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # the command is in parentheses, and may itself contain some
    return int(text.rpartition(")")[2].split()[1])


def _anonymous_bytes(process: int) -> int:
    try:
        lines = (_PROC / str(process) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    held = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(map(int, held)) * 1024


def most_bytes() -> int | None:
    """Return what a worker may hold if nobody says otherwise: so much that the rest of the machine lives on."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return None


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; at once if that was before."""
    if sys.platform == "linux" and _set(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends, so that none is lost sight of."""
    return sys.platform == "linux" and _set(_PR_SET_CHILD_SUBREAPER, 1)


def end_when_closed(descriptor: int) -> None:
    """Watch a pipe in a thread, and end this process with its group once the other end is closed."""

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            end_for_good(os.getpgrp())
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _set(option: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
