"""What of torch a process does sooner or later, by name: whoever starts one early need not have torch itself."""

from __future__ import annotations

from pathlib import Path

_FORKING = Path(__file__).with_name("forking.py")
_OF_INDUCTOR = (
    "torch._inductor.compile_fx",
    # what the first compile imports, whatever it compiles
    "torch.distributed.tensor.experimental",
    "sympy.tensor.tensor",
)


def steps_behind(backend: object, *, forks: bool) -> tuple[str, ...]:
    """Return what a process that compiles by this backend imports, and calls, in any case.

    Each is a module, `module:function` or `file.py:function`. Where processes may fork, it is faster to find out which
    vector instructions there are.
    """
    if not isinstance(backend, str) or backend.removeprefix("backend:") != "inductor":
        return ("torch",)
    # this, and what every key of a cache starts with, take longer than a small compile
    probe = f"{_FORKING}:probe" if forks else "torch._inductor.cpu_vec_isa:pick_vec_isa"
    return ("torch", *_OF_INDUCTOR, probe, "torch._inductor.codecache:torch_key")
