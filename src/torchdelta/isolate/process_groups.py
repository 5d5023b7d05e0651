"""Signals to a worker's process group, what the group holds in memory, and the ties that end it with its parent.

A worker leads a process group of its own, so a signal to the group also reaches the compilers and other children that
the task started. This module sends the signals (`terminate`, `kill`); `supervisor.py` decides when.

A worker must not outlive its parent, not even after `kill -9` of the parent and not while it is busy outside of
Python. So the kernel kills it (`die_with_parent`, Linux), and a thread of a spawned worker watches a pipe to the parent
(`exit_when_closed`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GRACE_S = 0.2
"""How long a group has between SIGTERM and SIGKILL, because a C++ compiler that is killed outright leaves half a
precompiled header."""

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def terminate(group: int) -> None:
    """Send SIGTERM to every process of a group; do nothing if the group is gone or belongs to another user."""
    _send(group, signal.SIGTERM)


def kill(group: int) -> None:
    """Send SIGKILL to every process of a group; do nothing if the group is gone or belongs to another user."""
    _send(group, signal.SIGKILL)


def is_gone(group: int) -> bool:
    """Tell whether no process of a group is left.

    A process that has ended counts as left until its parent has collected its status.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # the processes that are left belong to another user
        return False
    return False


def memory_of(group: int) -> int:
    """Return the bytes of memory of a group, without mapped files such as libraries and weights on disk.

    Return 0 on systems without /proc; there only the limit of the address space holds.
    """
    return sum(_anonymous_bytes(process) for process in _processes() if _group_of(process) == group)


def own_memory() -> int:
    """Return the bytes of memory of this process, as `memory_of` counts them; 0 on systems without /proc."""
    return _anonymous_bytes(os.getpid())


def default_memory_bytes() -> int | None:
    """Return three quarters of the machine's memory, the default limit of a worker, or None if its size is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    except (AttributeError, OSError, ValueError):
        return None


def children_of(parent: int) -> list[int]:
    """Return the ids of a process's children, including those that it adopted; an empty list without /proc."""
    return [process for process in _processes() if _parent_of(process) == parent]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit with status 1 if the parent has ended already.

    `parent` is the parent's process id. On systems other than Linux nothing is done.
    """
    if sys.platform == "linux" and _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


@contextmanager
def no_process_left() -> Iterator[None]:
    """Return a context manager that, when it ends, kills the children that this process got in it, daemons included.

    In it, a descendant whose own parent ends becomes a child of this process (`adopt_orphans`); so daemons are found
    too. Afterwards this process adopts no orphans any more, even if it did before. Processes of other users are left.
    On systems other than Linux nothing is killed.
    """
    before = set(children_of(os.getpid()))
    can_adopt = adopt_orphans()
    try:
        yield
    finally:
        if can_adopt:
            _end_children(spared=before)
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end_children(*, spared: set[int]) -> None:
    """Kill the children of this process and, once it has adopted them, their children; return when they are gone.

    Processes in `spared`, and those that belong to another user, are left.
    """
    spared = set(spared)
    while children := [child for child in children_of(os.getpid()) if child not in spared]:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except ProcessLookupError:
                continue
            except (PermissionError, ChildProcessError):  # of another user, or collected by another thread
                spared.add(child)


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent ends, and return whether the system can."""
    return sys.platform == "linux" and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def exit_when_closed(descriptor: int) -> None:
    """Start a thread that ends this process once the other end of the pipe `descriptor` is closed, and return at once.

    If this process leads its group, the whole group is killed; otherwise it exits with status 1.
    """

    def watch() -> None:
        """Wait until the pipe is closed, dropping what comes through it, and then end the process; a thread runs it."""
        while os.read(descriptor, 1):
            pass
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            kill(os.getpgrp())
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _send(group: int, number: int) -> None:
    """Send a signal to a group; do nothing if the group is gone or belongs to another user."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _processes() -> list[int]:
    """Return the ids of all processes, or an empty list on systems without /proc."""
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()] if _PROC.exists() else []


def _group_of(process: int) -> int | None:
    """Return the id of a process's group, or None if the process has ended."""
    try:
        return os.getpgid(process)
    except ProcessLookupError:  # it ended meanwhile
        return None


def _parent_of(process: int) -> int | None:
    """Return the id of a process's parent, or None if the process has ended or the system has no /proc."""
    try:
        text = (_PROC / str(process) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # the command is in parentheses, and may itself contain some
    return int(text.rpartition(")")[2].split()[1])


def _anonymous_bytes(process: int) -> int:
    """Return the bytes in memory of a process that do not belong to a file, shared memory included.

    Return 0 if the process has ended or they cannot be read.
    """
    try:
        lines = (_PROC / str(process) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    kibibytes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(map(int, kibibytes)) * 1024


def _prctl(option: int, value: int) -> bool:
    """Set a process attribute of Linux, and return whether the kernel accepted it."""
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
