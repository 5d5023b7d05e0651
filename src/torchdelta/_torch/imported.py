"""What of torch a process imports sooner or later, by name: whoever starts one early need not have torch itself."""

from __future__ import annotations


def modules_behind(backend: object) -> tuple[str, ...]:
    """Return what a process imports sooner or later that compiles by this backend."""
    is_inductor = isinstance(backend, str) and backend.removeprefix("backend:") == "inductor"
    return ("torch", "torch._inductor.compile_fx") if is_inductor else ("torch",)
