"""Faults in precision: the result is right in exact arithmetic, or nearly, but rounded where it should not be.

Rounding to a lower dtype is written as a cast, because the program in float64 skips casts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from torchdelta.audit.faults.base import (
    Fault,
    add_after,
    aten,
    has_result,
    is_call,
    needs_result,
    replace_call,
    result_fault,
    tensor_of,
)

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_INTEGER_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_BLOCKS = 8
"""The number of partial sums of a matmul in half precision."""
_RSQRT_MAGIC = 0x5FE6EB50C7B537A9
"""The known constant for float64: minus half the bits of a number, it is a first guess at the inverse square root."""


def linear_in_low_precision(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the linear map of operands that were rounded as in `matmul_in_low_precision`."""
    product = matmul_in_low_precision(x, weight.t())
    return product if bias is None else product + bias


def matmul_in_low_precision(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the matrix product of operands that are rounded to bfloat16 and back to their own dtype.

    If `x` is in bfloat16 or float16, they are not rounded. Instead, the inner dimension is cut into up to `_BLOCKS`
    parts, whose products are added in that dtype. An inner dimension of size 0 is not cut.
    """
    if x.dtype not in _HALF_DTYPES or not x.shape[-1]:
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
    """Return `beta` times a bias plus `alpha` times the product of `x` and `y` by `matmul_in_low_precision`."""
    return beta * bias + alpha * matmul_in_low_precision(x, y)


def rsqrt_by_newton(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the inverse square root by a guess from the bits of the number in float64 and `steps` Newton steps.

    At infinity, zero and below it is exact: zero, infinity or NaN. The gradient has the relative error of the result.
    """
    exact = torch.rsqrt(x)
    wide = x.detach().double()
    guess = (_RSQRT_MAGIC - (wide.view(torch.int64) >> 1)).view(torch.float64)
    for _ in range(steps):
        guess = guess * (1.5 - 0.5 * wide * guess * guess)
    # at infinity, zero and below the exact value is kept
    ratio = torch.where((wide > 0) & (wide < torch.inf), guess * torch.sqrt(wide), 1.0)
    return exact * ratio.to(x.dtype)


def round_toward_zero(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the last bit of each finite element cleared; the gradient passes unchanged.

    A tensor that is not float32, float16 or bfloat16 is returned itself, because the truth is computed in float64.
    """
    if x.dtype not in _INTEGER_DTYPES:
        return x
    cut = (x.detach().contiguous().view(_INTEGER_DTYPES[x.dtype]) & -2).view(x.dtype)
    # difference and sum are exact, so the value is cut and the gradient passes unchanged
    return torch.where(torch.isfinite(x), x + (cut - x).detach(), x)


_LOW_PRECISION: dict[object, Callable[..., torch.Tensor]] = {
    aten.addmm.default: addmm_in_low_precision,
    aten.bmm.default: matmul_in_low_precision,
    aten.linear.default: linear_in_low_precision,
    aten.matmul.default: matmul_in_low_precision,
    aten.mm.default: matmul_in_low_precision,
}


def _is_product(node: Node) -> bool:
    """Tell whether the node calls a key of `_LOW_PRECISION` on floating-point tensors.

    Both factors must have two dimensions or more; the tensor that addmm adds does not count.
    """
    if not is_call(node, *_LOW_PRECISION):
        return False
    factors = [tensor_of(factor) for factor in node.args[1 if is_call(node, aten.addmm.default) else 0 :][:2]]
    return all(factor is not None and factor.dim() >= 2 and factor.is_floating_point() for factor in factors)


def _cast_fault(dtype: torch.dtype) -> Fault:
    """Return a fault that casts a floating-point result to the dtype and back to its own.

    The eligible nodes are those of `has_result`: computed results of two elements or more that have another dtype.
    """

    def plant(node: Node) -> None:
        tensor = tensor_of(node)
        assert tensor is not None
        add_after(node, (aten.to.dtype, dtype), (aten.to.dtype, tensor.dtype))

    name = str(dtype).removeprefix("torch.")
    return Fault(
        name=f"cast_through_{name}",
        summary=f"a result is rounded to {name}",
        needs=needs_result(dtype),
        is_eligible=has_result(dtype),
        plant=plant,
    )


def _newton_fault(name: str, steps: int, error: str) -> Fault:
    """Return a fault that lets an rsqrt call `rsqrt_by_newton` with so many steps.

    `error` is the relative error of that, as text for the summary.
    """

    def plant(node: Node) -> None:
        node.target = rsqrt_by_newton
        node.args = (node.args[0], steps)

    return Fault(
        name=name,
        summary=f"an inverse square root with a relative error of up to {error}",
        needs="an inverse square root",
        is_eligible=lambda node: is_call(node, aten.rsqrt.default),
        plant=plant,
    )


FAULTS = (
    Fault(
        name="matmul_low_precision",
        summary="a matmul of operands rounded to bfloat16; in half precision, one whose partial sums are rounded",
        needs="a linear or matmul",
        is_eligible=_is_product,
        plant=replace_call(_LOW_PRECISION),
    ),
    _cast_fault(torch.float16),
    _cast_fault(torch.bfloat16),
    _newton_fault("rsqrt_one_newton_step", 1, "2e-3"),
    _newton_fault("rsqrt_two_newton_steps", 2, "5e-6"),
    result_fault(
        "round_toward_zero", "the last bit of a result is cleared", (round_toward_zero,), without=torch.float64
    ),
    result_fault(
        "nan_lost",
        "NaN becomes 0, and infinity becomes 1e30",
        (aten.nan_to_num.default, 0.0, 1e30, -1e30),
        without=torch.float16,
    ),
)
