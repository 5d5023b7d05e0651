"""Lay inputs out in memory as plainly as possible."""

from __future__ import annotations

import torch

from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose contiguous inputs."""
    strided = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and not value.is_contiguous()
    }
    yield from merging(
        [
            Edit(inputs={name: value.detach().contiguous().requires_grad_(value.requires_grad)})
            for name, value in strided.items()
        ]
    )
