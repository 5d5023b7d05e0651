"""Replace the user's numbers by random ones, which a line of code draws."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchdelta.minify.draws import Draw
from torchdelta.minify.edit import Edit
from torchdelta.minify.reducer import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose a seeded draw for each input of real numbers."""
    yield from merging(list(drawn(search)))


def drawn(search: Search) -> Iterator[Edit]:
    """Return a draw for each input of real numbers that has none."""
    for index, (name, value) in enumerate(search.subject.named_inputs.items()):
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point() and value.is_contiguous()
        if not is_real or name in search.subject.drawn:
            continue
        yield Edit(drawn={name: Draw(by="randn", seed=index)})
