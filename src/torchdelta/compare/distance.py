"""How far two results of the same computation lie apart, where there is no truth to hold them against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import Leaves

MOVED = 64.0
"""So many times of what other last bits change is rounding in another order."""


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element; infinite where shapes, dtypes or NaN differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    one, other = _wide(first), _wide(second)
    apart = (one - other).abs()[_is_other(one, other)]
    if not apart.numel():
        return 0.0
    most, largest = float(apart.max()), _largest(one)
    return most / largest if math.isfinite(most) and largest else math.inf


def first_difference(
    plain: Leaves, other: Leaves, moved: Sequence[Leaves], choose: Callable[[Iterable[float]], float] = min
) -> str:
    """Return which leaf is another, and by how much; nothing where rounding explains all of it.

    `moved` is what comes of inputs with other last bits: what cancels out but for rounding is as far from itself. `min`
    chooses among them where one may have leapt over an edge, `max` where everything is linear and there is none.
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
        if (apart := distance(first, second)) > max(least, MOVED * noise):
            return f"{path}: {_told(first, second, apart)}"
    return ""


def with_other_last_bits(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    """Return numbers of which some are moved in their last place, away from zero or towards it."""
    if not is_inexact(tensor.dtype):
        return tensor
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device)
    return (_wide(tensor) * (1 + sign * torch.finfo(tensor.dtype).eps * bits)).to(tensor.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    # the narrowest dtypes cannot be counted with
    return tensor.detach().to_dense().to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _is_other(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one != other) & ~(one.isnan() & other.isnan())


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _as_tensor(value: Any) -> Any:
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    # a single number was rounded to what tensors have
    return torch.tensor(value).to(torch.complex64) if isinstance(value, (float, complex)) else value


def _told(first: torch.Tensor, second: torch.Tensor, apart: float) -> str:
    if math.isfinite(apart):
        return f"{apart:.3g} of its largest element apart"
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{_kind(first)}, and then {_kind(second)}"
    one, other = _wide(first), _wide(second)
    is_other = _is_other(one, other)
    return f"{one[is_other][0].item():.6g}, and then {other[is_other][0].item():.6g}"


def _kind(value: Any) -> str:
    return (
        f"{value.dtype}{list(value.shape)}".removeprefix("torch.") if isinstance(value, torch.Tensor) else repr(value)
    )
