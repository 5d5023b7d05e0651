"""The result of an audit: faults are planted in a program one at a time, and a check catches each or misses it.

Start reading at `Audit`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from torchdelta.records.case import Case
from torchdelta.records.verdict import Verdict

SCHEMA_VERSION = 1
"""The version of an audit's JSON, which differs from that of a report."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node where a fault is planted, or could be."""

    kind: str
    node: str
    op: str
    module_path: str
    """The module that the node belongs to; empty for the outermost."""
    source_line: str
    """`file:line: code` of the user's own code that the node comes from; empty if it is not known."""

    def __str__(self) -> str:
        module = f" of {self.module_path}" if self.module_path else ""
        source = f", {self.source_line}" if self.source_line else ""
        return f"{self.kind} at {self.node} ({self.op}){module}{source}"


class TrialOutcome(enum.Enum):
    """The outcome of one planted fault."""

    CAUGHT = "caught"
    MISSED = "missed"
    INCONCLUSIVE = "inconclusive"
    CRASHED = "crashed"
    """The transform of the faulty program raised or did not end: that is noticed, but no value was judged."""
    NO_EFFECT = "no_effect"
    """Without the transform the faulty program computes the same bits as the one without a fault."""


@dataclass(frozen=True, kw_only=True)
class FaultTrial:
    """One planted fault and its outcome."""

    place: Place
    outcome: TrialOutcome
    reason: str = ""
    """The evidence of the worst leaf or stage."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Every fault that was planted in a program, after a control without any."""

    case: Case
    control: Verdict
    """The verdict without a fault: unless it is equivalent, a catch means nothing."""
    control_reason: str
    """Why the control is not equivalent; empty if it is."""
    trials: tuple[FaultTrial, ...]
    inapplicable: tuple[str, ...]
    """The kinds of fault that the program has no place for."""
    schema_version: int = SCHEMA_VERSION

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of fault that were planted, each once, in the order of the trials."""
        return tuple(dict.fromkeys(trial.place.kind for trial in self.trials))

    def of_kind(self, kind: str) -> tuple[FaultTrial, ...]:
        """Return the trials of one kind of fault."""
        return tuple(trial for trial in self.trials if trial.place.kind == kind)

    @property
    def catch_rate(self) -> float | None:
        """The share of CAUGHT trials among all whose fault had an effect; None if no fault had one.

        A trial that crashed or is inconclusive counts as not caught.
        """
        effective = len(self.trials) - count(self.trials, TrialOutcome.NO_EFFECT)
        return count(self.trials, TrialOutcome.CAUGHT) / effective if effective else None


def count(trials: Iterable[FaultTrial], outcome: TrialOutcome) -> int:
    """Return how many trials have that outcome."""
    return sum(trial.outcome is outcome for trial in trials)
