"""Leave out what writes, draws or asserts, and is read by nobody."""

from __future__ import annotations

from torchdelta._torch.nodes import has_effect
from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose to drop each node that is only there for its effect."""
    names = [node.name for node in reversed(search.subject.nodes) if has_effect(node)]
    yield from merging([Edit(dropped=frozenset({name})) for name in names])
