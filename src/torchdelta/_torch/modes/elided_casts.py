"""Run a program without the rounding of its narrowing casts, as a compiler that keeps values wide would.

A compiler may fuse a cast to a narrower float with the elementwise operations and sums behind it, which then read the
value as it was before the cast. Such a program is closer to the truth than the reference, and still differs from it. A
check compares a candidate with a run under `Elide` to tell whether elided casts are the cause.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import torchdelta
from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.tensors import ViewKey, view_key

aten = torch.ops.aten
_FUSED_SUMS = frozenset({"amax", "amin", "mean", "prod", "sum", "var", "var_mean"})
# files whose lines are not the program's
_PLUMBING = (str(Path(torch.__file__).parent), str(Path(torchdelta.__file__).parent), "<")


def is_narrowing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call is a cast (`_to_copy`) of a float tensor to a float dtype that holds fewer digits."""
    dtype = kwargs.get("dtype")
    if func is not aten._to_copy.default or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return False
    source = args[0].dtype
    return bool(source.is_floating_point and torch.finfo(source).eps < torch.finfo(dtype).eps)


def coarser(first: torch.dtype | None, second: torch.dtype) -> torch.dtype:
    """Return the dtype that holds fewer digits; the second if the first is None."""
    return second if first is None or torch.finfo(second).eps > torch.finfo(first).eps else first


class Elide(OperationMode):
    """While active, pointwise operations and reductions read values as they were before a narrowing cast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elided: set[str] = set()
        """The source line and the dtype of each cast that was elided."""
        self.wide: dict[ViewKey, tuple[torch.Tensor, str]] = {}
        """For each narrow tensor its value before the cast, and where it was cast."""

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, on values before their narrowing casts if a compiler may fuse it, and return its result.

        - A narrowing cast, and a view of a narrow tensor, return the narrow result. Its value before the cast is kept
          in `wide`.
        - A pointwise operation, a reduction (`_FUSED_SUMS`) or a cast that writes to no operand runs on the wide values
          if its result is one float tensor. The result has its native dtype, and the casts are added to `elided`.
        - Any other operation runs on the narrow values. One that writes to a narrow tensor drops the wide values of its
          memory.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_narrowing(func, args, kwargs):
            before, place = self.wide.get(view_key(args[0]), (args[0], ""))
            self._drop_stale()
            self.wide[view_key(result)] = before, place or f"{_place()} (to {_name(result.dtype)})"
            return result
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {self.wide[view_key(leaf)][1] for leaf in operands if view_key(leaf) in self.wide}
        if not places or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        if func.is_view:
            self.wide[view_key(result)] = func(*tree_map(self._widened, args), **kwargs), "; ".join(sorted(places))
            return result
        name = func._schema.name.partition("::")[2]
        is_fused = torch.Tag.pointwise in func.tags or name in _FUSED_SUMS or func is aten._to_copy.default
        if func._schema.is_mutable:
            self._drop_stale(written=result)
            return result
        if not is_fused:
            return result
        exact = func(*tree_map(self._widened, args), **kwargs)
        self.elided |= places
        if exact.dtype != result.dtype:
            narrowed = exact.to(result.dtype)
            self.wide[view_key(narrowed)] = exact, "; ".join(sorted(places))
            return narrowed
        return exact

    def _drop_stale(self, written: torch.Tensor | None = None) -> None:
        """Drop the wide values of tensors that are freed, or share memory with the written one."""
        stale = None if written is None else view_key(written)[0]
        for key in [key for key in self.wide if key[0] == stale or key[0].expired()]:  # type: ignore[no-untyped-call]
            del self.wide[key]

    def _widened(self, value: Any) -> Any:
        """Return a tensor as it was before its cast; any other value unchanged."""
        if isinstance(value, torch.Tensor) and (wide := self.wide.get(view_key(value))) is not None:
            return wide[0]
        return value


def _place() -> str:
    """Return `file.py:12` of the innermost frame that is neither torch's nor ours; "the backward" if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PLUMBING):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the backward"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
