"""Matching: which node of one graph does the work of which node of another.

The surest evidence comes first: the user's mapping, then shared handles, then names, then the order of equal
operations, then equal values. A node that none of these match is listed as unmatched.

A handle is an id on a node that survives copies and rewrites. Torch carries it through export, re-export,
decomposition and `node_copy`; pickling loses it, and `storage` writes it to a file. Rewrites fuse and split nodes, so
nodes that share handles, directly or through others, form a group. The last nodes of both sides of a group must
compute the same; the nodes inside are covered by them:

    reference   linear                  handles (7,)
    candidate   t → mm → add            handles (7,) each: linear is matched with add, t and mm are covered

Start with `align`; `_Aligner` has one method for each kind of evidence. `common_subsequence`, at the end, is the
algorithm behind the order of equal operations.
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

__all__ = [
    "Alignment",
    "NodeGroup",
    "align",
    "align_outermost",
    "assign_handles",
    "common_subsequence",
    "handles_of",
    "is_nested",
    "merge_handles",
]
NodeRecords = Sequence[NodeRecord]
Fingerprints = tuple[Mapping[str, Hashable], Mapping[str, Hashable]]
"""A key for the value of each node, by the node's name: of the reference, and of the candidate."""
Positions = tuple[int, int]
"""The position of an item in the first sequence, and that of the same item in the second."""
Span = tuple[int, int, int, int]
"""Start and end in the first sequence, start and end in the second."""
_IntArray = NDArray[Any]
_GETITEM = "getitem"
_FLOAT = re.compile(r"\b(?:bfloat|float)\d\w*")
_NUMBER = re.compile(r"_\d+$")
_LARGEST_TABLE = 1_000_000
"""Cells. A larger table is split in halves until it fits, which takes twice the time and hardly any memory."""


def assign_handles(program: GraphModule | torch.export.ExportedProgram) -> None:
    """Give an id to every node that has none, except placeholders and outputs; nested graphs are included.

    The metadata of the nodes is changed in place. Raise UsageError for anything but a graph module or an exported
    program.
    """
    if not isinstance(program, (GraphModule, torch.export.ExportedProgram)):
        raise UsageError(
            f"handles are for the nodes of a graph module or an exported program, and {type(program).__name__} has "
            "none: trace or export it first"
        )
    handles.assign_handles(program)


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes that share handles, in the order of their graphs."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The matched nodes of two graphs, and the nodes without a match."""

    matches: tuple[Match, ...]
    """In the order of the reference. A quantized node is in two matches: with itself, and with its dequantize node."""
    unmatched_reference: tuple[NodeRecord, ...]
    unmatched_candidate: tuple[NodeRecord, ...]
    groups: tuple[NodeGroup, ...]
    """The groups with more than one node on a side, of which at least one is matched."""
    covered_reference: tuple[str, ...]
    """The nodes inside a group that are in no match of their own."""
    covered_candidate: tuple[str, ...]
    coverage: Coverage


def align(
    reference: Sequence[NodeRecord],
    candidate: Sequence[NodeRecord],
    *,
    mapping: Mapping[str, str] | None = None,
    values: Fingerprints | None = None,
) -> Alignment:
    """Match the nodes of two graphs by mapping, handles, names, order and values; return matches and unmatched nodes.

    `mapping` has the user's matches, from names of the reference's nodes to the candidate's; raise UsageError if it
    names an unknown node, or a node twice. `values` has keys for the values of both sides' nodes, by name; without it,
    nodes are not matched by equal values.
    """
    aligner = _Aligner(reference, candidate)
    aligner.match_mapping(mapping or {})
    aligner.match_handles()
    aligner.match_names(lambda node: (node.name, node.op, node.kinds))
    aligner.match_names(lambda node: (node.name, node.op, without_float_widths(node.kinds)))
    aligner.match_order(lambda node: (node.op, node.kinds, node.module_path))
    aligner.match_order(lambda node: (node.op, node.kinds))
    if values is not None:
        aligner.match_values(*values)
    return aligner.alignment()


