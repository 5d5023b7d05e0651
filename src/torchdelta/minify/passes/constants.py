"""Replace the user's integers and truths by zeros or ones, which a line of code makes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchdelta.minify.draws import Draw
from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose zeros, then ones, for each input that has no real numbers."""
    for make in ("zeros", "ones"):
        yield from merging(list(made(search, make)))


def made(search: Search, make: str) -> Iterator[Edit]:
    """Return zeros or ones for each input that has no real numbers."""
    for name, value in search.subject.named_inputs.items():
        is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        if not is_whole or name in search.subject.drawn or not value.is_contiguous():
            continue
        yield Edit(drawn={name: Draw(by=make)})
