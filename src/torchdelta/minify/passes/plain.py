"""Make every value plain at once: most failures are a matter of the graph alone, and this is all there is to ask."""

from __future__ import annotations

from torchdelta.minify.edit import merged
from torchdelta.minify.passes import constants, numbers, sizes
from torchdelta.minify.search import Proposals, Search


def propose(search: Search) -> Proposals:
    """Propose drawn numbers, zeros and small sizes together."""
    yield merged([*numbers.drawn(search), *constants.made(search, "zeros"), sizes.all_small(search)])
