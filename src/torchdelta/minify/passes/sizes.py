"""Make tensors small."""

from __future__ import annotations

from torchdelta.minify.edit import Edit
from torchdelta.minify.resize import sizes_of
from torchdelta.minify.search import Proposals, Search

SMALL = 2
"""Small enough to read, and large enough to tell elements apart."""
LEAST_ODD = 3


def propose(search: Search) -> Proposals:
    """Propose all sizes small, then all half as large, then each."""
    if (yield all_small(search)):
        return
    # what hangs together is halved together, and a failure that needs much of something loses nothing on the way
    while (yield Edit(sizes={size: _half(size) for size in _large(search)})):
        pass
    for size in _large(search):
        if (yield Edit(sizes={size: _half(size)})):
            yield from _smaller(_half(size))
        elif size % 2 and size > LEAST_ODD:  # some fail for what is left over
            yield Edit(sizes={size: LEAST_ODD})


def all_small(search: Search) -> Edit:
    """Return the edit by which nothing is large any more."""
    return Edit(sizes=dict.fromkeys(_large(search), SMALL))


def _smaller(size: int) -> Proposals:
    """Propose what is left of a size that could be halved."""
    if (yield Edit(sizes={size: SMALL})):
        return
    while (yield Edit(sizes={size: _half(size)})):
        size = _half(size)


def _large(search: Search) -> list[int]:
    return sorted((size for size in sizes_of(search.subject) if size > SMALL), reverse=True)


def _half(size: int) -> int:
    return max(SMALL, size // 2)
