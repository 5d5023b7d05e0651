"""Which call of one model's modules does the work of which call of the other's.

By path first. Then what is of the same class and returns the same shapes, told apart by the weights it holds, by its
values, or by its place in the order of calls. Then by values alone: the same inputs and the same outputs. A class that
was matched so stands for the other class in the rest of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torchdelta.locate.module_calls import Call, is_near


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Two calls, and how they were found to belong together: `path`, `name` or `value`."""

    reference: Call
    candidate: Call
    how: str

    @property
    def roots(self) -> frozenset[str]:
        """The paths of what both return; a call that raised would have returned what the other did."""
        sides = [call.signature for call in (self.reference, self.candidate) if call.signature is not None]
        paths = [frozenset(path for path, _ in side) for side in sides]
        return frozenset.intersection(*paths) if paths else frozenset()


@dataclass(kw_only=True)
class Matcher:
    """Matches the calls of two runs; `state` is what each module holds, by its id."""

    reference: Sequence[Call]
    candidate: Sequence[Call]
    state: dict[int, tuple[str, ...]]
    matches: list[Matched] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    same_class: dict[str, str] = field(default_factory=dict)
    """Classes of the candidate by those of the reference that they stand for."""

    def run(self) -> list[Matched]:
        """Return the matches in the order of the reference's calls."""
        self._by_path(lambda one, other: one.kind == other.kind)
        # what a call would have returned that raised, nobody knows
        self._by_path(lambda one, other: other.signature in (one.signature, None))
        self._by_name()
        self._by_value()
        self._learn_classes()
        self._by_name()
        return sorted(self.matches, key=lambda match: match.reference.order)

    def _by_path(self, agrees: Callable[[Call, Call], bool]) -> None:
        others = {call.key: call for call in self._free(self.candidate)}
        for call in self._free(self.reference):
            other = others.get(call.key)
            if other is not None and agrees(call, other):
                self._add(call, other, "path")

    def _by_name(self) -> None:
        self._in_groups(lambda call: self.state.get(id(call.module)) or None)
        for one, other in self._near(lambda one, other: self._class_of(one) == other.kind):
            self._add(one, other, "name")
        self._in_groups(lambda _: True)

    def _in_groups(self, trait: Callable[[Call], Hashable]) -> None:
        """Match what is of one class, shape and trait, in order, where both sides have as many of it."""
        groups: dict[Hashable, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
        for side, calls in enumerate((self.reference, self.candidate)):
            for call in self._free(calls):
                if (found := trait(call)) is not None and call.signature is not None:
                    kind = call.kind if side else self._class_of(call)
                    groups[kind, call.signature, found][side].append(call)
        for ours, theirs in groups.values():
            if len(ours) == len(theirs):
                for one, other in zip(ours, theirs, strict=True):
                    self._add(one, other, "name")

    def _by_value(self) -> None:
        for one, other in self._near(lambda *_: True):
            self._add(one, other, "value")

    def _near(self, agrees: Callable[[Call, Call], bool]) -> list[tuple[Call, Call]]:
        """Return pairs with the same inputs and outputs, where nothing else has them."""
        ours, theirs = self._free(self.reference), self._free(self.candidate)
        partners = {
            id(one): [other for other in theirs if agrees(one, other) and _is_same_function(one, other)] for one in ours
        }
        wanted = [id(other) for found in partners.values() for other in found]
        return [
            (one, partners[id(one)][0])
            for one in ours
            if len(partners[id(one)]) == 1 and wanted.count(id(partners[id(one)][0])) == 1
        ]

    def _learn_classes(self) -> None:
        found: dict[str, set[str]] = defaultdict(set)
        for match in self.matches:
            found[match.reference.kind].add(match.candidate.kind)
        self.same_class = {kind: next(iter(others)) for kind, others in found.items() if len(others) == 1}

    def _class_of(self, call: Call) -> str:
        return self.same_class.get(call.kind, call.kind)

    def _free(self, calls: Sequence[Call]) -> list[Call]:
        return [call for call in calls if id(call) not in self.taken]

    def _add(self, reference: Call, candidate: Call, how: str) -> None:
        self.taken |= {id(reference), id(candidate)}
        self.matches.append(Matched(reference=reference, candidate=candidate, how=how))


def _is_same_function(one: Call, other: Call) -> bool:
    return is_near(one.given, other.given) and is_near(one.returned, other.returned)
