"""Handles: ids on the nodes of a graph that survive copies and rewrites, so that two graphs can be matched.

Torch carries them through export, re-export, decomposition and `node_copy`; pickling a graph loses them, and
`execute/graph_files.py` writes them to a file.

The longest common subsequence of two sequences: what occurs once on both sides splits it, so that it is fast.

Groups of nodes that share handles, and which of their nodes can be held against each other.

Which node of one graph does the work of which node of the other.

What the user says comes first, then shared handles, then names, then the order of equal operations, then equal values.
Nodes that share handles, directly or through others, form a group, because rewrites fuse and split: what must be the
same is what the group ends in, and what is inside of it is covered by that.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from torchdelta._torch.graphs import handles
from torchdelta._torch.graphs.handles import handles_of, merge_handles
from torchdelta.errors import UsageError
from torchdelta.records.location import Match, NodeRecord
from torchdelta.records.report import Coverage
from torchdelta.registry import nearest

__all__ = ["assign_handles", "handles_of", "merge_handles"]


def assign_handles(program: GraphModule | torch.export.ExportedProgram) -> None:
    """Give every node but placeholders and outputs, nested graphs included, an id; those that have one keep it."""
    if not isinstance(program, (GraphModule, torch.export.ExportedProgram)):
        raise UsageError(
            f"handles are for the nodes of a graph module or an exported program, and {type(program).__name__} has "
            "none: trace or export it first"
        )
    handles.assign_handles(program)


Pair = tuple[int, int]
Span = tuple[int, int, int, int]
"""From where to where, in the first sequence and in the second."""
_Ints = NDArray[Any]

_LARGEST_TABLE = 1_000_000
"""Cells; a larger one is halved until it is not, which takes twice the time and hardly any memory."""


def common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Pair]:
    """Return the positions of equal items, rising on both sides."""
    numbers: dict[Hashable, int] = {}
    ours = [numbers.setdefault(item, len(numbers)) for item in first]
    theirs = [numbers.setdefault(item, len(numbers)) for item in second]
    found: list[Pair] = []
    open_spans: list[Span] = [(0, len(ours), 0, len(theirs))]
    while open_spans:
        pairs, rest = _trimmed(ours, theirs, open_spans.pop())
        found += pairs
        if rest[0] == rest[1] or rest[2] == rest[3]:
            continue
        if anchors := _anchors(ours, theirs, rest):
            found += anchors
            open_spans += _between(anchors, rest)
            continue
        start, end, their_start, their_end = rest
        inner = _by_table(np.array(ours[start:end]), np.array(theirs[their_start:their_end]))
        found += [(start + one, their_start + other) for one, other in inner]
    return sorted(found)


def _trimmed(ours: list[int], theirs: list[int], span: Span) -> tuple[list[Pair], Span]:
    start, end, their_start, their_end = span
    pairs: list[Pair] = []
    while start < end and their_start < their_end and ours[start] == theirs[their_start]:
        pairs.append((start, their_start))
        start, their_start = start + 1, their_start + 1
    while start < end and their_start < their_end and ours[end - 1] == theirs[their_end - 1]:
        end, their_end = end - 1, their_end - 1
        pairs.append((end, their_end))
    return pairs, (start, end, their_start, their_end)


def _anchors(ours: list[int], theirs: list[int], span: Span) -> list[Pair]:
    """Return what occurs once on either side, as much of it as rises on both."""
    start, end, their_start, their_end = span
    counts, their_counts = Counter(ours[start:end]), Counter(theirs[their_start:their_end])
    single = {item for item, count in counts.items() if count == 1 and their_counts.get(item) == 1}
    where = {item: index for index, item in enumerate(theirs[their_start:their_end], their_start) if item in single}
    return _rising([(index, where[ours[index]]) for index in range(start, end) if ours[index] in single])


def _rising(pairs: list[Pair]) -> list[Pair]:
    """Return a longest part of the pairs, whose first places rise, in which the second places rise too."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(tails, place)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [place]
        ends[length : length + 1] = [index]
    chosen: list[Pair] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chosen.append(pairs[index])
        index = before[index]
    return chosen[::-1]


def _between(anchors: list[Pair], span: Span) -> Iterator[Span]:
    start, end, their_start, their_end = span
    for ours, theirs in (*anchors, (end, their_end)):
        yield start, ours, their_start, theirs
        start, their_start = ours + 1, theirs + 1


