"""Give real numbers in float32, which everybody reads as the plain case."""

from __future__ import annotations

import torch

from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose float32 for inputs of another floating-point dtype, all at once first: they are often of one kind."""
    odd = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float32
    }
    yield from merging(
        [
            Edit(inputs={name: value.detach().to(torch.float32).requires_grad_(value.requires_grad)})
            for name, value in odd.items()
        ]
    )
