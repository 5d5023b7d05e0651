"""Where does it go wrong first? The check tells which question failed, and that one is asked of node after node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchdelta._torch.process import runtime, versions
from torchdelta.check.baseline import Progress
from torchdelta.check.check import Check
from torchdelta.check.graphs import GraphRecorder, RecordedTransform
from torchdelta.check.prepare import prepare
from torchdelta.check.thorough import node_walk
from torchdelta.errors import UsageError
from torchdelta.locate.decompositions import Decompositions
from torchdelta.locate.ladder import AFTER_AOT, BACKEND, CAPTURED, DECOMPOSED, LadderStep, climb, find_cause
from torchdelta.nodewise.findings import NodeFindings, found_behind_taps
from torchdelta.program.memory import peak_bytes
from torchdelta.records.case import CheckOptions
from torchdelta.records.location import Location, Rung
from torchdelta.records.report import Cost, Culprit, Report, reason_of, wrong_in
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.wrappers import ObservedAfterAot

TOO_EARLY = "it goes wrong in {rung}, before there is a graph whose nodes could be held against those of another"
MAPPING_UNUSED = "the mapping was not used: there are no two graphs to match here"
BETWEEN = (
    "no node is wrong by itself: the failure lies between two graphs, or taps change what it comes from; "
    "what is named is the setting that it needs"
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
    """The user's word on which nodes match."""
    limit_bytes: int | None = None
    """The memory that taps may hold."""
    with_cause: bool = False
    """Whether to look for the cause although a node was named."""
    compiles: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self) -> Location:
        """Return the location: check if there is no report yet, then search in the precision in which that failed."""
        report = self.report
        if report is None:
            report = self.check.run()
            self.compiles += self.check.transform.is_compiler
        is_lifted = any(seen.details.get("question") == "semantic" for seen in wrong_in(report))
        self.walk = node_walk(
            self.check, is_lifted=is_lifted, mapping=self.mapping, limit_bytes=self.limit_bytes, notes=self.notes
        )
        with runtime.preserved():
            found, rungs = self._look(report)
        bad = next((rung.name for rung in rungs if rung.verdict.is_failure), None)
        if found.coverage is not None and found.coverage.total and not found.coverage.matched:
            self.notes.append(
                f"no node of one side was found on the other; the check as a whole says {report.verdict.value}"
            )
        if self.mapping and (found.coverage is None or "given" not in found.coverage.how):
            self.notes.append(MAPPING_UNUSED)
        notes = dict.fromkeys((*report.notes, *self.notes, *found.notes))
        return Location(
            verdict=_verdict(report, found),
            environment=versions.environment(),
            case=self.check.case,
            reason=reason_of(report),
            culprits=tuple(replace(culprit, rung=bad) for culprit in found.culprits),
            table=found.rows,
            coverage=found.coverage,
            unmatched_reference=found.unmatched_reference,
            unmatched_candidate=found.unmatched_candidate,
            rungs=rungs,
            compiles=self.compiles + self.walk.compiles,
            notes=tuple(notes),
            cost=Cost(seconds=dict(self.check.baseline.seconds), peak_bytes=peak_bytes()),
        )

    def _look(self, report: Report) -> tuple[NodeFindings, tuple[Rung, ...]]:
        transform = self.check.transform
        rungs: tuple[Rung, ...] = ()
        if report.verdict.is_failure:
            rungs = climb(transform, (report.verdict, reason_of(report)), self._ask_rung)
            self.walk.has_aot = any(rung.name == AFTER_AOT for rung in rungs)
        bad = next((rung.name for rung in rungs if rung.verdict.is_failure), None)
        if report.failure is not None:
            # graphs that were run in lockstep say how far they came
            is_graph = transform.has_seam and not isinstance(transform, Compiler)
            return (self.walk.between_graphs(transform, report) if is_graph else NodeFindings()), rungs
        if bad not in (None, BACKEND, DECOMPOSED) and isinstance(transform, Compiler):
            return NodeFindings(notes=(TOO_EARLY.format(rung=bad),)), rungs
        with self.check.baseline.timed("locating"):
            found = self._by_decomposition(transform) if bad == DECOMPOSED else self.walk.look_at_nodes(report)
        if bad == BACKEND and (self.with_cause or self.walk.is_disturbed or not found.culprits):
            found = self._with_cause(transform, found, report)
        return found, rungs

    def _ask_rung(self, step: LadderStep) -> tuple[Verdict, str]:
        """Return verdict and reason of a rung; graphs of the rung `dynamo` are recorded, unless they are in float64."""
        recorder = self.recorder
        if recorder is None or step.name != CAPTURED or self.walk.is_lifted:
            return self.walk.ask(step.transform)
        recorder.calls = self.check.baseline.plan.iterations
        return self.walk.ask(RecordedTransform(step.transform, recorder))

    def _by_decomposition(self, transform: Transform) -> NodeFindings:
        seam = Decompositions(judge=self.walk.judge(), table=lambda: watched.seen.decompositions)
        watched = ObservedAfterAot(transform, seam, decompose=False, compile_graphs=False)
        self.walk.run(watched)
        return found_behind_taps(seam.seen, seam.total, seam.notes)

    def _with_cause(self, transform: Transform, found: NodeFindings, report: Report) -> NodeFindings:
        cause, tried = find_cause(transform, self.walk.ask)
        self.compiles += tried
        if cause is None:
            return found
        if found.culprits:
            return replace(found, culprits=tuple(replace(each, cause=str(cause)) for each in found.culprits))
        worst = max(wrong_in(report), key=lambda seen: seen.rank)
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
        return replace(found, culprits=(culprit,), notes=(*found.notes, BETWEEN))


def _verdict(report: Report, found: NodeFindings) -> Verdict:
    """Return the check's verdict: worse where a node is wrong by itself, open where nothing was matched."""
    if found.culprits and not report.verdict.is_failure:
        return Verdict.DIVERGED
    is_blind = found.coverage is not None and found.coverage.total > 0 and not found.coverage.matched
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
    """Return the location of the first operation that goes wrong; `torchdelta.locate` explains the parameters."""
    if memory_bytes is not None and (not isinstance(memory_bytes, int) or memory_bytes < 0):
        raise UsageError(f"memory_bytes is a number of bytes, not {memory_bytes!r}")
    check = prepare(program, args, kwargs, options=options, progress=progress)
    return Locator(check=check, mapping=mapping, limit_bytes=memory_bytes, with_cause=cause).run()
