"""The same values, lying otherwise in memory: as `t` makes a tensor, a slice, or a kernel for images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Layout = Callable[[torch.Tensor, int], torch.Tensor]
"""Lays a tensor out anew, the n-th of several."""


def contiguous(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return it row by row."""
    return tensor.contiguous()


def transposed(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return a copy whose last axis is the outermost in memory, and so on."""
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def transposed_by_turns(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return every other tensor transposed: none has the strides of its neighbour."""
    return transposed(tensor, place) if place % 2 else tensor


def with_gaps(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return a copy with something else before each element."""
    if tensor.is_floating_point() or tensor.is_complex():
        gap = torch.full_like(tensor, torch.nan)
    else:
        gap = (tensor == 0).to(tensor.dtype)  # as small as an index has to be
    return torch.stack((gap, tensor), dim=-1)[..., 1]


def channels_last(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return images with their channels innermost, and what is no image as it is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


STRIDED: Mapping[str, Layout] = {
    "transposed": transposed,
    "transposed by turns": transposed_by_turns,
    "with gaps": with_gaps,
    "channels last": channels_last,
}
"""Those that are not contiguous."""
LAYOUTS: Mapping[str, Layout] = {"contiguous": contiguous, **STRIDED}