def _by_table(ours: _Ints, theirs: _Ints) -> list[Pair]:
    if not len(ours) or not len(theirs):
        return []
    if len(ours) == 1 or len(ours) * len(theirs) <= _LARGEST_TABLE:
        return _traced_back(ours, theirs)
    middle = len(ours) // 2
    before = _lengths(ours[:middle], theirs)[-1]
    behind = _lengths(ours[middle:][::-1], theirs[::-1])[-1][::-1]
    cut = int((before + behind).argmax())
    rest = _by_table(ours[middle:], theirs[cut:])
    return [*_by_table(ours[:middle], theirs[:cut]), *((middle + one, cut + other) for one, other in rest)]


def _lengths(ours: _Ints, theirs: _Ints, *, keeps_all: bool = False) -> list[_Ints]:
    """Return how long the common subsequence with each prefix of `theirs` is: for all of `ours`, or each prefix."""
    row = np.zeros(len(theirs) + 1, dtype=np.int32)
    rows = [row]
    for item in ours:
        longer = np.zeros_like(row)
        np.maximum.accumulate(np.maximum(row[1:], row[:-1] + (theirs == item)), out=longer[1:])
        row = longer
        if not keeps_all:
            rows.clear()
        rows.append(row)
    return rows


def _traced_back(ours: _Ints, theirs: _Ints) -> list[Pair]:
    rows = _lengths(ours, theirs, keeps_all=True)
    one, other = len(ours), len(theirs)
    found: list[Pair] = []
    while one and other:
        if ours[one - 1] == theirs[other - 1]:
            one, other = one - 1, other - 1
            found.append((one, other))
        elif rows[one - 1][other] >= rows[one][other - 1]:
            one -= 1
        else:
            other -= 1
    return found[::-1]


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


Fingerprints = tuple[Mapping[str, Hashable], Mapping[str, Hashable]]
"""What each value is, by the name of its node: of the reference and of the candidate."""

_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that share handles, in the order of their graphs."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Who matches whom, and who is left."""

    matches: tuple[Match, ...]
    """In the order of the reference. A node that was quantized is in two: with itself, and with what dequantizes it."""
    unmatched_reference: tuple[NodeRecord, ...]
    unmatched_candidate: tuple[NodeRecord, ...]
    groups: tuple[Group, ...]
    """Those of more than one node on a side, of which at least one is matched."""
    covered_reference: tuple[str, ...]
    """What is inside a group and in no match of its own."""
    covered_candidate: tuple[str, ...]
    coverage: Coverage


def align(
    reference: Sequence[NodeRecord],
    candidate: Sequence[NodeRecord],
    *,
    given: Mapping[str, str] | None = None,
    values: Fingerprints | None = None,
) -> Alignment:
    """Match the nodes of two graphs; `given` maps names of the reference to names of the candidate."""
    aligner = _Aligner(reference, candidate)
    aligner.match_given(given or {})
    aligner.match_handles()
    aligner.match_names(lambda node: (node.name, node.op, node.kinds))
    aligner.match_names(lambda node: (node.name, node.op, widthless(node.kinds)))
    aligner.match_order(lambda node: (node.op, node.kinds, node.module_path))
    aligner.match_order(lambda node: (node.op, node.kinds))
    if values is not None:
        aligner.match_values(*values)
    return aligner.alignment()


def is_nested(node: NodeRecord) -> bool:
    """Tell whether a node is in a graph that another node runs."""
    return "." in node.name


def align_outermost(
    reference: Sequence[NodeRecord], candidate: Sequence[NodeRecord], given: Mapping[str, str] | None = None
) -> Alignment:
    """Match the nodes of two graphs for who does not look into nested ones: what is in those has no match."""
    sides = (reference, candidate)
    found = align(*([node for node in nodes if not is_nested(node)] for nodes in sides), given=given)
    inside, others = ([node for node in nodes if is_nested(node)] for nodes in sides)
    return replace(
        found,
        unmatched_reference=(*found.unmatched_reference, *inside),
        unmatched_candidate=(*found.unmatched_candidate, *others),
        coverage=replace(found.coverage, total=len(reference) + len(candidate)),
    )


class _Half:
    """One side: its nodes, and how each was matched so far."""

    def __init__(self, side: str, nodes: Sequence[NodeRecord]) -> None:
        self.side = side
        self.nodes = {node.name: node for node in nodes}
        self.place = {name: index for index, name in enumerate(self.nodes)}
        self.how: dict[str, str] = {}
        self.covered: set[str] = set()

    @property
    def free(self) -> Nodes:
        return [node for name, node in self.nodes.items() if name not in self.how]

    def require(self, names: Iterable[str]) -> None:
        for name, count in Counter(names).items():
            if name not in self.nodes:
                raise UsageError(
                    f"the mapping names {name!r}, and the {self.side} has no such node: {nearest(name, self.nodes)}"
                )
            if count > 1:
                raise UsageError(f"the mapping names {name!r} of the {self.side} {count} times: a node has one partner")

    def cover(self, nodes: Nodes) -> None:
        inside = [node.name for node in nodes if node.name not in self.how]
        self.covered.update(inside)
        self.how.update(dict.fromkeys(inside, "handle"))


