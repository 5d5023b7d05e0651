"""The distance between two results of the same computation, if there is no truth to hold them against.

The distance is a share of the largest element. `first_difference` compares it with the distance that other last bits
of the inputs make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import Leaves

MOVED = 64.0
"""A distance of up to so many times the one that other last bits make is rounding in another order."""


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest finite |element| of `first`; 0 if no element differs.

    Two NaNs are equal, and so are two infinities of one sign. Return infinity if shapes or dtypes differ, if a NaN or
    an infinity has no equal partner, or if elements differ although all finite elements of `first` are zero.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    one, other = _wide(first), _wide(second)
    gaps = (one - other).abs()[_differs(one, other)]
    if not gaps.numel():
        return 0.0
    most, largest = float(gaps.max()), _largest(one)
    return most / largest if math.isfinite(most) and largest else math.inf


def first_difference(
    plain: Leaves, other: Leaves, moved: Sequence[Leaves], choose: Callable[[Iterable[float]], float] = min
) -> str:
    """Return path and difference, as text, of the first leaf that rounding does not explain; empty if it explains all.

    A leaf on one side only is a difference. Python numbers are compared as tensors; other objects, such as arrays,
    differ only if their types do, or if they are unequal strings. Rounding explains a `distance` of up to `MOVED` times
    the leaf's noise, and between floats always one of up to the root of the eps of the dtype in `plain`.

    `moved` has the leaves of runs on inputs with other last bits. The noise is one of their finite distances from
    `plain`, or 0 without any. `choose` picks it: `min` if one of the runs may have crossed an edge, `max` if the
    computation is linear.
    """
    for path in dict.fromkeys((*plain, *other)):
        if (path in plain) is not (path in other):
            return f"{path}: {'there, and then missing' if path in plain else 'missing, and then there'}"
        first, second = _as_tensor(plain[path]), _as_tensor(other[path])
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            if type(first) is not type(second) or (isinstance(first, str) and first != second):
                return f"{path}: {_kind(first)}, and then {_kind(second)}"
            continue
        others = [_as_tensor(leaves.get(path)) for leaves in moved]
        noises = [distance(first, third) for third in others if isinstance(third, torch.Tensor)]
        noise = choose([noise for noise in noises if math.isfinite(noise)] or [0.0])
        # a sum in another order is far nearer, and a permutation of the numbers far away
        least = torch.finfo(first.dtype).eps ** 0.5 if is_inexact(first.dtype) else 0.0
        if (gap := distance(first, second)) > max(least, MOVED * noise):
            return f"{path}: {_describe_gap(first, second, gap)}"
    return ""


def with_other_last_bits(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    """Return a dense detached copy with about half of the numbers moved by one or two last places.

    A `sign` of 1 moves them away from zero, −1 towards zero; zeros stay. The random choice of elements is the same in
    every call with the same shape. A tensor of integers or booleans is returned itself.
    """
    if not is_inexact(tensor.dtype):
        return tensor
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device)
    return (_wide(tensor) * (1 + sign * torch.finfo(tensor.dtype).eps * bits)).to(tensor.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached dense tensor in float64, or in complex128 if it is complex."""
    # torch has no arithmetic for the narrowest dtypes
    return tensor.detach().to_dense().to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that are unequal; two NaNs are equal."""
    return (one != other) & ~(one.isnan() & other.isnan())


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite |element|, or 0 without any."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _as_tensor(value: Any) -> Any:
    """Return a number as a tensor, and any other value as it is.

    A float or complex number becomes complex64, an integer int64, and a boolean bool.
    """
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    # a single number may have been rounded to the dtype of a tensor
    return torch.tensor(value).to(torch.complex64) if isinstance(value, (float, complex)) else value


def _describe_gap(first: torch.Tensor, second: torch.Tensor, gap: float) -> str:
    """Return in words how two tensors differ whose `distance` is `gap`.

    The words give the gap if it is finite, or else both dtypes and shapes if these differ, or else the first element
    that differs, with its value in each of the two.
    """
    if math.isfinite(gap):
        return f"{gap:.3g} of its largest element apart"
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{_kind(first)}, and then {_kind(second)}"
    one, other = _wide(first), _wide(second)
    differs = _differs(one, other)
    return f"{one[differs][0].item():.6g}, and then {other[differs][0].item():.6g}"


def _kind(value: Any) -> str:
    """Return dtype and shape of a tensor as a text, or the `repr` of any other value."""
    return (
        f"{value.dtype}{list(value.shape)}".removeprefix("torch.") if isinstance(value, torch.Tensor) else repr(value)
    )
