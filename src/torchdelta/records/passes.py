"""What passes did to a graph: one row each, which tells what it does wrong from what it was given wrong.

What comes of watching the passes of a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchdelta.records.case import Case
from torchdelta.records.failure import Failure
from torchdelta.records.report import Culprit, Environment
from torchdelta.records.verdict import Verdict

SCHEMA_VERSION = 1
"""Of a pipeline's JSON, which is not that of a report."""


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """One pass of a list: what it did to the graph that it was given."""

    name: str
    has_run: bool = True
    changed: bool = False
    """Whether the graph behind it is another one at all."""
    introduced: Verdict | None = None
    """Its graph against the one that it was given; None where that could not be asked."""
    against_original: Verdict | None = None
    """Its graph against the one that the first pass was given."""
    error: float | None = None
    """How far its graph is from the truth of the original, where that is worst."""
    noise: float | None = None
    culprit: Culprit | None = None
    """The node of the graph it was given that it does wrong."""
    reason: str = ""
    failure: Failure | None = None
    """What it raised, or what its graph does."""
    note: str = ""

    @property
    def is_guilty(self) -> bool:
        """Whether the graph goes wrong by this pass."""
        return self.introduced is not None and self.introduced.is_failure

    @property
    def effect(self) -> str:
        """What became of the graph, in a word or two."""
        if not self.has_run:
            return "not run"
        if not self.changed and self.failure is None:
            return "unchanged"
        if self.is_guilty or self.against_original is None or not self.against_original.is_failure:
            return "not asked" if self.introduced is None else self.introduced.value
        return "inherited"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A list of passes, each held against the graph that it was given and against the original one."""

    verdict: Verdict
    environment: Environment
    case: Case
    rows: tuple[PassRow, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def first(self) -> PassRow | None:
        """The first pass by which the graph goes wrong; None where there is none."""
        return next((row for row in self.rows if row.is_guilty), None)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True, kw_only=True)
class PassFinding:
    """A pass of inductor's behind which a graph computes something else."""

    name: str
    """The pass; of a hook, with the user's function behind it."""
    phase: str
    """`pre-grad`, `joint` or `post-grad`."""
    graph: str
    """Which of the graphs that were compiled, as in `graph 0 (backward)`."""
    culprit: Culprit | None
    reason: str
    error: float | None = None
    noise: float | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.phase}, {self.graph}): {_blamed(self.culprit)}{self.reason}"


def _lines(pipeline: Pipeline) -> Iterator[str]:
    first = pipeline.first
    where = f", and {first.name} is the first to go wrong" if first is not None else ""
    yield f"{pipeline.case.program} under {len(pipeline.rows)} passes: {pipeline.verdict.value}{where}"
    width = max((len(row.name) for row in pipeline.rows), default=0)
    for number, row in enumerate(pipeline.rows, 1):
        told = f"{_blamed(row.culprit)}{row.reason}" if row.changed or row.failure else ""
        told = "; ".join(filter(None, (told, row.note)))
        yield f"  {number:>2}  {row.name:<{width}}  {row.effect:<12}  {told}".rstrip()
    yield from (f"  note: {note}" for note in pipeline.notes)


def _blamed(culprit: Culprit | None) -> str:
    if culprit is None:
        return ""
    at = f" at {culprit.source_line}" if culprit.source_line else ""
    return f"{culprit.op} ({culprit.node}){at}: "


# not frozen: it is read while the run that fills it goes on
@dataclass(kw_only=True, eq=False)
class PassSummary:
    """What was seen so far: every pass, and those that change what is computed."""

    findings: list[PassFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why."""
    passes: int = 0
    """How many ran."""
    graphs: int = 0
    """Over how many graphs; each phase has its own."""
    changed: int = 0
    """How many of the graphs passes changed at all."""
    checked: int = 0
    """How many of those were held against what they were, on real inputs, with an answer."""

    @property
    def seen(self) -> str:
        """How much was looked at, in one sentence."""
        return (
            f"{self.passes} passes over {self.graphs} graphs: {self.changed} were changed, and {self.checked} of those "
            "checked"
        )

    def note(self, words: str) -> None:
        """Say something once."""
        if words not in self.notes:
            self.notes.append(words)
