"""What a query finds out about a subject, and whether that is the failure that is looked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


class Asked(Protocol):
    """A question that was put to somebody; called, it waits for the answer."""

    def is_done(self) -> bool:
        """Tell whether nobody has to wait any more."""

    def __call__(self) -> Answer:
        """Return the answer."""


class Crew(Protocol):
    """Who can be asked several things at once."""

    @property
    def waiting(self) -> int:
        """How many answers there are or will be that nobody has needed yet."""

    def begin(self, subject: Subject) -> Asked:
        """Ask about a subject while something else is done."""

    def find(self, subject: Subject) -> Asked | None:
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