def align_outermost(
    reference: Sequence[NodeRecord], candidate: Sequence[NodeRecord], mapping: Mapping[str, str] | None = None
) -> Alignment:
    """Match the nodes of two graphs without looking into nested graphs, whose nodes count as unmatched.

    Raise UsageError if the mapping names an unknown or nested node, or a node twice.
    """
    sides = (reference, candidate)
    outermost = align(*([node for node in nodes if not is_nested(node)] for nodes in sides), mapping=mapping)
    inside, others = ([node for node in nodes if is_nested(node)] for nodes in sides)
    return replace(
        outermost,
        unmatched_reference=(*outermost.unmatched_reference, *inside),
        unmatched_candidate=(*outermost.unmatched_candidate, *others),
        coverage=replace(outermost.coverage, total=len(reference) + len(candidate)),
    )


def is_nested(node: NodeRecord) -> bool:
    """Tell whether a node is in a nested graph, which another node runs."""
    return "." in node.name


class _Aligner:
    """Matches two lists of nodes step by step; each step looks only at nodes that no step before has matched."""

    def __init__(self, reference: Sequence[NodeRecord], candidate: Sequence[NodeRecord]) -> None:
        self.reference = _AlignedSide("reference", reference)
        self.candidate = _AlignedSide("candidate", candidate)
        self.matches: dict[tuple[str, str], Match] = {}
        self.groups: list[NodeGroup] = []

    def match_mapping(self, mapping: Mapping[str, str]) -> None:
        """Match nodes as the user's mapping says; raise UsageError if it names an unknown node, or a node twice."""
        self.reference.require_names(mapping.keys())
        self.candidate.require_names(mapping.values())
        for name, other in mapping.items():
            self._add(name, other, "given")

    def match_handles(self) -> None:
        """Match unmatched nodes within each group of shared handles, and count the other nodes of the group as covered.

        The matches of a group are its `identical_pairs` and `end_pairs`; a group without any is left as it is. A group
        with a match and more than two nodes is added to `groups`.
        """
        for ours, theirs in group_by_handles(self.reference.unmatched, self.candidate.unmatched):
            pairs = [*identical_pairs(ours, theirs), *end_pairs(ours, theirs)]
            for one, other in pairs:
                self._add(one.name, other.name, "handle")
            if pairs:
                self.reference.cover(ours)
                self.candidate.cover(theirs)
            if pairs and len(ours) + len(theirs) > 2:
                names = (tuple(node.name for node in nodes) for nodes in (ours, theirs))
                self.groups.append(NodeGroup(reference=next(names), candidate=next(names)))

    def match_names(self, key: Callable[[NodeRecord], Hashable]) -> None:
        """Match unmatched nodes of both sides for which `key` returns the same; the key contains the node's name.

        Tracing numbers equal names (add, add_1, …). If one side has more nodes of a name, matched ones included, the
        numbers mean different nodes there, and nodes of that name are not matched.
        """
        counts, others = (
            Counter(_without_number(name) for name in side.nodes) for side in (self.reference, self.candidate)
        )
        by_key = {key(node): node for node in self.candidate.unmatched}
        for node in self.reference.unmatched:
            other = by_key.get(key(node))
            if other is not None and counts[_without_number(node.name)] == others[_without_number(node.name)]:
                self._add(node.name, other.name, "name")

    def match_order(self, key: Callable[[NodeRecord], Hashable]) -> None:
        """Match unmatched nodes for which `key` returns the same and that come in the same order on both sides.

        The order is that of a long common subsequence, in which the two nodes of an earlier match are the same item.
        The matches are marked `name`, as those of `match_names` are.
        """
        numbers: dict[str, dict[str, int]] = {"reference": {}, "candidate": {}}
        for number, match in enumerate(self.matches.values()):
            numbers["reference"][match.reference] = numbers["candidate"][match.candidate] = number
        sides = (self.reference, self.candidate)
        if not all(side.unmatched for side in sides):
            return
        tokens = [
            [
                key(node) if name not in side.how else numbers[side.name].get(name, (side.name, name))
                for name, node in side.nodes.items()
            ]
            for side in sides
        ]
        names, other_names = (list(side.nodes) for side in sides)
        for place, other_place in common_subsequence(*tokens):
            if names[place] not in self.reference.how:
                self._add(names[place], other_names[other_place], "name")

    def match_values(self, reference: Mapping[str, Hashable], candidate: Mapping[str, Hashable]) -> None:
        """Match two unmatched nodes with the same kinds and value, if no other unmatched node of their side has both.

        The arguments have a key for the value of each node, by the node's name. A node without one is left out.
        """
        by_value = _nodes_by_unique_value(self.reference.unmatched, reference)
        for key, other in _nodes_by_unique_value(self.candidate.unmatched, candidate).items():
            if node := by_value.get(key):
                self._add(node.name, other.name, "value")

    def alignment(self) -> Alignment:
        """Return the matches so far, in the order of the reference, with unmatched and covered nodes and the coverage.

        The coverage counts the nodes of both sides. Covered nodes count as matched, by handle.
        """
        how = Counter([*self.reference.how.values(), *self.candidate.how.values()])
        places = (self.reference.place, self.candidate.place)
        return Alignment(
            matches=tuple(
                sorted(
                    self.matches.values(), key=lambda match: (places[0][match.reference], places[1][match.candidate])
                )
            ),
            unmatched_reference=tuple(self.reference.unmatched),
            unmatched_candidate=tuple(self.candidate.unmatched),
            groups=tuple(self.groups),
            covered_reference=tuple(sorted(self.reference.covered, key=places[0].__getitem__)),
            covered_candidate=tuple(sorted(self.candidate.covered, key=places[1].__getitem__)),
            coverage=Coverage(matched=how.total(), total=len(places[0]) + len(places[1]), how=dict(how)),
        )

    def _add(self, reference: str, candidate: str, how: str) -> None:
        """Match two nodes, unless they are matched with each other already, and set `how` for both of them."""
        self.matches.setdefault((reference, candidate), Match(reference=reference, candidate=candidate, how=how))
        self.reference.how[reference] = self.candidate.how[candidate] = how


