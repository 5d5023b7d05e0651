"""How much memory this process has held at most, whether it may have any amount, and what is not collected."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")


def is_limited() -> bool:
    """Tell whether somebody has set a limit to what this process may hold."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def peak_bytes() -> int:
    """The largest resident size of this process so far.

    `getrusage` of a process started by a larger one begins at the size of the one that started it: Linux's own
    account of the process is asked first.
    """
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Frozen:
    """Whether somebody has frozen what is alive. Asking costs as much as all that is frozen: a yes is remembered."""

    is_known = False

    @classmethod
    def is_so(cls) -> bool:
        cls.is_known = cls.is_known or gc.get_freeze_count() > 0
        return cls.is_known


def expect_frozen() -> None:
    """Take what is alive for frozen from now on, without asking: whoever called this freezes it."""
    _Frozen.is_known = True


@contextmanager
def living_set_aside() -> Iterator[None]:
    """Keep what is alive already out of the garbage collections between the sides: they cost a tenth of a second."""
    if _Frozen.is_so():
        yield
        return
    gc.freeze()
    _Frozen.is_known = True
    try:
        yield
    finally:
        gc.unfreeze()
        _Frozen.is_known = False
