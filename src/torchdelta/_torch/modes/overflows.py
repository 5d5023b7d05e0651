"""Watch a program overflow: which operations make NaN or Inf of finite values, in which dtype and at which line.

An operation is named only if it is finite in float64: `log(0)` is infinite in every dtype, and does not overflow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.modes.elided_casts import place_of_call
from torchdelta._torch.tensors import dtype_name, has_own_buffer

_CAST = torch.ops.aten._to_copy.default


class Overflows(OperationMode):
    """While active, operations run as they are, and those that overflow are noted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, torch.dtype] = {}
        """The dtype of each operation that overflowed, by its name and line, in the order of the run."""

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and return its result; if it overflows, add its name and line with the dtype to `places`.

        It overflows if it has float operands, all of them are finite, and a result is not, although all results are
        finite in float64. An operation that writes to its operands cannot be repeated in float64, and counts as an
        overflow without that test. The dtype is that of the first result that is not finite.
        """
        kwargs = kwargs or {}
        # before the operation runs, which may write to them
        are_finite = not _has_non_finite((args, kwargs))
        result = func(*args, **kwargs)
        if not are_finite or not _floats_in((args, kwargs)) or not _has_non_finite(result):
            return result
        if func._schema.is_mutable or _is_finite_in_float64(func, args, kwargs):
            dtype = next(leaf.dtype for leaf in _floats_in(result) if _has_non_finite(leaf))
            name = "the cast" if func is _CAST else func._schema.name.partition("::")[2]
            self.places.setdefault(f"{name} to {dtype_name(dtype)} at {place_of_call()}", dtype)
        return result


def _floats_in(values: Any) -> list[torch.Tensor]:
    """Return the plain tensors of floats within nested values, without floats of a single byte."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and _is_float(leaf)]


def _has_non_finite(values: Any) -> bool:
    """Tell whether a Python float, or an element of a float tensor, within nested values is NaN or infinite."""
    numbers = (leaf for leaf in tree_leaves(values) if isinstance(leaf, float))
    return not all(map(math.isfinite, numbers)) or not all(bool(leaf.isfinite().all()) for leaf in _floats_in(values))


def _is_finite_in_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether all results of an operation are finite on its operands in float64; False if it raises there.

    The operation runs once more for that.
    """
    try:
        return not _has_non_finite(func(*tree_map(_lifted, args), **tree_map(_lifted, kwargs)))
    except (RuntimeError, NotImplementedError):
        return False


def _lifted(value: Any) -> Any:
    """Return a float tensor cast to float64, and float64 for a float dtype; any other value unchanged."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if isinstance(value, torch.Tensor) and _is_float(value) else value


def _is_float(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of floats of more than one byte, with values in a buffer of its own."""
    # a float of a single byte has no arithmetic
    return tensor.is_floating_point() and tensor.itemsize > 1 and has_own_buffer(tensor)
