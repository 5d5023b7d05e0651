"""The same values, lying otherwise in memory: as `t` makes a tensor, or a slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last axis is the outermost in memory, and so on."""
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with a zero behind each element."""
    return torch.stack((tensor, torch.zeros_like(tensor)), dim=-1)[..., 0]


STRIDED: Mapping[str, Layout] = {"transposed": transposed, "with gaps": with_gaps}
"""Those that are not contiguous."""
LAYOUTS: Mapping[str, Layout] = {"contiguous": torch.Tensor.contiguous, **STRIDED}
