"""Run a program as a compiler does that keeps values wide: what is cast down and then used element by element is used
as it was before the cast.

Such a program is closer to the truth than one that rounds, and differs from it all the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.tensors import ViewKey, view_key

aten = torch.ops.aten
_FUSED_SUMS = frozenset({"amax", "amin", "mean", "prod", "sum", "var", "var_mean"})
_TORCH = str(Path(torch.__file__).parent)


def is_narrowing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation casts to a float that holds fewer digits."""
    dtype = kwargs.get("dtype")
    if func is not aten._to_copy.default or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return False
    source = args[0].dtype
    return bool(source.is_floating_point and torch.finfo(source).eps < torch.finfo(dtype).eps)


def coarser(first: torch.dtype | None, second: torch.dtype) -> torch.dtype:
    """Return which of two floats holds fewer digits."""
    return second if first is None or torch.finfo(second).eps > torch.finfo(first).eps else first


class Elide(OperationMode):
    """While active, no narrowing cast rounds what pointwise operations and sums read; `elided` names the casts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elided: set[str] = set()
        """Where a cast was elided, and to which dtype it was."""
        self.wide: dict[ViewKey, tuple[torch.Tensor, str]] = {}

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation on what its operands were before they were cast."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if is_narrowing(func, args, kwargs):
            before, place = self.wide.get(view_key(args[0]), (args[0], ""))
            self._forget()
            self.wide[view_key(made)] = before, place or f"{_place()} (to {_name(made.dtype)})"
            return made
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {self.wide[view_key(leaf)][1] for leaf in known if view_key(leaf) in self.wide}
        if not places or not isinstance(made, torch.Tensor) or not made.is_floating_point():
            return made
        if func.is_view:
            self.wide[view_key(made)] = func(*tree_map(self._widened, args), **kwargs), "; ".join(sorted(places))
            return made
        name = func._schema.name.partition("::")[2]
        is_fused = torch.Tag.pointwise in func.tags or name in _FUSED_SUMS or func is aten._to_copy.default
        if func._schema.is_mutable:
            self._forget(written=made)
            return made
        if not is_fused:
            return made
        exact = func(*tree_map(self._widened, args), **kwargs)
        self.elided |= places
        if exact.dtype != made.dtype:
            narrowed = exact.to(made.dtype)
            self.wide[view_key(narrowed)] = exact, "; ".join(sorted(places))
            return narrowed
        return exact

    def _forget(self, written: torch.Tensor | None = None) -> None:
        """Let go of what stands for tensors that are gone, or were written to."""
        stale = None if written is None else view_key(written)[0]
        for key in [key for key in self.wide if key[0] == stale or key[0].expired()]:  # type: ignore[no-untyped-call]
            del self.wide[key]

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (kept := self.wide.get(view_key(value))) is not None:
            return kept[0]
        return value


def _place() -> str:
    """Return the line of the program that runs now: the innermost outside of torch and of this package."""
    ours = str(Path(__file__).parent.parent)
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, ours, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the backward"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
