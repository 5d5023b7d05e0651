"""Replace the user's numbers by random ones, which a line of code draws."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchdelta.minify.draws import Draw
from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose a seeded draw for each input of real or complex numbers."""
    yield from merging(list(drawn(search)))


def drawn(search: Search) -> Iterator[Edit]:
    """Return a draw for each input of real or complex numbers that has none."""
    for index, (name, value) in enumerate(search.subject.named_inputs.items()):
        if name not in search.subject.drawn and _can_be_drawn(value):
            yield Edit(drawn={name: Draw(by="randn", seed=index)})


def _can_be_drawn(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    return value.is_floating_point() or value.is_complex()
