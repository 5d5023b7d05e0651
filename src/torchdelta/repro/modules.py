"""Modules of torch.nn as the calls that build them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchdelta._torch import runtime
from torchdelta.errors import ReproUnwritable


def write_module(module: nn.Module, name: str) -> str:
    """Return an expression that builds such a module, whose parameters and buffers are anybody's."""
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind:
        raise ReproUnwritable(
            f"the graph calls {name}, a {kind.__module__}.{kind.__qualname__}, which no script of torch alone can "
            "build: trace through it"
        )
    if kind is nn.Sequential:
        parts = ", ".join(write_module(part, f"{name}.{step}") for step, part in module.named_children())
        written = f"torch.nn.Sequential({parts})"
    else:
        written = f"torch.nn.{module!r}"
        if not _is_rebuilt(module, written):
            raise ReproUnwritable(f"the graph calls {name}, and {module!r} does not say all that it was built with")
    return written if module.training else f"{written}.eval()"


def _is_rebuilt(module: nn.Module, written: str) -> bool:
    try:
        with runtime.drawing_from():
            made = eval(written, {"torch": torch})
    except Exception:
        return False
    return type(made) is type(module) and repr(made) == repr(module) and _traits(made) == _traits(module)


def _traits(module: nn.Module) -> tuple[Any, ...]:
    state = {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    plain = (bool, int, float, str, tuple, type(None))
    settings = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "training"
    }
    return state, settings
