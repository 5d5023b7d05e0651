"""The answer with all its evidence: what every face renders and every file holds.

What this process runs on, told without importing torch.

Why a report says what it says.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib import metadata

from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison, Unmatched
from torchdelta.records.failure import Failure
from torchdelta.records.verdict import Verdict, worst_of

SCHEMA_VERSION = 5

ASKED = "asked"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the case ran on."""

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
    """Why the stage as a whole is not equivalent when no single comparison says so."""

    @classmethod
    def of(cls, name: str, comparisons: tuple[Comparison, ...], reason: str = "") -> Stage:
        """Build a stage whose verdict is the worst of its comparisons; with a reason it is at best inconclusive."""
        verdicts = [comparison.verdict for comparison in comparisons]
        if reason:
            verdicts.append(Verdict.INCONCLUSIVE)
        return cls(name=name, verdict=worst_of(verdicts), comparisons=comparisons, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Which of the three questions was asked; otherwise why it was not."""

    native: str = ASKED
    semantic: str = "not asked"
    local: str = "not asked: no node was looked at by itself"


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """How much of the candidate really was transformed."""

    captured: int
    transformed_calls: int
    untransformed_calls: int = 0
    """Calls of the program in which no transformed code ran at all."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The first node that is wrong when fed the reference's own inputs."""

    op: str
    node: str
    module_path: str
    source_line: str
    local_error: float
    noise: float
    stage: str | None = None
    """`forward` or `gradients`: in which of them the node is wrong."""
    reason: str = ""
    rung: str | None = None
    cause: str | None = None
    """What the difference vanishes with, where a setting makes it vanish."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How many nodes of both graphs were matched, and by what."""

    matched: int
    total: int
    how: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What minifying achieved and cost."""

    nodes_before: int
    nodes_after: int
    queries: int
    seconds: float
    is_minimal: bool = True
    """Whether no single edit is left that still shows the failure; not so when the budget ended first."""
    rate: float = 1.0
    """In which part of the runs it fails."""


@dataclass(frozen=True, kw_only=True)
class Repro:
    """The script, and whether it failed again in a clean process."""

    path: str
    confirmed: bool


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds by part, and the highest memory the process reached."""

    seconds: dict[str, float]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a run found out."""

    verdict: Verdict
    environment: Environment
    case: Case
    stages: tuple[Stage, ...]
    questions: Questions = field(default_factory=Questions)
    graphs: Graphs | None = None
    unmatched: tuple[Unmatched, ...] = ()
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
        """Return the stage of that name; KeyError where it was not run."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)


def environment_without_torch() -> Environment:
    """Describe the torch that is installed, Python and the platform."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return Environment(
        torch=version, python=platform.python_version(), platform=f"{platform.system()} {platform.machine()}"
    )


def reason_of(report: Report) -> str:
    """Return in one line what was raised, what a stage says of itself, or the reason of the worst comparison."""
    if report.failure is not None:
        return f"{report.failure.type}: {report.failure.message}".splitlines()[0]
    worst = max(report.comparisons, key=lambda seen: seen.rank, default=None)
    return next((stage.reason for stage in report.stages if stage.reason), worst.reason if worst else "")


def wrong_in(report: Report) -> list[Comparison]:
    """Return the comparisons that diverged."""
    return [seen for seen in report.comparisons if seen.verdict is Verdict.DIVERGED]


def telling(report: Report) -> str:
    """Return in one line why a report is not equivalent: where, why, and the values there."""
    if report.failure is not None:
        return reason_of(report)
    worst = max(report.stages, key=lambda stage: stage.verdict.severity)
    guilty = [seen for seen in worst.comparisons if seen.verdict is worst.verdict]
    if not guilty:
        return f"{worst.name}: {worst.reason}"
    return f"{worst.name} {_line(max(guilty, key=lambda seen: seen.rank))}"


def evidence_of(report: Report) -> str:
    """Return what an exception says: the verdict, the worst comparisons with their values, the notes."""
    lines = [f"{report.case.program} under {report.case.transform}: {report.verdict.value}"]
    for stage in report.stages:
        if stage.reason:
            lines.append(f"  {stage.name}: {stage.reason}")
        guilty = [seen for seen in stage.comparisons if seen.verdict is not Verdict.EQUIVALENT]
        lines += [
            f"  {stage.name} {_line(seen)}" for seen in sorted(guilty, key=lambda seen: seen.rank, reverse=True)[:5]
        ]
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def _line(seen: Comparison) -> str:
    if seen.worst is None:
        return f"{seen.path}: {seen.reason}"
    worst = seen.worst
    values = f"reference {worst.reference}, candidate {worst.candidate}, truth {worst.truth}"
    return f"{seen.path}: {seen.reason}; worst at {list(worst.index)}: {values}"
