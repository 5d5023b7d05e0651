"""Fresh inputs of the same kind: dtype, shape, strides, aliasing and value range stay, the values do not.

A value that was baked into a trace shows as soon as the inputs change.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.compare.leaves import leaves_of


def randomise(inputs: Any, *, seed: int) -> None:
    """Overwrite every tensor of the inputs in place; a single integer and a constant stay."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for value in leaves_of(inputs).values():
        if not isinstance(value, torch.Tensor) or not (key := tensors.storage_key(value)) or key in done:
            continue
        done.add(key)
        # the whole storage is drawn anew, so that views of one another still agree
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        with torch.no_grad():
            whole.copy_(_drawn_like(whole, generator))


def _drawn_like(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if values.is_complex():
        return torch.view_as_complex(_drawn_like(torch.view_as_real(values), generator).contiguous())
    flat = values.detach().cpu()
    if flat.dtype is torch.bool:
        both = bool(flat.any()) and not bool(flat.all())
        return torch.rand(flat.shape, generator=generator) < flat.double().mean() if both else flat
    if not flat.is_floating_point():
        wide = flat.to(torch.int64)  # the unsigned types have no minimum of their own
        low, high = int(wide.min()), int(wide.max())
        return torch.randint(low, high + 1, flat.shape, generator=generator) if low < high else flat
    wide = flat.double()
    finite = wide[torch.isfinite(wide)]
    if wide.numel() == 1:
        return wide * (0.5 + torch.rand((), generator=generator, dtype=torch.float64))
    if finite.numel() < 2:
        return wide
    drawn = finite.mean() + finite.std() * torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.isfinite(wide), drawn.clamp(finite.min(), finite.max()), wide)
