"""How much memory this process has held at most, and whether it may have any amount."""

import resource
import sys
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
