"""How far two results of the same computation lie apart, where there is no truth to hold them against."""

from __future__ import annotations

import math

import torch


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element; infinite where shapes, dtypes or NaN differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    # the narrowest dtypes cannot be counted with
    wide = torch.complex128 if first.dtype.is_complex else torch.float64
    one, other = (tensor.detach().to_dense().to(wide) for tensor in (first, second))
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs()[~is_same]
    if not apart.numel():
        return 0.0
    most, largest = float(apart.max()), _largest(one)
    return most / largest if math.isfinite(most) and largest else math.inf


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
