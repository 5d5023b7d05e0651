"""Nobody outlives whom it works for: also not after kill -9, and not while busy outside of Python."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from torchdelta.isolate import groups

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
            groups.end_for_good(os.getpgrp())
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _set(option: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
