"""Which elements of a result were rounded? Only those may come out otherwise in another correct program.

An operation of inexact arithmetic may still have exact results: the sum of a mask, `x / step` for multiples of the
step, a product with one, `exp` of zero. No list of operators can tell, but the value can: the operation runs once more
in float64 on the same operands, and an element that is the same there was not rounded.

    total, (wide,) = run_beside_float64(torch.ops.aten.sum.default, (torch.ones(3),), {})
    rounded_elements(total, wide)       # False: 3 is the sum

A result in float64 has no wider dtype. There an element counts as exact if float32 can hold it, which a rounded one can
with a probability of 2⁻²⁹. Start with `run_beside_float64`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdelta._torch.modes.lift import widened

_SHORT = {
    torch.bfloat16: (torch.int16, 0xF),
    torch.float16: (torch.int16, 0x3F),
    torch.float32: (torch.int32, 0xFFF),
    torch.float64: (torch.int64, 0x3FFFFFF),
}
"""For each dtype the integer of its size, and the lower half of its digits: a short element has none of those."""

_LOOPS = "torchdelta._torch.modes.numba_rounding"
_LARGE = 2**16
_BEYOND_FLOAT32 = 0x1FFFFFFF
"""The digits of a float64 that float32 does not have."""
_ALL_BUT_FIRST: tuple[int, ...] = ()
_PRODUCTS = {
    "addmm": ((1, (-1,)), (2, (-2,))),
    "addmv": ((1, (-1,)), (2, (-1,))),
    "baddbmm": ((1, (-1,)), (2, (-2,))),
    "bmm": ((0, (-1,)), (1, (-2,))),
    "convolution": ((0, _ALL_BUT_FIRST), (1, _ALL_BUT_FIRST)),
    "linear": ((0, (-1,)), (1, (-1,))),
    "mm": ((0, (-1,)), (1, (-2,))),
    "mv": ((0, (-1,)), (1, (-1,))),
}
"""For each product of two operands, by its name in aten: the places of both, and the dimensions that are summed over.

Products are what a program spends its time on, and in float64 they take twice as long: see `_may_be_exact`.
"""


def run_beside_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Run an operation; return its result, and for each output its value in float64, or None if that is not known.

    It is not known if the operation draws random numbers, raises RuntimeError in float64 or has an operand in float64
    already, and for a product of float32 that `_may_be_exact` rules out. Raise what the operation itself raises.
    """
    wide = _run_in_float64(func, args, kwargs)
    result = func(*args, **kwargs)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    wide_outputs = list(wide) if isinstance(wide, (tuple, list)) else [wide] * len(outputs)
    return result, wide_outputs


def rounded_elements(output: torch.Tensor, wide: Any) -> torch.Tensor | None:
    """Return a mask of the elements of a float output that were rounded; None if all were, or nothing is known.

    `wide` is the output in float64, or None if that is not known. It does not count for an output that is in float64
    itself: an element of that was rounded if float32 cannot hold it.
    """
    if output.dtype is torch.float64 and output.layout is torch.strided:
        # not a cast to float32, which a mode that lifts would not make
        differs = (output.detach().resolve_neg().view(torch.int64) & _BEYOND_FLOAT32) != 0
    elif is_beside(output, wide):
        differs = output.detach() != wide
    else:
        return None
    return None if bool(differs.all()) else differs


def is_beside(output: torch.Tensor, wide: Any) -> bool:
    """Tell whether `wide` is a tensor in float64 of the output's shape, and both are strided."""
    is_wide = isinstance(wide, torch.Tensor) and wide.dtype is torch.float64
    return is_wide and wide.shape == output.shape and wide.layout == output.layout == torch.strided


