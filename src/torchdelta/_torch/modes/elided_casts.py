"""Run a program without the rounding of its narrowing casts, as a compiler that keeps values wide would.

A compiler may fuse a cast to a narrower float with the elementwise operations and sums behind it, which then read the
value as it was before the cast. An operation in bfloat16 or float16 is such a cast too: it computes in float32, and
rounds its result. Such a program is closer to the truth than the reference, and still differs from it. A check compares
a candidate with a run under `Elide` to tell whether elided casts are the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import torchdelta
from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.tensors import ViewKey, dtype_name, storage_key, storage_reference, view_key

aten = torch.ops.aten
# besides pointwise operations
_FUSED = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy", "amax", "amin",
        "cat", "mean", "prod", "sum", "var", "var_mean",
    }
)  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)
_SWEEP = 16
"""Values that are kept before those of freed tensors are dropped."""
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
    """Return the dtype that holds fewer digits; the first if both hold as many, the second if the first is None."""
    return second if first is None or torch.finfo(second).eps > torch.finfo(first).eps else first


class Elide(OperationMode):
    """While active, pointwise operations and reductions read values as they were before a narrowing cast."""

    def __init__(self) -> None:
        """Begin without elided casts and without values from before a cast."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.elided: set[str] = set()
        """The source line and the dtype of each cast that was elided."""
        self.wide: dict[ViewKey, tuple[torch.Tensor, frozenset[str]]] = {}
        """For each narrow tensor its value before the cast, and the source line and dtype of each cast up to it."""
        self.kept = 0
        """How many values were kept so far."""

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, on values before their narrowing casts if a compiler may fuse it, and return its result.

        - An operation that writes to memory runs on the narrow values. The wide values of that memory are dropped.
        - A narrowing cast, and a view of a narrow tensor, return the narrow result. Its value before the cast is kept
          in `wide`.
        - A pointwise operation, or one of `_FUSED`, runs on the wide values if its result is one float tensor and it
          does not draw random numbers. The result has its native dtype, and the casts are added to `elided`. If that
          dtype is narrow, the value before rounding is kept, whether or not there was a cast before.
        - Any other operation runs on the narrow values, and so does one that refuses the wide ones.
        """
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._prepare_writes(written_by(func, args, kwargs))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not operands or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        wide = [self.wide[key] for key in map(_key, operands) if key in self.wide]
        places: frozenset[str] = frozenset().union(*(places for _, places in wide))
        if is_narrowing(func, args, kwargs):
            before = wide[0][0] if wide else args[0]
            return self._keep(result, before, places or _place_of_cast(result))
        name = func._schema.name.partition("::")[2]
        # random numbers are not drawn twice
        is_fused = (torch.Tag.pointwise in func.tags or name in _FUSED) and not _draws(func)
        reads_wide = bool(wide) and (is_fused or func.is_view)
        if not reads_wide and not (is_fused and result.dtype in _NARROW):
            return result
        # all operands in one dtype, because some operations refuse two
        dtypes = [tensor.dtype for tensor, _ in wide] or [torch.float32]
        dtype = max(dtypes, key=lambda dtype: -torch.finfo(dtype).eps)
        try:
            exact = func(*tree_map(lambda value: _at_least(self._widened(value), dtype), args), **kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            return result
        if func.is_view or not wide:
            return self._keep(result, exact, places or _place_of_cast(result))
        self.elided |= places
        return exact if exact.dtype == result.dtype else self._keep(exact.to(result.dtype), exact, places)

    def _keep(self, narrow: torch.Tensor, wide: torch.Tensor, places: frozenset[str]) -> torch.Tensor:
        """Keep the wide value of a narrow tensor and the places of its casts in `wide`; return `narrow`.

        Nothing is kept if the shapes differ or the narrow tensor has no plain memory. From time to time, values of
        freed tensors are dropped.
        """
        if narrow.shape == wide.shape and (key := _key(narrow)) is not None:
            self.kept += 1
            if self.kept % _SWEEP == 0:
                self._drop_freed()
            self.wide[key] = wide, places
        return narrow

    def _prepare_writes(self, written: list[torch.Tensor]) -> None:
        """Drop the wide values of memory that is written to next; copy those that lie in such memory themselves.

        Wide values of freed tensors are dropped too.
        """
        storages = {storage_reference(tensor) for tensor in written if storage_key(tensor)}
        self._drop_freed()
        for key, (wide, places) in list(self.wide.items()):
            if key[0] in storages:
                del self.wide[key]
            elif storage_reference(wide) in storages:
                self.wide[key] = wide.clone(), places

    def _drop_freed(self) -> None:
        """Drop the wide values of tensors whose memory is freed."""
        for key in [key for key in self.wide if key[0].expired()]:  # type: ignore[no-untyped-call]
            del self.wide[key]

    def _widened(self, value: Any) -> Any:
        """Return the wide value of a tensor that has one in `wide`; any other value unchanged."""
        if isinstance(value, torch.Tensor) and (key := _key(value)) in self.wide:
            return self.wide[key][0]
        return value


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, by the schema of its operation; those within lists too."""
    slots = func._schema.arguments
    values = [(slot, args[place] if place < len(args) else kwargs.get(slot.name)) for place, slot in enumerate(slots)]
    written = [value for slot, value in values if slot.alias_info is not None and slot.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _draws(func: Any) -> bool:
    """Tell by its tags whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _key(tensor: torch.Tensor) -> ViewKey | None:
    """Return the key of the elements of a tensor, or None if it has no plain memory, as a sparse one."""
    return view_key(tensor) if storage_key(tensor) else None


def _at_least(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of a coarser float dtype cast to `dtype`; any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and coarser(value.dtype, dtype) is not dtype:
        return value.to(dtype)
    return value


def _place_of_cast(narrow: torch.Tensor) -> frozenset[str]:
    """Return a set of one text: the source line of the present call, and the dtype of the narrow tensor."""
    return frozenset({f"{place_of_call()} (to {dtype_name(narrow.dtype)})"})


def place_of_call() -> str:
    """Return `file.py:12` of the innermost frame in a file that is neither torch's nor ours, or else "the backward".

    Code without a file, such as `<string>` or what torch generates, is passed over.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PLUMBING):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the backward"
