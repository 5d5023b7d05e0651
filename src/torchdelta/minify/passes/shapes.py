"""Write numbers down: what is only needed for its size goes, and sizes become literals."""

from __future__ import annotations

from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose the value itself for each number that is computed or given."""
    numbers = [
        node.name
        for node in search.subject.graph.graph.nodes
        if node.op != "output" and isinstance(search.subject.values[node.name], (bool, int, float))
    ]
    yield from merging([Edit(instead={name: search.subject.values[name]}) for name in numbers])