class _AlignedSide:
    """The nodes of one side, and how each was matched so far."""

    def __init__(self, name: str, nodes: Sequence[NodeRecord]) -> None:
        """Take the nodes of the side that `name` names, `reference` or `candidate`; none is matched or covered yet."""
        self.name = name
        self.nodes = {node.name: node for node in nodes}
        self.place = {name: index for index, name in enumerate(self.nodes)}
        self.how: dict[str, str] = {}
        self.covered: set[str] = set()

    @property
    def unmatched(self) -> NodeRecords:
        """The nodes that are neither matched nor covered, in order."""
        return [node for name, node in self.nodes.items() if name not in self.how]

    def require_names(self, names: Iterable[str]) -> None:
        """Raise a UsageError unless each name is that of a node of this side, and occurs once."""
        for name, count in Counter(names).items():
            if name not in self.nodes:
                raise UsageError(
                    f"the mapping names {name!r}, and the {self.name} has no such node: {nearest(name, self.nodes)}"
                )
            if count > 1:
                raise UsageError(f"the mapping names {name!r} of the {self.name} {count} times: a node has one partner")

    def cover(self, nodes: NodeRecords) -> None:
        """Add those of these nodes that are unmatched to `covered`; from now on they count as matched by `handle`."""
        inside = [node.name for node in nodes if node.name not in self.how]
        self.covered.update(inside)
        self.how.update(dict.fromkeys(inside, "handle"))


def _without_number(name: str) -> str:
    """Return a node's name without the number that tracing added: `add` for `add_1`."""
    return _NUMBER.sub("", name)


