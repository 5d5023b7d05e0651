"""Groups of nodes that share handles, and which of their nodes can be held against each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torchdelta.records.location import NodeRecord

Nodes = Sequence[NodeRecord]

_GETITEM = "getitem"
_FLOAT = re.compile(r"\b(?:bfloat|float)\d\w*")


def grouped(reference: Nodes, candidate: Nodes) -> list[tuple[Nodes, Nodes]]:
    """Return the nodes that share handles, directly or through others, where both sides have some."""
    parents: dict[int, int] = {}

    def root(handle: int) -> int:
        while (parent := parents.setdefault(handle, handle)) != handle:
            # halving the way keeps it short however long the chain of fusions is
            parents[handle] = handle = parents[parent]
        return handle

    for node in (*reference, *candidate):
        for handle in node.handles[1:]:
            parents[root(handle)] = root(node.handles[0])
    groups: dict[int, tuple[list[NodeRecord], list[NodeRecord]]] = {}
    for side, nodes in enumerate((reference, candidate)):
        for node in nodes:
            if node.handles:
                groups.setdefault(root(node.handles[0]), ([], []))[side].append(node)
    return [(ours, theirs) for ours, theirs in groups.values() if ours and theirs]


def pairs_inside(reference: Nodes, candidate: Nodes) -> Iterator[tuple[NodeRecord, NodeRecord]]:
    """Yield the nodes of a group that are the same node on both sides.

    They have the same operator, kinds and handles, and no other node has those handles or they have the same name. One
    part of a result may have lost the handle of its own.
    """
    counts, others = (Counter(node.handles for node in nodes) for nodes in (reference, candidate))
    by_name = {node.name: node for node in candidate}
    by_handles = {node.handles: node for node in candidate}
    for node in reference:
        is_single = counts[node.handles] == 1 and others[node.handles] == 1
        other = by_handles[node.handles] if is_single else by_name.get(node.name)
        if other is None or (node.op, node.kinds) != (other.op, other.kinds):
            continue
        if node.handles == other.handles or node.op == _GETITEM:
            yield node, other


def ends_of(reference: Nodes, candidate: Nodes) -> Iterator[tuple[NodeRecord, NodeRecord]]:
    """Yield what a group ends in on either side, where that can be the same."""
    last, other = reference[-1], candidate[-1]
    is_same_operation = last.op == other.op or len(reference) == len(candidate) == 1
    if is_same_operation or (_GETITEM not in (last.op, other.op) and _agree(last, other)):
        # of one operation that returns another kind than it did, that is what must be told
        yield last, other
    elif last.op == _GETITEM:
        yield from _only([(part, other) for part in reference if part.op == _GETITEM and _agree(part, other)])
    elif other.op == _GETITEM:
        yield from _only([(last, part) for part in candidate if part.op == _GETITEM and _agree(last, part)])


def widthless(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return kinds with all floats alike: a cast changes how wide they are."""
    return tuple(_FLOAT.sub("float", kind) for kind in kinds)


def _agree(reference: NodeRecord, candidate: NodeRecord) -> bool:
    """Tell whether two nodes can return the same, as far as anybody said what they return."""
    if not reference.kinds or not candidate.kinds:
        return True
    return widthless(reference.kinds) == widthless(candidate.kinds)


def _only(pairs: list[tuple[NodeRecord, NodeRecord]]) -> list[tuple[NodeRecord, NodeRecord]]:
    # of several that would fit nobody can tell which one it is
    return pairs if len(pairs) == 1 else []
