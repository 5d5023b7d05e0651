"""The effect of passes on a graph, in two kinds of records.

`Pipeline` is a user's list of passes. Each row compares the graph behind a pass twice: with the graph before it, which
shows what this pass introduced, and with the original graph, which includes what earlier passes did.

`PassSummary` is the result of watching the passes of inductor while it compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchdelta.records.case import Case
from torchdelta.records.failure import Failure
from torchdelta.records.printable import printable
from torchdelta.records.report import Culprit, Environment
from torchdelta.records.verdict import Verdict

SCHEMA_VERSION = 1
"""The version of a pipeline's JSON, which differs from that of a report."""


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """One pass of a list, and its effect on the graph."""

    name: str
    has_run: bool = True
    changed: bool = False
    """Whether the graph behind the pass differs from the one before it."""
    introduced: Verdict | None = None
    """The graph behind the pass compared with the one before it; None if that could not be asked."""
    against_original: Verdict | None = None
    """The graph behind the pass compared with the one before the first pass."""
    error: float | None = None
    """The error of the graph behind the pass against the truth of the original, at the worst leaf."""
    noise: float | None = None
    culprit: Culprit | None = None
    """The node of the graph before it that the pass made wrong."""
    reason: str = ""
    failure: Failure | None = None
    """The exception of the pass, or the failure of the graph behind it."""
    note: str = ""

    @property
    def is_guilty(self) -> bool:
        """Whether this pass made the graph wrong: `introduced` is a failure."""
        return self.introduced is not None and self.introduced.is_failure

    @property
    def effect(self) -> str:
        """The effect on the graph in a word or two: `not run`, `unchanged`, `inherited`, `not asked`, or a verdict.

        - `unchanged`: the pass left the graph as it was, and did not fail.
        - `inherited`: the graph fails against the original one, and the pass itself did not introduce a failure.
        - Otherwise the verdict `introduced`, or `not asked` if that is None.
        """
        if not self.has_run:
            return "not run"
        if not self.changed and self.failure is None:
            return "unchanged"
        if self.is_guilty or self.against_original is None or not self.against_original.is_failure:
            return "not asked" if self.introduced is None else self.introduced.value
        return "inherited"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A list of passes, each compared with the graph before it and with the original graph."""

    verdict: Verdict
    environment: Environment
    case: Case
    rows: tuple[PassRow, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def first(self) -> PassRow | None:
        """The first pass that made the graph wrong; None if there is none."""
        return next((row for row in self.rows if row.is_guilty), None)

    def __str__(self) -> str:
        return "\n".join(_lines(printable(self)))


@dataclass(frozen=True, kw_only=True)
class PassFinding:
    """A pass of inductor that made a graph compute something else."""

    name: str
    """The name of the pass; that of a hook is followed by the user's function."""
    phase: str
    """`pre-grad`, `joint` or `post-grad`."""
    graph: str
    """The compiled graph that it ran on, as in `graph 0 (backward)`."""
    culprit: Culprit | None
    reason: str
    error: float | None = None
    noise: float | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.phase}, {self.graph}): {_name_culprit(self.culprit)}{self.reason}"


def _lines(pipeline: Pipeline) -> Iterator[str]:
    """Yield the text of a pipeline: a headline, one line for each pass, and the notes.

    The headline names the first guilty pass, if there is one. The line of a pass has its number, name, effect, culprit,
    reason and note, as far as they apply.
    """
    first = pipeline.first
    where = f", and {first.name} is the first to go wrong" if first is not None else ""
    yield f"{pipeline.case.program} under {len(pipeline.rows)} passes: {pipeline.verdict.value}{where}"
    width = max((len(row.name) for row in pipeline.rows), default=0)
    for number, row in enumerate(pipeline.rows, 1):
        reason = f"{_name_culprit(row.culprit)}{row.reason}" if row.changed or row.failure else ""
        remark = "; ".join(filter(None, (reason, row.note)))
        yield f"  {number:>2}  {row.name:<{width}}  {row.effect:<12}  {remark}".rstrip()
    yield from (f"  note: {note}" for note in pipeline.notes)


def _name_culprit(culprit: Culprit | None) -> str:
    """Return the culprit's operator, node and source line as the beginning of a sentence; empty without a culprit."""
    if culprit is None:
        return ""
    at = f" at {culprit.source_line}" if culprit.source_line else ""
    return f"{culprit.op} ({culprit.node}){at}: "


# not frozen, because it is read while the run that fills it continues
@dataclass(kw_only=True, eq=False)
class PassSummary:
    """The passes that were watched so far, and those among them that change the results."""

    findings: list[PassFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Which passes could not be checked, and why."""
    passes: int = 0
    """How many passes ran."""
    graphs: int = 0
    """On how many graphs they ran; each phase has graphs of its own."""
    changed: int = 0
    """How many of the graphs a pass changed."""
    checked: int = 0
    """How many of the changed graphs were compared with the graphs before them, on real inputs, with an answer."""

    @property
    def seen(self) -> str:
        """The counts of passes and graphs in one sentence."""
        return (
            f"{self.passes} passes over {self.graphs} graphs: {self.changed} were changed, and {self.checked} of those "
            "checked"
        )

    def note(self, words: str) -> None:
        """Add a note, unless it is there already."""
        if words not in self.notes:
            self.notes.append(words)
