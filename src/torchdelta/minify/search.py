"""What a query finds out about a subject, and whether that is the failure that is looked for.

A search for something smaller: what a pass may look at, what it proposes, and which of two subjects is simpler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchdelta.minify.edits import Edit, merged
from torchdelta.minify.subject import Subject, placeholders
from torchdelta.records.failure import Signature
from torchdelta.records.report import Report

_LEAF = re.compile(r"(?P<kind>outputs|args)\[(?P<index>\d+)\]")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one subject."""

    signatures: tuple[Signature, ...] = ()
    """Every failure that it showed; none of a subject that is equivalent, or does not run at all."""
    guilty: tuple[tuple[Signature, str], ...] = ()
    """The leaves that differ, each with its failure, worst first."""
    has_passed: bool = False
    """Whether it ran, and both sides computed the same."""
    message: str = ""
    """What the candidate said when it failed."""
    report: Report | None = None

    def shows(self, wanted: Signature) -> bool:
        """Tell whether the failure that is looked for is among those that were seen."""
        return any(wanted.is_same_as(seen) for seen in self.signatures)


Oracle = Callable[[Subject], Answer]
Foresee = Callable[[], Subject | None]
"""Returns what is worth asking ahead, if anything."""


class QueryHandle(Protocol):
    """A question that was put to somebody; called, it waits for the answer."""

    def is_done(self) -> bool:
        """Tell whether nobody has to wait any more."""

    def __call__(self) -> Answer:
        """Return the answer."""


class QueryPool(Protocol):
    """Who can be asked several things at once."""

    @property
    def waiting(self) -> int:
        """How many answers there are or will be that nobody has needed yet."""

    def begin(self, subject: Subject) -> QueryHandle:
        """Ask about a subject while something else is done."""

    def find(self, subject: Subject) -> QueryHandle | None:
        """Return what is asked about a subject, or was ahead."""

    def ask(self, subject: Subject, foresee: Foresee) -> Answer:
        """Ask about a subject, and as long as that takes about what is foreseen."""


def guilty_outputs(subject: Subject, answer: Answer, wanted: Signature) -> list[str]:
    """Return the outputs that show a failure, or that read an input which does or whose gradient does, worst first."""
    named = [node.name for node in placeholders(subject.graph.graph)]
    found: dict[str, None] = {}
    for signature, path in answer.guilty:
        leaf = _LEAF.match(path)
        if leaf is None or not wanted.is_same_as(signature):
            continue
        index = int(leaf["index"])
        if leaf["kind"] == "outputs" and index < len(subject.outputs):
            found[subject.outputs[index]] = None
        elif leaf["kind"] == "args" and index < len(named):
            found.update(dict.fromkeys(_outputs_of(subject, named[index])))
    return list(found)


def _outputs_of(subject: Subject, name: str) -> list[str]:
    reached = {name}
    for node in subject.nodes:
        if any(source.name in reached for source in node.all_input_nodes):
            reached.add(node.name)
    return [output for output in subject.outputs if output in reached]


Proposals = Generator[Edit, bool, None]
"""A pass yields edits, and is told of each whether it was taken."""


@dataclass(kw_only=True)
class Search:
    """What a pass may look at: the best subject so far, what it showed, and where the failure is said to be."""

    subject: Subject
    answer: Answer
    wanted: Signature
    culprits: tuple[str, ...] = ()


Pass = Callable[[Search], Proposals]


def merging(edits: Sequence[Edit]) -> Proposals:
    """Propose all edits as one, and where that is too much each half by itself, down to single ones."""
    if not edits:
        return
    if (yield merged(edits)) or len(edits) == 1:
        return
    half = len(edits) // 2
    yield from merging(edits[:half])
    yield from merging(edits[half:])


def next_of(proposals: Proposals, told: bool | None) -> Edit | None:
    """Return what is proposed next, after what became of the last; None at the end."""
    try:
        return next(proposals) if told is None else proposals.send(told)
    except StopIteration:
        return None


def applied(edit: Edit, search: Search, *, is_leaping: bool) -> Subject | bool:
    """Return what an edit makes of the best subject; where nothing has to be asked about that, whether it is taken."""
    made = edit.applied_to(search.subject)
    if made is None:
        return False
    is_simpler = measure(made) < measure(search.subject)
    if made.key == search.subject.key:
        if is_simpler:
            search.subject = made  # the same, told more simply
        return is_simpler
    return made if is_leaping or is_simpler else False


def measure(subject: Subject) -> tuple[float, ...]:
    """Say how simple a subject is: fewer nodes first, then fewer inputs and outputs, then plainer values."""
    held = [value for value in subject.inputs if isinstance(value, torch.Tensor)]
    plain = sum(value.is_contiguous() for value in held)
    odd = sum(value.is_floating_point() and value.dtype is not torch.float32 for value in held)
    asked = sum(value.requires_grad for value in held)
    return (
        len(subject.nodes),
        len(subject.inputs) + len(subject.outputs),
        sum(_numbers(node.args) + _numbers(node.kwargs) for node in subject.nodes),
        sum(value.numel() for value in held),
        len(held) - plain,
        odd,
        asked,
        len(held) - len(subject.drawn),
    )


def _numbers(value: Any) -> int:
    """Return how large the integers in an argument are together."""
    if isinstance(value, (tuple, list)):
        return sum(_numbers(item) for item in value)
    if isinstance(value, dict):
        return sum(_numbers(item) for item in value.values())
    return abs(value) if type(value) is int and abs(value) < 2**31 else 0
