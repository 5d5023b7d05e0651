"""What of torch a process does sooner or later, by name: whoever starts one early need not have torch itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_INSTRUCTIONS = Path(__file__).with_name("instructions.py")
# a process that loaded Apple's frameworks must not fork
_CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"
_OF_INDUCTOR = (
    "torch._inductor.compile_fx",
    # what the first compile imports, whatever it compiles
    "torch.distributed.tensor.experimental",
    "sympy.tensor.tensor",
    # which vector instructions there are, and what every key of a cache starts with: more than a small compile takes
    f"{_INSTRUCTIONS}:probe" if _CAN_FORK else "torch._inductor.cpu_vec_isa:pick_vec_isa",
    "torch._inductor.codecache:torch_key",
)


def steps_behind(backend: object) -> tuple[str, ...]:
    """Return what a process that compiles by this backend imports, and calls, in any case.

    Each is a module, `module:function` or `file.py:function`.
    """
    is_inductor = isinstance(backend, str) and backend.removeprefix("backend:") == "inductor"
    return ("torch", *_OF_INDUCTOR) if is_inductor else ("torch",)