class _Aligner:
    def __init__(self, reference: Sequence[NodeRecord], candidate: Sequence[NodeRecord]) -> None:
        self.reference = _Half("reference", reference)
        self.candidate = _Half("candidate", candidate)
        self.matches: dict[tuple[str, str], Match] = {}
        self.groups: list[Group] = []

    def match_given(self, given: Mapping[str, str]) -> None:
        self.reference.require(given.keys())
        self.candidate.require(given.values())
        for name, other in given.items():
            self._add(name, other, "given")

    def match_handles(self) -> None:
        for ours, theirs in grouped(self.reference.free, self.candidate.free):
            pairs = [*pairs_inside(ours, theirs), *ends_of(ours, theirs)]
            for one, other in pairs:
                self._add(one.name, other.name, "handle")
            if pairs:
                self.reference.cover(ours)
                self.candidate.cover(theirs)
            if pairs and len(ours) + len(theirs) > 2:
                names = (tuple(node.name for node in nodes) for nodes in (ours, theirs))
                self.groups.append(Group(reference=next(names), candidate=next(names)))

    def match_names(self, key: Callable[[NodeRecord], Hashable]) -> None:
        """Match by a key that holds the name.

        Tracing numbers what is called alike: where one side has more of a name, the numbers mean something else there.
        """
        counts, others = (
            Counter(_unnumbered(name) for name in half.nodes) for half in (self.reference, self.candidate)
        )
        by_key = {key(node): node for node in self.candidate.free}
        for node in self.reference.free:
            other = by_key.get(key(node))
            if other is not None and counts[_unnumbered(node.name)] == others[_unnumbered(node.name)]:
                self._add(node.name, other.name, "name")

    def match_order(self, key: Callable[[NodeRecord], Hashable]) -> None:
        """Match what has the same key and stands between the same matches."""
        numbers: dict[str, dict[str, int]] = {"reference": {}, "candidate": {}}
        for number, match in enumerate(self.matches.values()):
            numbers["reference"][match.reference] = numbers["candidate"][match.candidate] = number
        halves = (self.reference, self.candidate)
        if not all(half.free for half in halves):
            return
        tokens = [
            [
                key(node) if name not in half.how else numbers[half.side].get(name, (half.side, name))
                for name, node in half.nodes.items()
            ]
            for half in halves
        ]
        names, other_names = (list(half.nodes) for half in halves)
        for place, other_place in common_subsequence(*tokens):
            if names[place] not in self.reference.how:
                self._add(names[place], other_names[other_place], "name")

    def match_values(self, reference: Mapping[str, Hashable], candidate: Mapping[str, Hashable]) -> None:
        """Match what has the same value, where no other node has it."""
        by_value = _single(self.reference.free, reference)
        for key, other in _single(self.candidate.free, candidate).items():
            if node := by_value.get(key):
                self._add(node.name, other.name, "value")

    def alignment(self) -> Alignment:
        how = Counter([*self.reference.how.values(), *self.candidate.how.values()])
        places = (self.reference.place, self.candidate.place)
        return Alignment(
            matches=tuple(
                sorted(
                    self.matches.values(), key=lambda match: (places[0][match.reference], places[1][match.candidate])
                )
            ),
            unmatched_reference=tuple(self.reference.free),
            unmatched_candidate=tuple(self.candidate.free),
            groups=tuple(self.groups),
            covered_reference=tuple(sorted(self.reference.covered, key=places[0].__getitem__)),
            covered_candidate=tuple(sorted(self.candidate.covered, key=places[1].__getitem__)),
            coverage=Coverage(matched=how.total(), total=len(places[0]) + len(places[1]), how=dict(how)),
        )

    def _add(self, reference: str, candidate: str, how: str) -> None:
        self.matches.setdefault((reference, candidate), Match(reference=reference, candidate=candidate, how=how))
        self.reference.how[reference] = self.candidate.how[candidate] = how


def _unnumbered(name: str) -> str:
    return _NUMBER.sub("", name)


def _single(nodes: Nodes, values: Mapping[str, Hashable]) -> dict[Hashable, NodeRecord]:
    """Return the nodes by kinds and value, without those that are not alone with them."""
    known = [((node.kinds, values[node.name]), node) for node in nodes if node.name in values]
    counts = Counter(key for key, _ in known)
    return {key: node for key, node in known if counts[key] == 1}
