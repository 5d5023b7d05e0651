"""The vocabulary of a reduction: questions, answers, proposals, and which of two subjects is simpler.

The idea: a reduction pass is a generator. It looks at a `Search` (the best subject so far and its answer), yields an
`Edit`, and receives True or False: whether the reducer accepted the edit. It never runs anything itself.

    def drop_effects(search: Search) -> Proposals:
        for name in effects_of(search.subject):
            was_accepted = yield Edit(dropped=frozenset({name}))

The reducer puts each edited subject to an `Oracle`, which returns an `Answer`. A `QueryPool` is an oracle that can work
on several subjects at once. Start reading at `Answer` and `Search`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torchdelta.minify.edits import Edit, merge_edits
from torchdelta.minify.subject import Subject, placeholders
from torchdelta.records.failure import Signature
from torchdelta.records.report import Report

_LEAF = re.compile(r"(?P<kind>outputs|args)\[(?P<index>\d+)\]")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of checking one subject."""

    signatures: tuple[Signature, ...] = ()
    """Every failure of the subject; empty if it is equivalent, or if it does not run eagerly."""
    failing_leaves: tuple[tuple[Signature, str], ...] = ()
    """Each leaf that differs, as its failure and its path, worst first."""
    has_passed: bool = False
    """Whether the subject ran and both sides computed the same."""
    message: str = ""
    """The candidate's error message, if it raised."""
    report: Report | None = None
    rejected: str = field(default="", compare=False)
    """Why the subject does not run eagerly; empty if it does."""

    def shows(self, wanted: Signature) -> bool:
        """Tell whether the subject failed with this failure."""
        return any(wanted.is_same_as(signature) for signature in self.signatures)


Oracle = Callable[[Subject], Answer]
"""Checks one subject and returns the answer."""
Predictor = Callable[[], Subject | None]
"""Returns a subject that will probably be asked about soon and is not yet; None if there is nothing to predict."""


class QueryHandle(Protocol):
    """A query that was started; calling it waits for the answer."""

    def is_done(self) -> bool:
        """Tell whether the answer can be read without waiting."""

    def __call__(self) -> Answer:
        """Wait for the answer and return it."""


class QueryPool(Protocol):
    """An oracle that can check several subjects at once."""

    @property
    def unused_count(self) -> int:
        """The number of queries that were started on a prediction and have not been needed yet."""

    def begin(self, subject: Subject) -> QueryHandle:
        """Start a query about a subject and return its handle at once."""

    def find(self, subject: Subject) -> QueryHandle | None:
        """Return the query about a subject that is current or was predicted, or None if there is none."""

    def ask(self, subject: Subject, predict: Predictor) -> Answer:
        """Return the answer about a subject. While that takes, start queries about predicted subjects."""


@dataclass(kw_only=True)
class Search:
    """The state that a pass may read: the best subject so far, its answer, and the nodes that are suspected."""

    subject: Subject
    answer: Answer
    wanted: Signature
    """The failure that is being minified."""
    culprits: tuple[str, ...] = ()
    """Names of nodes that may be the culprit, most likely first."""


Proposals = Generator[Edit, bool, None]
"""Yields edits; receives for each whether it was accepted."""
Pass = Callable[[Search], Proposals]


def propose_by_halves(edits: Sequence[Edit]) -> Proposals:
    """Propose all edits merged into one; if that is refused, do the same with the first half and then with the second.

    It ends at single edits. Without edits, nothing is proposed.
    """
    if not edits:
        return
    if (yield merge_edits(edits)) or len(edits) == 1:
        return
    half = len(edits) // 2
    yield from propose_by_halves(edits[:half])
    yield from propose_by_halves(edits[half:])


def next_edit(proposals: Proposals, was_accepted: bool | None) -> Edit | None:
    """Return the next edit of a pass, or None at its end.

    `was_accepted` is sent to the pass: whether its last edit was accepted. None asks for the first edit.
    """
    try:
        return next(proposals) if was_accepted is None else proposals.send(was_accepted)
    except StopIteration:
        return None


def apply_edit(edit: Edit, search: Search, *, is_strategy: bool) -> Subject | bool:
    """Apply an edit; return the subject that has to be asked about, or, without a query, whether it is accepted.

    True for an edit that leaves graph and values the same but makes the subject simpler (now drawn); `search.subject`
    is then replaced. False for an edit that leaves no operation or changes nothing; and for one whose result is not
    simpler, unless a strategy proposed it: a strategy may take a detour.
    """
    result = edit.apply(search.subject)
    if result is None:
        return False
    is_simpler = complexity(result) < complexity(search.subject)
    if result.key == search.subject.key:
        if is_simpler:
            search.subject = result
        return is_simpler
    return result if is_strategy or is_simpler else False


def complexity(subject: Subject) -> tuple[float, ...]:
    """Return a tuple that is smaller for a simpler subject; its first items count most.

    They are the number of nodes that compute; of inputs and outputs; the sum of integers in the nodes' arguments; the
    number of elements of the inputs; and, as four items, the number of input tensors that are not contiguous, that are
    floating-point but not float32, that require grad, and that are not drawn.
    """
    tensors = [value for value in subject.inputs if isinstance(value, torch.Tensor)]
    return (
        len(subject.nodes),
        len(subject.inputs) + len(subject.outputs),
        sum(_sum_integers(node.args) + _sum_integers(node.kwargs) for node in subject.nodes),
        sum(value.numel() for value in tensors),
        sum(not value.is_contiguous() for value in tensors),
        sum(value.is_floating_point() and value.dtype is not torch.float32 for value in tensors),
        sum(value.requires_grad for value in tensors),
        len(tensors) - len(subject.drawn),
    )


def _sum_integers(value: Any) -> int:
    """Return the sum of the absolute integers in a node's argument, nested ones included; 0 for any other value.

    Integers of 2**31 and more are not counted: they stand for "no limit", as in `x[1:9223372036854775807]`.
    """
    if isinstance(value, (tuple, list)):
        return sum(_sum_integers(item) for item in value)
    if isinstance(value, dict):
        return sum(_sum_integers(item) for item in value.values())
    return abs(value) if type(value) is int and abs(value) < 2**31 else 0


def failing_outputs(search: Search) -> list[str]:
    """Return the names of the outputs whose leaves show the wanted failure, worst first; empty if none does.

    The order is that of the answer's `failing_leaves`, where earlier stages come first. If an input's leaf shows it (by
    a write or its gradient), the outputs computed from that input take its place.
    """
    subject = search.subject
    input_names = [node.name for node in placeholders(subject.graph.graph)]
    names: dict[str, None] = {}
    for signature, path in search.answer.failing_leaves:
        leaf = _LEAF.match(path)
        if leaf is None or not search.wanted.is_same_as(signature):
            continue
        index = int(leaf["index"])
        if leaf["kind"] == "outputs" and index < len(subject.outputs):
            names[subject.outputs[index]] = None
        elif leaf["kind"] == "args" and index < len(input_names):
            names.update(dict.fromkeys(_outputs_computed_from(subject, input_names[index])))
    return list(names)


def _outputs_computed_from(subject: Subject, name: str) -> list[str]:
    """Return the names of the outputs that depend on the named node, and its own name if it is an output."""
    dependents = {name}
    for node in subject.nodes:
        if any(source.name in dependents for source in node.all_input_nodes):
            dependents.add(node.name)
    return [output for output in subject.outputs if output in dependents]
