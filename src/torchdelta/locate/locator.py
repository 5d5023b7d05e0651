"""Where does it go wrong first? `Locator.run` looks for the first node that is wrong on the reference's own inputs.

The check's report tells which question failed, natively or in float64, and that question is asked of each node. First
come the rungs of a compiler (`ladder`), then the walk over nodes (`nodewise.walk`), then causes by setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchdelta._torch.process import runtime, versions
from torchdelta.check import exceptions
from torchdelta.check.baseline import Progress
from torchdelta.check.check import Check
from torchdelta.check.graphs import GraphRecorder, RecordedTransform
from torchdelta.check.prepare import prepare
from torchdelta.check.thorough import node_walk
from torchdelta.errors import UsageError
from torchdelta.locate.decompositions import Decompositions
from torchdelta.locate.ladder import AFTER_AOT, BACKEND, CAPTURED, DECOMPOSED, LadderStep, climb, find_cause
from torchdelta.nodewise.findings import NodeFindings, findings_from_taps
from torchdelta.program.memory import peak_bytes
from torchdelta.records.case import CheckOptions
from torchdelta.records.location import Location, Rung
from torchdelta.records.report import Cost, Culprit, Report, compares_exceptions, diverged_comparisons, reason_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.wrappers import ObservedAfterAot

TOO_EARLY = "it goes wrong in {rung}, before there is a graph whose nodes could be compared with those of another"
NO_REFERENCE = (
    "no node was looked at: the program raises when run eagerly, so that the nodes have no values to be compared with"
)
MAPPING_UNUSED = "the mapping was not used: there are no two graphs to match here"
BETWEEN = (
    "no node is wrong by itself: the failure lies between two graphs, or taps change its cause; "
    "the culprit is the setting that the failure needs"
)


@dataclass(kw_only=True)
class Locator:
    """One search; `run` answers it."""

    check: Check
    report: Report | None = None
    """The report of this check, if it was run before; None runs it first."""
    recorder: GraphRecorder | None = None
    """Records the graphs that dynamo captures, if the search runs them natively."""
    mapping: Mapping[str, str] | None = None
    """Nodes of the reference and nodes of the candidate that the user pairs with them."""
    limit_bytes: int | None = None
    """The memory that taps may hold."""
    with_cause: bool = False
    """Whether to look for the cause even if a node was named."""
    compiles: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self) -> Location:
        """Run the check unless its report was given, search for culprits, and return the location; it may name none.

        Nodes may be looked at even if the check passes, and a node that is wrong by itself then makes the verdict
        DIVERGED. They are judged in float64 if a comparison of the semantic question diverged, and otherwise natively.
        If the program raises eagerly and the report compares exceptions, there is only a note. Each culprit gets the
        name of the first rung that fails, or None.
        """
        report = self.report
        if report is None:
            report = exceptions.run(self.check)
            self.compiles += self.check.transform.traits.is_compiler
        if compares_exceptions(report):
            return self._location(report, NodeFindings(notes=(NO_REFERENCE,)), ())
        is_lifted = any(each.details.get("question") == "semantic" for each in diverged_comparisons(report))
        self.walk = node_walk(
            self.check, is_lifted=is_lifted, mapping=self.mapping, limit_bytes=self.limit_bytes, notes=self.notes
        )
        with runtime.preserved():
            findings, rungs = self._look(report)
        if findings.coverage is not None and findings.coverage.total and not findings.coverage.matched:
            self.notes.append(
                f"no node of one side was found on the other; the check as a whole says {report.verdict.value}"
            )
        if self.mapping and (findings.coverage is None or "given" not in findings.coverage.how):
            self.notes.append(MAPPING_UNUSED)
        self.compiles += self.walk.compiles
        return self._location(report, findings, rungs)

    def _location(self, report: Report, findings: NodeFindings, rungs: tuple[Rung, ...]) -> Location:
        """Return the location with the findings about nodes, the rungs, and all notes, each once.

        The notes are those of the report, the search and the findings. The verdict is that of `_verdict`. Each culprit
        gets the name of the first rung that fails, or None.
        """
        bad = next((rung.name for rung in rungs if rung.verdict.is_failure), None)
        notes = dict.fromkeys((*report.notes, *self.notes, *findings.notes))
        return Location(
            verdict=_verdict(report, findings),
            environment=versions.environment(),
            case=self.check.case,
            reason=reason_of(report),
            culprits=tuple(replace(culprit, rung=bad) for culprit in findings.culprits),
            table=findings.rows,
            coverage=findings.coverage,
            unmatched_reference=findings.unmatched_reference,
            unmatched_candidate=findings.unmatched_candidate,
            rungs=rungs,
            compiles=self.compiles,
            notes=tuple(notes),
            cost=Cost(seconds=dict(self.check.baseline.seconds), peak_bytes=peak_bytes()),
        )

    def _look(self, report: Report) -> tuple[NodeFindings, tuple[Rung, ...]]:
        """Return the findings about nodes, and the rungs up to the first that fails; no rungs unless the check failed.

        If the report has a failure, the findings are those of lockstep if the transform has a seam and is not a
        compiler, and otherwise empty. Without one, each node is judged, also if the check passed. But if a compiler
        fails at the rung `dynamo` or `aot`, the findings are only a note; at `decomposed`, each decomposition is judged
        instead. At `backend`, a cause by setting is looked for too if `with_cause` is set, taps change the verdict, or
        no node is a culprit.
        """
        transform = self.check.transform
        rungs: tuple[Rung, ...] = ()
        if report.verdict.is_failure:
            rungs = climb(transform, (report.verdict, reason_of(report)), self._ask_rung)
            self.walk.has_aot = any(rung.name == AFTER_AOT for rung in rungs)
        bad = next((rung.name for rung in rungs if rung.verdict.is_failure), None)
        if report.failure is not None:
            # two graphs in lockstep show how far the candidate came
            is_graph = transform.traits.has_seam and not isinstance(transform, Compiler)
            return (self.walk.between_graphs(transform, report) if is_graph else NodeFindings()), rungs
        if bad not in (None, BACKEND, DECOMPOSED) and isinstance(transform, Compiler):
            return NodeFindings(notes=(TOO_EARLY.format(rung=bad),)), rungs
        with self.check.baseline.timed("locating"):
            findings = self._by_decomposition(transform) if bad == DECOMPOSED else self.walk.look_at_nodes(report)
        if bad == BACKEND and (self.with_cause or self.walk.is_disturbed or not findings.culprits):
            findings = self._with_cause(transform, findings, report)
        return findings, rungs

    def _ask_rung(self, step: LadderStep) -> tuple[Verdict, str]:
        """Run a rung, compare it with the eager program, and return its verdict and reason.

        The graphs of the rung `dynamo` are recorded if there is a `recorder` and the walk is not in float64.
        """
        recorder = self.recorder
        if recorder is None or step.name != CAPTURED or self.walk.is_lifted:
            return self.walk.ask(step.transform)
        recorder.calls = self.check.baseline.plan.iterations
        return self.walk.ask(RecordedTransform(step.transform, recorder))

    def _by_decomposition(self, transform: Transform) -> NodeFindings:
        """Run the graphs after AOTAutograd without compiling them; return the findings about each decomposed operator.

        An operator that the backend would decompose runs whole and decomposed on the same inputs, and the decomposition
        is judged by the whole operator.
        """
        seam = Decompositions(judge=self.walk.judge(), table=lambda: watched.interception.decompositions)
        watched = ObservedAfterAot(transform, seam, decompose=False, compile_graphs=False)
        self.walk.run(watched)
        return findings_from_taps(seam.nodes, seam.total, [*seam.notes, *sorted(seam.judge.notes)])

    def _with_cause(self, transform: Transform, findings: NodeFindings, report: Report) -> NodeFindings:
        """Look for the setting that causes the failure, and return the findings with it; unchanged if no setting does.

        Each culprit gets the cause. If there is no culprit, the cause becomes one: it names no node, and has the
        numbers of the report's worst diverged comparison; a note says that no node is wrong by itself. `compiles` grows
        by the number that `find_cause` returns.
        """
        cause, tried = find_cause(transform, self.walk.ask)
        self.compiles += tried
        if cause is None:
            return findings
        if findings.culprits:
            return replace(findings, culprits=tuple(replace(each, cause=str(cause)) for each in findings.culprits))
        worst = max(diverged_comparisons(report), key=lambda each: each.rank)
        culprit = Culprit(
            op="",
            node="",
            module_path="",
            source_line="",
            local_error=worst.error if worst.error is not None else math.inf,
            noise=worst.noise or 0.0,
            stage=next(stage.name for stage in report.stages if stage.verdict is Verdict.DIVERGED),
            reason=worst.reason,
            cause=str(cause),
        )
        return replace(findings, culprits=(culprit,), notes=(*findings.notes, BETWEEN))


def _verdict(report: Report, findings: NodeFindings) -> Verdict:
    """Return DIVERGED if there is a culprit although the check did not fail, and otherwise the check's verdict.

    The latter is replaced by INCONCLUSIVE if there are nodes and none of them was matched.
    """
    if findings.culprits and not report.verdict.is_failure:
        return Verdict.DIVERGED
    is_blind = findings.coverage is not None and findings.coverage.total > 0 and not findings.coverage.matched
    return Verdict.INCONCLUSIVE if is_blind else report.verdict


def locate(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: CheckOptions,
    mapping: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    cause: bool = False,
    progress: Progress = lambda _: None,
) -> Location:
    """Check a program, search for the operations that go wrong, and return the location; the first culprit comes first.

    If nothing goes wrong, the location has no culprits. `torchdelta.locate` explains the parameters. UsageError if
    `memory_bytes` is neither None nor a whole number from 0, or if `mapping` does not fit the graphs; otherwise raises
    as `prepare` and `exceptions.run` do.
    """
    if memory_bytes is not None and (not isinstance(memory_bytes, int) or memory_bytes < 0):
        raise UsageError(f"memory_bytes is a number of bytes, not {memory_bytes!r}")
    with runtime.preserved():
        check = prepare(program, args, kwargs, options=options, progress=progress)
        return Locator(check=check, mapping=mapping, limit_bytes=memory_bytes, with_cause=cause).run()