def compiled_loops(tensor: torch.Tensor) -> ModuleType | None:
    """Return the compiled loops of `numba_rounding` if they serve a tensor, or None if torch does.

    They serve strided float32 on the CPU. Loading numba takes as long as thousands of small operations, so a tensor of
    less than `_LARGE` elements gets None unless the loops are loaded already. None too if numba is missing.
    """
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if tensor.numel() < _LARGE and _LOOPS not in sys.modules:
        return None
    try:
        return importlib.import_module(_LOOPS)
    except ImportError:
        return None


def long_elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of the elements that need more than half of the digits of their dtype; None if all do.

    Elements of fewer digits are probably exact: whole numbers, halves and quarters, the ones of a norm's weight.
    """
    is_long = _needs_many_digits(tensor)
    return None if bool(is_long.all()) else is_long


def _run_in_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on float64 copies of its operands and return the result, or None if that says nothing.

    None if an operand is in float64 already, if the operation draws random numbers or raises RuntimeError in float64,
    and if it is a product in which `_may_be_exact` rules an exact element out. The operands stay as they are.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if torch.Tag.nondeterministic_seeded in func.tags or any(tensor.dtype is torch.float64 for tensor in tensors):
        return None
    name = func._schema.name.partition("::")[2]
    if name in _PRODUCTS and not _may_be_exact(name, args):
        return None
    convert = _converter(
        has_floats=any(tensor.is_floating_point() for tensor in tensors), copies=func._schema.is_mutable
    )
    wide_args, wide_kwargs = tree_map(convert, (args, kwargs))
    try:
        return func(*wide_args, **wide_kwargs)
    except (NotImplementedError, RuntimeError):
        return None


def _converter(*, has_floats: bool, copies: bool) -> Callable[[Any], Any]:
    """Return a function that lifts tensors and dtypes to float64 or complex128, and returns any other value unchanged.

    Tensors of other types than floats are lifted only if there are no floats among the operands (`has_floats`): beside
    floats they may be indices. `copies` copies every tensor, because the operation writes to its operands.
    """

    def convert(value: Any) -> Any:
        """Return a tensor or dtype lifted, as the outer function says, and any other value unchanged."""
        if isinstance(value, torch.dtype):
            return widened(value)
        if not isinstance(value, torch.Tensor):
            return value
        wide = torch.complex128 if value.is_complex() else torch.float64
        is_lifted = value.is_floating_point() or not has_floats
        return value.detach().to(wide if is_lifted else value.dtype, copy=copies)

    return convert


def _may_be_exact(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether a product may have an exact element other than zero, so that it pays to compute it in float64.

    An element is a sum over a row of one operand and a column of the other. If both have an element of many digits, the
    sum is rounded. So a row or column of short elements that are not all zero is needed: a one-hot row that selects,
    whole numbers. True too if an operand is not strided float32: lower dtypes have too few digits to tell.
    """
    for position, dims in _PRODUCTS[name]:
        operand = args[position]
        if operand.dtype is not torch.float32 or operand.layout is not torch.strided:
            return True
        if _has_short_row(operand.detach().resolve_neg(), dims or tuple(range(1, operand.dim()))):
            return True
    return False


def _has_short_row(operand: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Tell whether float32 elements along `dims` are all short, and not all zero, anywhere in an operand."""
    loops = compiled_loops(operand)
    if loops is not None:
        integer, digits = _SHORT[torch.float32]
        bits = operand.view(integer)
        rows = bits.flatten(dims[0]) if len(dims) > 1 else bits.movedim(dims[0], -1)
        while rows.dim() < 3:
            rows = rows[None]
        return bool(loops.has_short_row(rows.flatten(0, -3).numpy(), digits))
    is_long = _needs_many_digits(operand).any(dims)
    return not bool(is_long.all()) and bool(((operand != 0).any(dims) & ~is_long).any())


def _needs_many_digits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements of floats that have a digit other than 0 in the lower half of their digits."""
    integer, digits = _SHORT[tensor.dtype]
    return (tensor.detach().resolve_neg().view(integer) & digits) != 0
