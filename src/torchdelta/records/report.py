"""The report of a check: the verdict with all its evidence, which every face renders and every file holds.

A report has stages, a stage has comparisons, and each of the three has a verdict: the worst of those inside it.

    report.verdict                                   Verdict.DIVERGED
    report.stage("forward").comparisons[0].path      "outputs[0]"
    reason_of(report)                                one line: the exception, or the reason of the worst comparison

Start reading at `Report`. At the end are functions that put a report into one line, or into an exception's message.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib import metadata

from torchdelta.records.case import Case
from torchdelta.records.comparison import LESS_ACCURATE, Comparison, UnmatchedLeaf
from torchdelta.records.failure import Failure
from torchdelta.records.verdict import Verdict, worst_of

SCHEMA_VERSION = 6

ASKED = "asked"
EXCEPTION = "exception"
"""Path and clause of a comparison with the exception that the reference raised."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The versions and the platform that the case ran on."""

    torch: str
    python: str
    platform: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage, with every leaf that was compared in it."""

    name: str
    verdict: Verdict
    comparisons: tuple[Comparison, ...] = ()
    reason: str = ""
    """Why the stage as a whole is not equivalent, if no single comparison says so."""

    @classmethod
    def of(cls, name: str, comparisons: tuple[Comparison, ...], reason: str = "") -> Stage:
        """Return a stage whose verdict is the worst of its comparisons; with a reason it is at best inconclusive.

        Without comparisons it is inconclusive.
        """
        verdicts = [comparison.verdict for comparison in comparisons]
        if reason:
            verdicts.append(Verdict.INCONCLUSIVE)
        return cls(name=name, verdict=worst_of(verdicts), comparisons=comparisons, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The three questions: of each, that it was asked or why it was not."""

    native: str = ASKED
    semantic: str = "not asked"
    local: str = "not asked: no node was looked at by itself"


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """How much of the candidate was really transformed."""

    captured: int
    transformed_calls: int
    untransformed_calls: int = 0
    """Calls of the program in which no transformed code ran at all."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A node that is wrong although it is fed the reference's own inputs."""

    op: str
    node: str
    module_path: str
    source_line: str
    local_error: float
    noise: float
    stage: str | None = None
    """The stage in which the node is wrong: `forward` or `gradients`."""
    reason: str = ""
    rung: str | None = None
    cause: str | None = None
    """The setting that makes the difference vanish; None if none does."""
    region: tuple[str, ...] = ()
    """The operations that the candidate replaced as a whole, in order, if the node is the last of several."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How many nodes of both graphs were matched, and how many by which method."""

    matched: int
    total: int
    how: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The result and the cost of minifying."""

    nodes_before: int
    nodes_after: int
    queries: int
    seconds: float
    is_minimal: bool = True
    """Whether every further edit loses the failure; False if the budget ended first."""
    rate: float = 1.0
    """The share of the runs that fail."""


@dataclass(frozen=True, kw_only=True)
class Repro:
    """The script, and whether it failed again in a clean process."""

    path: str
    confirmed: bool


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds by part of the run, and the most memory that the process used."""

    seconds: dict[str, float]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check, and of the steps that followed it."""

    verdict: Verdict
    environment: Environment
    case: Case
    stages: tuple[Stage, ...]
    questions: Questions = field(default_factory=Questions)
    graphs: Graphs | None = None
    unmatched: tuple[UnmatchedLeaf, ...] = ()
    notes: tuple[str, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    coverage: Coverage | None = None
    failure: Failure | None = None
    reduction: Reduction | None = None
    repro: Repro | None = None
    cost: Cost | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every comparison of every stage."""
        return tuple(comparison for stage in self.stages for comparison in stage.comparisons)

    def stage(self, name: str) -> Stage:
        """Return the stage of that name; raise KeyError if it was not run."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)


def environment_without_torch() -> Environment:
    """Return the environment of this process without importing torch, whose version is read from its metadata.

    The version is `not installed` if there is no torch.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return Environment(
        torch=version, python=platform.python_version(), platform=f"{platform.system()} {platform.machine()}"
    )


def reason_of(report: Report) -> str:
    """Return the failure, else the first reason that a stage has, else the reason of the worst comparison, as text.

    The failure is its type and the first line of its message. The text is empty if there is none of them.
    """
    if report.failure is not None:
        return f"{report.failure}".splitlines()[0]
    worst = max(report.comparisons, key=lambda comparison: comparison.rank, default=None)
    return next((stage.reason for stage in report.stages if stage.reason), worst.reason if worst else "")


def compares_exceptions(report: Report) -> bool:
    """Tell whether the report compares the exception that the reference raised, in place of values."""
    return any(comparison.leaf == EXCEPTION for comparison in report.comparisons)


def diverged_comparisons(report: Report) -> list[Comparison]:
    """Return the comparisons whose verdict is `diverged`."""
    return [comparison for comparison in report.comparisons if comparison.verdict is Verdict.DIVERGED]


def is_less_accurate(report: Report) -> bool:
    """Tell whether the report diverged, and every comparison that did is the same function, less accurate.

    False if no comparison diverged.
    """
    kinds = {comparison.kind for comparison in diverged_comparisons(report)}
    return report.verdict is Verdict.DIVERGED and kinds == {LESS_ACCURATE}


def explain_verdict(report: Report) -> str:
    """Return why a report has its verdict: the stage, the leaf, the reason and the worst element's values.

    The stage is the first of those with the worst verdict, and the leaf its worst with that verdict; if none has it,
    the text is the stage with its own reason. Of a report with a failure it is `reason_of`. Raise ValueError if the
    report has neither a failure nor a stage.
    """
    if report.failure is not None:
        return reason_of(report)
    worst = max(report.stages, key=lambda stage: stage.verdict.severity)
    guilty = [comparison for comparison in worst.comparisons if comparison.verdict is worst.verdict]
    if not guilty:
        return f"{worst.name}: {worst.reason}"
    return f"{worst.name} {_line(max(guilty, key=lambda comparison: comparison.rank))}"


def evidence_of(report: Report) -> str:
    """Return the message of an exception: the verdict, the worst comparisons with their values, and the notes.

    Each stage has its reason, if it has one, and at most five comparisons that are not equivalent, the worst first. The
    report's `failure` is not in it.
    """
    lines = [f"{report.case.program} under {report.case.transform}: {report.verdict.value}"]
    for stage in report.stages:
        if stage.reason:
            lines.append(f"  {stage.name}: {stage.reason}")
        guilty = [comparison for comparison in stage.comparisons if comparison.verdict is not Verdict.EQUIVALENT]
        guilty.sort(key=lambda comparison: comparison.rank, reverse=True)
        lines += [f"  {stage.name} {_line(comparison)}" for comparison in guilty[:5]]
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def _line(comparison: Comparison) -> str:
    """Return a comparison in one line: path, reason, and the worst element with its values if there is one."""
    if comparison.worst is None:
        return f"{comparison.path}: {comparison.reason}"
    worst = comparison.worst
    values = f"reference {worst.reference}, candidate {worst.candidate}, truth {worst.truth}"
    return f"{comparison.path}: {comparison.reason}; worst at {list(worst.index)}: {values}"
