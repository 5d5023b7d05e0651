"""Where does it go wrong first? The check tells which question failed, and that one is asked of node after node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from torch.fx import GraphModule, Node

from torchdelta._torch import graphs, runtime, versions
from torchdelta._torch.seams import Seam
from torchdelta.engine import semantic
from torchdelta.engine.candidate import CandidateRun, run_candidate
from torchdelta.engine.check import Check
from torchdelta.engine.reasons import reason_of, wrong_in
from torchdelta.execute.memory import peak_bytes
from torchdelta.execute.sides import Side
from torchdelta.locate.causes import find_cause
from torchdelta.locate.decompositions import Decompositions
from torchdelta.locate.found import Found, found_behind_taps, found_in_lockstep, found_in_modules, joined
from torchdelta.locate.gates import Gates
from torchdelta.locate.hooks import locate_modules
from torchdelta.locate.ladder import BACKEND, DECOMPOSED, climb
from torchdelta.locate.local import LocalJudge
from torchdelta.locate.quantized import QuantizedJudge
from torchdelta.locate.side_by_side import SideBySide, compare_graphs
from torchdelta.locate.taps import Taps
from torchdelta.records.location import Location, Rung
from torchdelta.records.report import Cost, Culprit, Report
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform
from torchdelta.transforms.cast import Cast
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import exported
from torchdelta.transforms.watched import Watched, WatchedAfterAot

THINNINGS = (1, 2, 4)
"""Every node has a tap; where the failure is gone with the taps, every second, then every fourth."""
TOO_EARLY = "it goes wrong in {rung}, before there is a graph whose nodes could be held against those of another"
MAPPING_UNUSED = "the mapping was not used: there are no two graphs to match here"
BETWEEN = (
    "no node is wrong by itself: the failure lies between two graphs, or taps change what it comes from; "
    "what is named is the setting that it needs"
)


@dataclass(kw_only=True)
class Locating:
    """One search; `run` answers it."""

    check: Check
    given: Mapping[str, str] | None = None
    """What the user says about which nodes match."""
    limit_bytes: int | None = None
    """How much the taps may hold."""
    with_cause: bool = False
    """Whether to look for the cause although a node was named."""
    is_lifted: bool = False
    is_disturbed: bool = False
    """Whether taps made the failure vanish."""
    compiles: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self) -> Location:
        """Check, then look for the node in the precision in which the check failed."""
        report = self.check.run()
        self.compiles += self.check.transform.is_compiler
        self.is_lifted = any(seen.details.get("question") == "semantic" for seen in wrong_in(report))
        with runtime.preserved():
            found, rungs = self._look(report)
        bad = next((rung.name for rung in rungs if rung.verdict.is_failure), None)
        if found.coverage is not None and found.coverage.total and not found.coverage.matched:
            self.notes.append(
                f"no node of one side was found on the other; the check as a whole says {report.verdict.value}"
            )
        if self.given and (found.coverage is None or "given" not in found.coverage.how):
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
            compiles=self.compiles,
            notes=tuple(notes),
            cost=Cost(seconds=dict(self.check.baseline.seconds), peak_bytes=peak_bytes()),
        )

    def _look(self, report: Report) -> tuple[Found, tuple[Rung, ...]]:
        transform = self.check.transform
        rungs: tuple[Rung, ...] = ()
        if report.verdict.is_failure:
            rungs = climb(transform, (report.verdict, reason_of(report)), self._ask)
        bad = next((rung.name for rung in rungs if rung.verdict.is_failure), None)
        if report.failure is not None:
            # graphs that were run in lockstep say how far they came
            is_graph = transform.has_seam and not isinstance(transform, Compiler)
            return (self._between_graphs(transform, report) if is_graph else Found()), rungs
        if bad not in (None, BACKEND, DECOMPOSED) and isinstance(transform, Compiler):
            return Found(notes=(TOO_EARLY.format(rung=bad),)), rungs
        with self.check.baseline.timed("locating"):
            found = self._by_decomposition(transform) if bad == DECOMPOSED else self.look_at_nodes(report)
        if bad == BACKEND and (self.with_cause or self.is_disturbed or not found.culprits):
            found = self._with_cause(transform, found, report)
        return found, rungs

    def look_at_nodes(self, report: Report) -> Found:
        """Judge every node that can be got at, in whatever way this transform allows."""
        transform = self.check.transform
        if not transform.has_seam:
            return self._without_seam(transform)
        if not isinstance(transform, Compiler):
            return self._between_graphs(transform, report)
        watched: list[WatchedAfterAot] = []

        def after_aot(seam: Seam) -> Transform:
            watched.append(WatchedAfterAot(transform, seam))
            return watched[-1]

        found = self._by_taps(after_aot, report)
        return found if watched[-1].seen.programs else self._in_black_box(transform, report)

    def _between_graphs(self, transform: Transform, report: Report) -> Found:
        has_gradients = transform.has_backward and any(stage.name != "forward" for stage in report.stages)
        seam = SideBySide(judge=self._judge(), given=self.given, with_gradients=has_gradients)
        self._run(Watched(transform, seam))
        seam.require_used()
        if seam.black_boxes:
            return self._in_black_box(transform, report)
        return found_in_lockstep(seam.seen, sorted(seam.judge.notes))

    def _in_black_box(self, transform: Transform, report: Report) -> Found:
        """Tap the graph as it is handed over; what only gradients show takes gates on its edges too."""
        found = self._by_taps(lambda seam: Watched(transform, seam), report)
        if found.culprits or not any(stage.name != "forward" and stage.comparisons for stage in report.stages):
            return found
        gates = Gates(judge=self._judge())
        self._run(Watched(transform, gates))
        self.compiles += transform.is_compiler
        judged = gates.judged()
        slopes = found_behind_taps(judged, gates.total, (*gates.notes, *sorted(gates.judge.notes)))
        return joined(found, slopes)

    def _by_taps(self, watched: Callable[[Seam], Transform], report: Report) -> Found:
        """Tap, and see to it that the failure is still there; nothing that was seen without it counts."""
        found = Found()
        for every in THINNINGS:
            place = count()

            def is_chosen(_: Node, place: count[int] = place, every: int = every) -> bool:
                return next(place) % every == 0

            taps = Taps(judge=self._judge(), chosen=is_chosen, limit_bytes=self.limit_bytes)
            transform = watched(taps)
            verdict, reason = self._ask(transform)
            self.compiles += transform.is_compiler
            found = found_behind_taps(taps.seen, taps.total, (*taps.notes, *sorted(taps.judge.notes)))
            if not taps.total or verdict is report.verdict:
                return found
            self.is_disturbed = True
            self.notes.append(
                f"with taps at {taps.tapped} of {taps.total} nodes the verdict is {verdict.value} ({reason}): "
                "they change what is looked at"
            )
        return replace(found, culprits=())

    def _by_decomposition(self, transform: Transform) -> Found:
        seam = Decompositions(judge=self._judge(), table=lambda: watched.seen.decompositions)
        watched = WatchedAfterAot(transform, seam, decompose=False, compile_graphs=False)
        self._run(watched)
        return found_behind_taps(seam.seen, seam.total, seam.notes)

    def _without_seam(self, transform: Transform) -> Found:
        """Look at two graphs where both sides are, or become, one; at modules where not."""
        baseline = self.check.baseline
        side = Side.copied_from(baseline.program, with_callable=transform.reads_program)
        with transform.applied(side, draws_random=baseline.reference.draws_random) as transformed:
            ours, theirs = Side.copied_from(baseline.program), transformed.side
            if isinstance(transform, Cast):
                try:
                    both = exported(ours, strict=False)[1], exported(theirs, strict=False)[1]
                except Exception as error:  # torch cannot export every program; modules can be looked at still
                    words = str(error).splitlines()[0] if str(error) else ""
                    self.notes.append(f"there is no graph to look at: {type(error).__name__}: {words}")
                else:
                    return self._in_lockstep(*both)
            if isinstance(ours.owner, GraphModule) and isinstance(theirs.owner, GraphModule):
                return self._in_lockstep(ours, theirs)
            return self._by_modules(ours, theirs)

    def _in_lockstep(self, ours: Side, theirs: Side) -> Found:
        assert isinstance(ours.owner, GraphModule)
        assert isinstance(theirs.owner, GraphModule)
        inputs = [graphs.flat_inputs(ours.owner, side.args, side.kwargs) for side in (ours, theirs)]
        judge = self._judge()
        compared = compare_graphs(
            ours.owner,
            theirs.owner,
            inputs[0],
            judge,
            "given",
            self.given,
            with_gradients="gradients" in self.check.case.stages and self.check.transform.lowered_to is None,
            candidate_inputs=inputs[1],
        )
        return found_in_lockstep([compared], sorted(judge.notes))

    def _by_modules(self, ours: Side, theirs: Side) -> Found:
        case = self.check.case
        located = locate_modules(
            ours, theirs, seed=case.seed, gradients="gradients" in case.stages, policy=self.check.policy
        )
        return replace(
            found_in_modules(located.rows, located.culprits, located.coverage),
            unmatched_reference=located.unmatched_reference,
            unmatched_candidate=located.unmatched_candidate,
            notes=located.notes,
        )

    def _with_cause(self, transform: Transform, found: Found, report: Report) -> Found:
        cause, tried = find_cause(transform, self._ask)
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

    def _judge(self) -> LocalJudge:
        # a quantized layer is off by its own steps, which no dtype tells
        kind = QuantizedJudge if self.check.transform.rounds_to_levels else LocalJudge
        return kind(
            seed=self.check.case.seed,
            is_lifted=self.is_lifted,
            lowered_to=self.check.transform.lowered_to,
            policy=None if self.check.policy.needs_truth else self.check.policy,
        )

    def _ask(self, transform: Transform) -> tuple[Verdict, str]:
        """Hold another transform against the same baseline, by the question that failed."""
        baseline = self.check.baseline
        if self.is_lifted:
            lifted = semantic.run_lifted(baseline, transform)
            asked, told = semantic.judge_lifted(lifted, baseline, keeps_names=transform.keeps_names)
            seen = [comparison for stage in told.values() for comparison in stage.values()]
            if not seen:
                return Verdict.INCONCLUSIVE, asked
            return worst_of(each.verdict for each in seen), max(seen, key=lambda each: each.rank).reason
        case = replace(self.check.case, semantic=False)
        report = replace(self.check, case=case, transform=transform, notes=[], candidate=CandidateRun()).run()
        return report.verdict, reason_of(report)

    def _run(self, transform: Transform) -> None:
        """Run a candidate in the precision that is looked at, for the sake of who stands at its seam."""
        baseline = self.check.baseline
        if self.is_lifted:
            semantic.run_lifted(baseline, transform)
            return
        run = run_candidate(
            transform,
            Side.copied_from(baseline.program, with_callable=transform.reads_program),
            baseline.plan,
            original=baseline.original,
            scope=baseline.scope,
            draws_random=baseline.reference.draws_random,
        )
        if run.failure is not None:
            words = f"{run.failure.type}: {run.failure.message}".splitlines()[0]
            self.notes.append(f"the candidate failed while its nodes were looked at: {words}")


def _verdict(report: Report, found: Found) -> Verdict:
    """Return the check's verdict: worse where a node is wrong by itself, open where nothing was matched."""
    if found.culprits and not report.verdict.is_failure:
        return Verdict.DIVERGED
    is_blind = found.coverage is not None and found.coverage.total > 0 and not found.coverage.matched
    return Verdict.INCONCLUSIVE if is_blind else report.verdict
