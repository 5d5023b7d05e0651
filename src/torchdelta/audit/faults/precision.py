"""Precision: right in exact arithmetic, or nearly, and rounded where it should not be.

Rounding to a lower dtype is written as a cast, which the lifted program does not do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from torchdelta.audit.faults.base import Fault
from torchdelta.audit.faults.nodes import aten, call_instead, follow, is_arithmetic, is_call, tensor_of

_HALVES = (torch.bfloat16, torch.float16)
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_BLOCKS = 8
_MAGIC = 0x5FE6EB50C7B537A9
"""Half the bits of a float64 subtracted from it are a first guess at its inverse square root."""


def linear_in_low_precision(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the linear map of rounded operands."""
    product = matmul_in_low_precision(x, weight.t())
    return product if bias is None else product + bias


def matmul_in_low_precision(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the product of operands rounded to bfloat16; where they are in half precision, the sum is rounded too."""
    if x.dtype not in _HALVES:
        return torch.matmul(x.to(torch.bfloat16).to(x.dtype), y.to(torch.bfloat16).to(y.dtype))
    width = -(-x.shape[-1] // _BLOCKS)
    starts = range(0, x.shape[-1], width)
    total = torch.matmul(x[..., :width], y[..., :width, :])
    for start in starts[1:]:
        total = total + torch.matmul(x[..., start : start + width], y[..., start : start + width, :])
    return total


def addmm_in_low_precision(
    bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return the sum of a bias and the product of rounded operands."""
    return beta * bias + alpha * matmul_in_low_precision(x, y)


def rsqrt_by_newton(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the inverse square root by a guess from the bits and some Newton steps; its gradient is scaled alike."""
    exact = torch.rsqrt(x)
    wide = x.detach().double()
    guess = (_MAGIC - (wide.view(torch.int64) >> 1)).view(torch.float64)
    for _ in range(steps):
        guess = guess * (1.5 - 0.5 * wide * guess * guess)
    # at zero and below there is nothing to approximate
    ratio = torch.where(wide > 0, guess * torch.sqrt(wide), 1.0)
    return exact * ratio.to(x.dtype)


def rounded_toward_zero(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its last bit cleared; float64 is the truth's own, and is left alone."""
    if x.dtype not in _BITS:
        return x
    cut = (x.detach().contiguous().view(_BITS[x.dtype]) & -2).view(x.dtype)
    # the difference is exact, and so is the sum: the value is cut, and the gradient goes straight through
    return torch.where(torch.isfinite(x), x + (cut - x).detach(), x)


_LOW_PRECISION: dict[object, Callable[..., torch.Tensor]] = {
    aten.addmm.default: addmm_in_low_precision,
    aten.bmm.default: matmul_in_low_precision,
    aten.linear.default: linear_in_low_precision,
    aten.matmul.default: matmul_in_low_precision,
}


def _is_product(node: Node) -> bool:
    if not is_call(node, *_LOW_PRECISION):
        return False
    factors = [tensor_of(factor) for factor in node.args[1 if is_call(node, aten.addmm.default) else 0 :][:2]]
    return all(factor is not None and factor.dim() >= 2 and factor.is_floating_point() for factor in factors)


def _is_not_in(*dtypes: torch.dtype) -> Callable[[Node], bool]:
    def is_eligible(node: Node) -> bool:
        tensor = tensor_of(node)
        return is_arithmetic(node) and tensor is not None and tensor.dtype not in dtypes

    return is_eligible


def _through(dtype: torch.dtype) -> Callable[[Node], None]:
    def plant(node: Node) -> None:
        tensor = tensor_of(node)
        assert tensor is not None
        follow(node, (aten.to.dtype, dtype), (aten.to.dtype, tensor.dtype))

    return plant


def _by_newton(steps: int) -> Callable[[Node], None]:
    def plant(node: Node) -> None:
        node.target = rsqrt_by_newton
        node.args = (node.args[0], steps)

    return plant


def _is_rsqrt(node: Node) -> bool:
    return is_call(node, aten.rsqrt.default)


FAULTS = (
    Fault(
        name="matmul_low_precision",
        summary="a matmul of operands rounded to bfloat16; in half precision, one whose partial sums are rounded",
        needs="a linear or matmul",
        is_eligible=_is_product,
        plant=call_instead(_LOW_PRECISION),
    ),
    Fault(
        name="cast_through_float16",
        summary="a result is rounded to float16",
        needs="an operation with a floating-point result in another dtype than float16",
        is_eligible=_is_not_in(torch.float16),
        plant=_through(torch.float16),
    ),
    Fault(
        name="cast_through_bfloat16",
        summary="a result is rounded to bfloat16",
        needs="an operation with a floating-point result in another dtype than bfloat16",
        is_eligible=_is_not_in(torch.bfloat16),
        plant=_through(torch.bfloat16),
    ),
    Fault(
        name="rsqrt_one_newton_step",
        summary="an inverse square root with a relative error of up to 2e-3",
        needs="an inverse square root",
        is_eligible=_is_rsqrt,
        plant=_by_newton(1),
    ),
    Fault(
        name="rsqrt_two_newton_steps",
        summary="an inverse square root with a relative error of up to 5e-6",
        needs="an inverse square root",
        is_eligible=_is_rsqrt,
        plant=_by_newton(2),
    ),
    Fault(
        name="round_toward_zero",
        summary="the last bit of a result is cleared",
        needs="an operation with a floating-point result in another dtype than float64",
        is_eligible=_is_not_in(torch.float64),
        plant=lambda node: follow(node, (rounded_toward_zero,)),
    ),
    Fault(
        name="nan_lost",
        summary="NaN becomes 0, and infinity becomes 1e30",
        needs="an operation with a floating-point result in another dtype than float16",
        is_eligible=_is_not_in(torch.float16),
        plant=lambda node: follow(node, (aten.nan_to_num.default, 0.0, 1e30, -1e30)),
    ),
)
