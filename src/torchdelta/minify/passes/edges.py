"""Give what was computed: a node becomes an input with the value that the reference has there."""

from __future__ import annotations

from torchdelta.minify.edit import Edit, can_be_given
from torchdelta.minify.search import Proposals, Search, merging


def propose(search: Search) -> Proposals:
    """Propose to cut behind each node."""
    subject = search.subject
    # late nodes first: one success removes every ancestor that only it used
    names = [node.name for node in reversed(subject.nodes) if node.users and can_be_given(subject.values[node.name])]
    yield from merging([Edit(cut=frozenset({name}), dropped=frozenset({name})) for name in names])
