"""Cut off what comes after the failure, then what comes before it, by halving."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchdelta.minify.edit import Edit, can_be_given
from torchdelta.minify.search import Proposals, Search
from torchdelta.minify.subject import Subject


def propose(search: Search) -> Proposals:
    """Propose ever shorter beginnings of the graph, then ever shorter ends of what is left."""
    subject = search.subject
    yield from _halving(len(subject.nodes), lambda count: _beginning(subject, count))
    rest = search.subject
    # the other way round: the more is cut, the less is left
    total = len(rest.nodes)
    yield from _halving(total, lambda count: _end(rest, total - count))


def _halving(total: int, edit: Callable[[int], Edit]) -> Proposals:
    """Propose edits that leave a number of nodes, and find the smallest that is taken."""
    too_few, enough = 0, total
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (yield edit(middle)):
            enough = middle
        else:
            too_few = middle


def _beginning(subject: Subject, count: int) -> Edit:
    nodes = subject.nodes
    inside = {node.name for node in nodes[:count]}
    returned = set(subject.outputs)
    ends = [
        node.name
        for node in nodes[:count]
        if isinstance(subject.values[node.name], torch.Tensor)
        and (node.name in returned or any(user.name not in inside for user in node.users))
    ]
    return Edit(outputs=tuple(ends), dropped=frozenset(node.name for node in nodes[count:]))


def _end(subject: Subject, count: int) -> Edit:
    before = [node.name for node in subject.nodes[:count]]
    cut = frozenset(name for name in before if can_be_given(subject.values[name]))
    return Edit(cut=cut, unreturned=frozenset(before), dropped=frozenset(before))