def _nodes_by_unique_value(nodes: NodeRecords, values: Mapping[str, Hashable]) -> dict[Hashable, NodeRecord]:
    """Return the nodes by kinds and value, without those whose kinds and value another node has too.

    `values` has the value of each node, or a key for it, by the node's name; a node without one is left out.
    """
    known = [((node.kinds, values[node.name]), node) for node in nodes if node.name in values]
    counts = Counter(key for key, _ in known)
    return {key: node for key, node in known if counts[key] == 1}


def group_by_handles(reference: NodeRecords, candidate: NodeRecords) -> list[tuple[NodeRecords, NodeRecords]]:
    """Return groups of nodes that share handles, directly or through others, as (reference's, candidate's nodes) pairs.

    Nodes without handles, and groups that have nodes on one side only, are left out.
    """
    parents: dict[int, int] = {}

    def root(handle: int) -> int:
        while (parent := parents.setdefault(handle, handle)) != handle:
            # path halving keeps the walk short, however long the chain of fusions is
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


def identical_pairs(reference: NodeRecords, candidate: NodeRecords) -> Iterator[tuple[NodeRecord, NodeRecord]]:
    """Yield the pairs of a group that are the same node on both sides.

    Both have the same operator, kinds and handles, and the same name if other nodes of a side have these handles too. A
    `getitem` of the same name may have other handles, because it may have lost its own.
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


def end_pairs(reference: NodeRecords, candidate: NodeRecords) -> Iterator[tuple[NodeRecord, NodeRecord]]:
    """Yield the last node of each side of a group as a pair, if the two can have the same value; at most one pair.

    Two last nodes of the same operation, or the only nodes of their sides, are a pair even if their kinds differ.
    Otherwise the kinds have to agree. If just one of the two is a `getitem`, the pair has the only `getitem` of that
    side whose kinds agree; if none or several agree, there is no pair.
    """
    last, other = reference[-1], candidate[-1]
    is_same_operation = last.op == other.op or len(reference) == len(candidate) == 1
    if is_same_operation or (_GETITEM not in (last.op, other.op) and _can_be_equal(last, other)):
        # the same operation is matched even if its kinds differ, because that difference must be reported
        yield last, other
    elif last.op == _GETITEM:
        parts = [part for part in reference if part.op == _GETITEM and _can_be_equal(part, other)]
        yield from ((part, other) for part in parts if len(parts) == 1)
    elif other.op == _GETITEM:
        parts = [part for part in candidate if part.op == _GETITEM and _can_be_equal(last, part)]
        yield from ((last, part) for part in parts if len(parts) == 1)


def without_float_widths(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds with `float` for every float dtype, because a cast changes only the width."""
    return tuple(_FLOAT.sub("float", kind) for kind in kinds)


def _can_be_equal(reference: NodeRecord, candidate: NodeRecord) -> bool:
    """Tell whether two nodes can have the same value, by their kinds; unknown kinds agree with all."""
    if not reference.kinds or not candidate.kinds:
        return True
    return without_float_widths(reference.kinds) == without_float_widths(candidate.kinds)


def common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Positions]:
    """Return a long common subsequence as (position in `first`, position in `second`) pairs, in rising order.

    Items that occur once on both sides split the sequences, which makes it fast, but the result need not be a longest
    one. Parts without such items are matched by a table of dynamic programming, which finds a longest subsequence.
    """
    numbers: dict[Hashable, int] = {}
    ours = [numbers.setdefault(item, len(numbers)) for item in first]
    theirs = [numbers.setdefault(item, len(numbers)) for item in second]
    positions: list[Positions] = []
    open_spans: list[Span] = [(0, len(ours), 0, len(theirs))]
    while open_spans:
        pairs, rest = _trim_span(ours, theirs, open_spans.pop())
        positions += pairs
        if rest[0] == rest[1] or rest[2] == rest[3]:
            continue
        if anchors := _find_anchors(ours, theirs, rest):
            positions += anchors
            open_spans += _spans_between(anchors, rest)
            continue
        start, end, their_start, their_end = rest
        inner = _match_by_table(np.array(ours[start:end]), np.array(theirs[their_start:their_end]))
        positions += [(start + one, their_start + other) for one, other in inner]
    return sorted(positions)


