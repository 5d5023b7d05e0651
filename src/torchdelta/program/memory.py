"""The memory of this process: its peak, whether it is limited, and which objects the garbage collector skips."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = Path("/proc/self/status")


def is_limited() -> bool:
    """Tell whether the address space of this process has a limit (the soft `RLIMIT_AS`)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def peak_bytes() -> int:
    """Return the largest resident size of this process so far, in bytes.

    Linux's `VmHWM` is preferred, because `getrusage` of a new process begins at the size of its parent.
    """
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Frozen:
    """Whether `gc.freeze` was called. `gc.get_freeze_count` walks all frozen objects, so a yes is remembered."""

    is_known = False

    @classmethod
    def is_so(cls) -> bool:
        """Tell whether objects are frozen; once that is so, it is not looked up again."""
        cls.is_known = cls.is_known or gc.get_freeze_count() > 0
        return cls.is_known


def expect_frozen() -> None:
    """Assume from now on that living objects are frozen; the caller is about to freeze them.

    `living_set_aside` then only runs its block.
    """
    _Frozen.is_known = True


@contextmanager
def living_set_aside() -> Iterator[None]:
    """Hide living objects from the garbage collector (`gc.freeze`) while the block runs, and unfreeze them afterwards.

    Collections in the block then take less time. If objects are frozen already, the block only runs.
    """
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
