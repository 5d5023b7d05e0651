"""Which vector instructions inductor may use, found out in forks of this process.

Inductor itself starts a new Python that loads torch for each kind. This needs nothing of torchdelta: a process that is
to have nothing of it runs this file by its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
from unittest import mock

from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

_PATIENCE_S = 60


def probe() -> None:
    """Find out once what every compile asks; it is remembered by inductor."""
    with mock.patch.object(VecISA, "_probe_load", _is_loaded):
        pick_vec_isa()


def _is_loaded(_: VecISA, library: str) -> bool:
    """Tell whether a library of vector instructions can be loaded here, which may end the process that tries."""
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(_PATIENCE_S)
            ctypes.CDLL(library)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0
