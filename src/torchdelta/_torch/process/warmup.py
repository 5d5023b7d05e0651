"""Names of the imports and calls that a compiling process needs anyway, so that it can do them before its work comes.

They are names and not functions, because the process that starts another one early may not have imported torch itself.
"""

from __future__ import annotations

from pathlib import Path

_FORKING = Path(__file__).with_name("forking.py")
_OF_INDUCTOR = (
    "torch._inductor.compile_fx",
    # every first compile imports these
    "torch.distributed.tensor.experimental",
    "sympy.tensor.tensor",
)


def warmup_steps(backend: object, *, forks: bool) -> tuple[str, ...]:
    """Return, in order, the imports and calls that every process that compiles with this backend can do beforehand.

    Each is a module, `module:function` or `file.py:function`. For any other backend than `inductor` or
    `backend:inductor`, only torch is imported. With `forks`, vector instructions are probed in forks, which is faster.
    """
    if not isinstance(backend, str) or backend.removeprefix("backend:") != "inductor":
        return ("torch",)
    # the probe and the key take longer than a small compile
    probe = f"{_FORKING}:probe" if forks else "torch._inductor.cpu_vec_isa:pick_vec_isa"
    return ("torch", *_OF_INDUCTOR, probe, "torch._inductor.codecache:torch_key")
