"""Which node of one graph does the work of which node of the other.

What the user says comes first, then shared handles, then names, then the order of equal operations, then equal values.
Nodes that share handles, directly or through others, form a group, because rewrites fuse and split: what must be the
same is what the group ends in, and what is inside of it is covered by that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchdelta.errors import UsageError
from torchdelta.locate.groups import Nodes, ends_of, grouped, pairs_inside, widthless
from torchdelta.locate.sequences import common_subsequence
from torchdelta.records.location import Match, NodeRecord
from torchdelta.records.report import Coverage
from torchdelta.registry import nearest

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
