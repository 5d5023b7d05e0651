"""Ask for fewer gradients."""

from __future__ import annotations

import torch

from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose inputs that do not require grad."""
    asked = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    if len(asked) > 1 and (yield Edit(is_detached=True)):
        return
    yield from merging([Edit(inputs={name: value.detach()}) for name, value in asked.items()])