def _trim_span(ours: list[int], theirs: list[int], span: Span) -> tuple[list[Positions], Span]:
    """Return the pairs of positions of the common prefix and suffix of a span, and the span without them."""
    start, end, their_start, their_end = span
    pairs: list[Positions] = []
    while start < end and their_start < their_end and ours[start] == theirs[their_start]:
        pairs.append((start, their_start))
        start, their_start = start + 1, their_start + 1
    while start < end and their_start < their_end and ours[end - 1] == theirs[their_end - 1]:
        end, their_end = end - 1, their_end - 1
        pairs.append((end, their_end))
    return pairs, (start, end, their_start, their_end)


def _find_anchors(ours: list[int], theirs: list[int], span: Span) -> list[Positions]:
    """Return pairs of positions of items that occur once on each side of the span.

    Of these it is a longest list in which the positions rise on both sides.
    """
    start, end, their_start, their_end = span
    counts, their_counts = Counter(ours[start:end]), Counter(theirs[their_start:their_end])
    single = {item for item, count in counts.items() if count == 1 and their_counts.get(item) == 1}
    where = {item: index for index, item in enumerate(theirs[their_start:their_end], their_start) if item in single}
    return _longest_rising([(index, where[ours[index]]) for index in range(start, end) if ours[index] in single])


def _longest_rising(pairs: list[Positions]) -> list[Positions]:
    """Return a longest sublist in which the second positions rise, too; the first positions rise already."""
    tails: list[int] = []
    ends: list[int] = []
    predecessors: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(tails, place)
        predecessors.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [place]
        ends[length : length + 1] = [index]
    longest: list[Positions] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        longest.append(pairs[index])
        index = predecessors[index]
    return longest[::-1]


def _spans_between(anchors: list[Positions], span: Span) -> Iterator[Span]:
    """Yield the parts of a span before, between and after the anchors."""
    start, end, their_start, their_end = span
    for ours, theirs in (*anchors, (end, their_end)):
        yield start, ours, their_start, theirs
        start, their_start = ours + 1, theirs + 1


def _match_by_table(ours: _IntArray, theirs: _IntArray) -> list[Positions]:
    """Return the pairs of positions of a longest common subsequence, in rising order.

    A large table is divided by Hirschberg's algorithm, which needs less memory.
    """
    if not len(ours) or not len(theirs):
        return []
    if len(ours) == 1 or len(ours) * len(theirs) <= _LARGEST_TABLE:
        return _trace_back(ours, theirs)
    middle = len(ours) // 2
    before = _table_rows(ours[:middle], theirs)[-1]
    behind = _table_rows(ours[middle:][::-1], theirs[::-1])[-1][::-1]
    cut = int((before + behind).argmax())
    rest = _match_by_table(ours[middle:], theirs[cut:])
    return [*_match_by_table(ours[:middle], theirs[:cut]), *((middle + one, cut + other) for one, other in rest)]


def _table_rows(ours: _IntArray, theirs: _IntArray, *, keeps_all: bool = False) -> list[_IntArray]:
    """Return rows with the lengths of the longest common subsequences of a prefix of `ours` with prefixes of `theirs`.

    There is one row, for all of `ours`, or with `keeps_all` a row for each prefix of `ours`, the empty one first. A row
    has an entry for each prefix of `theirs`, the empty one first.
    """
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


def _trace_back(ours: _IntArray, theirs: _IntArray) -> list[Positions]:
    """Return the pairs of positions of a longest common subsequence, in rising order, read from the whole table."""
    rows = _table_rows(ours, theirs, keeps_all=True)
    one, other = len(ours), len(theirs)
    positions: list[Positions] = []
    while one and other:
        if ours[one - 1] == theirs[other - 1]:
            one, other = one - 1, other - 1
            positions.append((one, other))
        elif rows[one - 1][other] >= rows[one][other - 1]:
            one -= 1
        else:
            other -= 1
    return positions[::-1]
