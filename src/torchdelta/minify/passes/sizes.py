"""Make tensors small."""

from __future__ import annotations

from torchdelta.minify.edit import Edit
from torchdelta.minify.reducer import Proposals, Search, merging
from torchdelta.minify.resize import sizes_of

SMALL = 2
"""Small enough to read, and large enough to tell elements apart."""


def propose(search: Search) -> Proposals:
    """Propose all sizes small, then each, then the stubborn ones half as large."""
    large = sorted((size for size in sizes_of(search.subject) if size > SMALL), reverse=True)
    yield from merging([Edit(sizes={size: SMALL}) for size in large])
    for stubborn in sorted(sizes_of(search.subject), reverse=True):
        size = stubborn
        while size > SMALL + 1 and (yield Edit(sizes={size: size // 2})):
            size //= 2
