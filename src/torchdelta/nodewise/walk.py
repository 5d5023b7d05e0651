"""The walk over nodes: every node of a transformed program that can be reached is judged by itself.

How nodes are reached depends on the transform. Two graphs run in lockstep; a compiler is a black box and gets taps and
gates; without any graph, modules are compared call by call. `NodeWalk.look_at_nodes` chooses; start there. `locate`
and `check --thorough` use it, and pass functions that run and check a transform natively or in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from torch.fx import GraphModule, Node

from torchdelta._torch.compile.seams import Seam
from torchdelta._torch.graphs import graphs
from torchdelta.compare.policy import Policy
from torchdelta.nodewise.findings import (
    NodeFindings,
    findings_from_lockstep,
    findings_from_modules,
    findings_from_taps,
    join_findings,
)
from torchdelta.nodewise.gradient_gates import Gates
from torchdelta.nodewise.local import LocalJudge
from torchdelta.nodewise.lockstep_seam import LockstepSeam, compare_graphs
from torchdelta.nodewise.modules import locate_modules
from torchdelta.nodewise.quantized import QuantizedJudge
from torchdelta.nodewise.taps import Taps
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.records.case import Case
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.cast import Cast
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import export_side
from torchdelta.transforms.wrappers import ObservedAfterAot, ObservedTransform

THINNINGS = (1, 2, 4)
"""Every node has a tap; if the failure vanishes with the taps, every second node, then every fourth."""


@dataclass(kw_only=True)
class NodeWalk:
    """One walk over the nodes of a program and its candidate."""

    case: Case
    program: Program
    transform: Transform
    policy: Policy
    draws_random: bool
    """Whether the reference draws random numbers."""
    is_lifted: bool
    """Whether both sides run in float64."""
    run: Callable[[Transform], None]
    """Runs a candidate so that the observer at its seam sees it; the caller notes a failure."""
    ask: Callable[[Transform], tuple[Verdict, str]]
    """Checks another transform of the same program, and returns its verdict and reason."""
    mapping: Mapping[str, str] | None = None
    """Which nodes match, if the user says so."""
    limit_bytes: int | None = None
    """The memory that taps may hold."""
    has_aot: bool = True
    """Whether the compiler may be built on AOTAutograd; if it is not, taps behind that would see nothing."""
    is_disturbed: bool = False
    """Whether taps made the failure vanish."""
    compiles: int = 0
    notes: list[str] = field(default_factory=list)

    def look_at_nodes(self, report: Report) -> NodeFindings:
        """Return the findings on every node that can be reached, in the way that this transform allows.

        Without a seam, graphs run in lockstep or modules are compared. With one, a compiler gets taps, behind
        AOTAutograd if it uses that and otherwise at its seam; other transforms run in lockstep. `report` is that of the
        check: taps have to keep its verdict. `notes`, `compiles` and `is_disturbed` are updated.
        """
        transform = self.transform
        if not transform.traits.has_seam:
            return self._without_seam(transform, has_diverged=report.verdict is Verdict.DIVERGED)
        if not isinstance(transform, Compiler):
            return self.between_graphs(transform, report)
        if not self.has_aot:
            return self._in_black_box(transform, report)
        candidates: list[ObservedAfterAot] = []

        def after_aot(seam: Seam) -> Transform:
            candidates.append(ObservedAfterAot(transform, seam))
            return candidates[-1]

        findings = self._by_taps(after_aot, report)
        return findings if candidates[-1].interception.programs else self._in_black_box(transform, report)

    def between_graphs(self, transform: Transform, report: Report) -> NodeFindings:
        """Run the candidate, and the graphs before and after the transform in lockstep; return the findings.

        Gradients are judged if the transform has a backward and the report has a stage other than `forward`. If the
        transform made something that is not a graph, return the findings of taps and gates instead. Raise UsageError if
        `mapping` does not fit the graphs.
        """
        has_gradients = transform.traits.has_backward and any(stage.name != "forward" for stage in report.stages)
        seam = LockstepSeam(judge=self.judge(), mapping=self.mapping, with_gradients=has_gradients)
        self.run(ObservedTransform(transform, seam))
        seam.require_used()
        if seam.black_boxes:
            return self._in_black_box(transform, report)
        has_diverged = report.verdict is Verdict.DIVERGED
        return findings_from_lockstep(seam.comparisons, sorted(seam.judge.notes), has_diverged=has_diverged)

    def _in_black_box(self, transform: Transform, report: Report) -> NodeFindings:
        """Return the findings of taps on the graphs at the seam, joined with those of gates if they are needed.

        Gates judge gradients in another run, which is made if taps show no culprit and the report compared more than
        `forward`.
        """
        findings = self._by_taps(lambda seam: ObservedTransform(transform, seam), report)
        if findings.culprits or not any(stage.name != "forward" and stage.comparisons for stage in report.stages):
            return findings
        gates = Gates(judge=self.judge())
        self.run(ObservedTransform(transform, gates))
        self.compiles += transform.traits.is_compiler
        nodes = gates.judge_nodes()
        slopes = findings_from_taps(nodes, gates.total, (*gates.notes, *sorted(gates.judge.notes)))
        return join_findings(findings, slopes)

    def _by_taps(self, observe: Callable[[Seam], Transform], report: Report) -> NodeFindings:
        """Return the findings of the first taps that keep the report's verdict; if none do, the last, without culprits.

        `observe` returns the transform with the taps at its seam. First every node has a tap, then every second, then
        every fourth; `compiles` counts the tries if the transform is a compiler. One that changes the verdict adds a
        note and sets `is_disturbed`. If no node can have a tap, the first findings are returned.
        """
        findings = NodeFindings()
        for every in THINNINGS:
            place = count()

            def is_chosen(_: Node, place: count[int] = place, every: int = every) -> bool:
                return next(place) % every == 0

            taps = Taps(judge=self.judge(), is_chosen=is_chosen, limit_bytes=self.limit_bytes)
            transform = observe(taps)
            verdict, reason = self.ask(transform)
            self.compiles += transform.traits.is_compiler
            findings = findings_from_taps(taps.nodes, taps.total, (*taps.notes, *sorted(taps.judge.notes)))
            if not taps.total or verdict is report.verdict:
                return findings
            self.is_disturbed = True
            self.notes.append(
                f"with taps at {taps.tap_count} of {taps.total} nodes the verdict is {verdict.value} ({reason}): "
                "the taps change the result"
            )
        return replace(findings, culprits=())

    def _without_seam(self, transform: Transform, *, has_diverged: bool) -> NodeFindings:
        """Transform a copy of the program; return the findings of lockstep if both sides are graphs, else of modules.

        Both sides of a cast are exported first; if that fails, a note says why.
        """
        side = Side.copied_from(self.program, with_callable=transform.traits.reads_program)
        with transform.apply(side, draws_random=self.draws_random) as transformed:
            ours, theirs = Side.copied_from(self.program), transformed.side
            if isinstance(transform, Cast):
                try:
                    both = export_side(ours, strict=False)[1], export_side(theirs, strict=False)[1]
                except Exception as error:  # torch cannot export every program; its modules can still be compared
                    words = str(error).splitlines()[0] if str(error) else ""
                    self.notes.append(f"there is no graph to look at: {type(error).__name__}: {words}")
                else:
                    return self._in_lockstep(*both, has_diverged=has_diverged)
            if isinstance(ours.owner, GraphModule) and isinstance(theirs.owner, GraphModule):
                return self._in_lockstep(ours, theirs, has_diverged=has_diverged)
            return self._by_modules(ours, theirs)

    def _in_lockstep(self, ours: Side, theirs: Side, *, has_diverged: bool) -> NodeFindings:
        """Run the graph modules of both sides in lockstep, each on its own side's inputs, and return the findings.

        Gradients are judged too if the case has the stage `gradients` and the transform does not lower precision. Raise
        UsageError if `mapping` names an unknown node, or a node twice.
        """
        assert isinstance(ours.owner, GraphModule)
        assert isinstance(theirs.owner, GraphModule)
        inputs = [graphs.flat_inputs(ours.owner, side.args, side.kwargs) for side in (ours, theirs)]
        judge = self.judge()
        comparison = compare_graphs(
            ours.owner,
            theirs.owner,
            inputs[0],
            judge,
            "given",
            self.mapping,
            with_gradients="gradients" in self.case.stages and self.transform.traits.lowered_to is None,
            candidate_inputs=inputs[1],
        )
        return findings_from_lockstep([comparison], sorted(judge.notes), has_diverged=has_diverged)

    def _by_modules(self, ours: Side, theirs: Side) -> NodeFindings:
        """Compare the modules of both sides, each fed the reference's inputs; return the findings.

        Gradients are compared too if the case has the stage `gradients`. Raise ProgramError if the reference fails.
        """
        case = self.case
        result = locate_modules(ours, theirs, seed=case.seed, gradients="gradients" in case.stages, policy=self.policy)
        return replace(
            findings_from_modules(result.rows, result.culprits, result.coverage),
            unmatched_reference=result.unmatched_reference,
            unmatched_candidate=result.unmatched_candidate,
            notes=result.notes,
        )

    def judge(self) -> LocalJudge:
        """Return a new judge of single nodes: a `QuantizedJudge` if the transform quantizes, else a `LocalJudge`.

        It has the walk's policy only if that needs no truth. Otherwise it has none, and judges by noise, in float64 by
        `Semantic`.
        """
        # a quantized layer is off by its own steps, which do not follow from a dtype
        kind = QuantizedJudge if self.transform.traits.rounds_to_levels else LocalJudge
        return kind(
            seed=self.case.seed,
            is_lifted=self.is_lifted,
            lowered_to=self.transform.traits.lowered_to,
            policy=None if self.policy.needs_truth else self.policy,
        )
