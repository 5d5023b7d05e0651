"""Does it still compute the same thing? Reference, candidate and truth run one after the other, then the judge."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from torchdelta._torch import lift, runtime, versions
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Policy
from torchdelta.engine import steadiness
from torchdelta.engine.candidate import CandidateRun, run_candidate
from torchdelta.engine.pairing import common_state
from torchdelta.errors import ProgramError
from torchdelta.execute.copies import shared_state_unchanged
from torchdelta.execute.programs import Program
from torchdelta.execute.sides import Side, started_from
from torchdelta.execute.stages import Observation, Plan, SideFailed, observe
from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison, Unmatched
from torchdelta.records.report import Cost, Questions, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform

Progress = Callable[[str], None]


@dataclass(kw_only=True)
class Check:
    """One case with everything that its words stand for; `run` answers it."""

    case: Case
    program: Program
    transform: Transform
    policy: Policy
    plan: Plan
    stages_by_default: bool
    """True where the user named no stages: one that does not apply is then left out, and noted."""
    progress: Progress = lambda _: None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    shortfall: str = ""
    """Why less was run than was asked for."""

    def run(self) -> Report:
        """Answer; raise for what is the user's or the machine's fault, and report what is the candidate's."""
        versions.require_supported()
        if self.case.deterministic:
            self.notes.append(
                "both sides ran with deterministic algorithms, which change generated code and fill empty memory: "
                "this is not the native run"
            )
        with runtime.preserved(), _set_aside():
            return self._report()

    def _report(self) -> Report:
        with self._timed("reference"):
            reference = self._run_reference()
        with self._timed("candidate"):
            candidate = run_candidate(
                self.transform,
                Side.copied_from(self.program),
                self.plan,
                original=self._original(),
                scope=self._scope,
                draws_random=reference.draws_random,
            )
        truth = None
        if self.policy.needs_truth and candidate.observation.stages:
            with self._timed("truth"):
                truth = self._run_truth()
        with self._timed("comparison"):
            stages, unmatched = self._judge(reference, candidate, truth)
        if any(steadiness.rests_on_steadiness(seen) for stage in stages for seen in stage.comparisons):
            with self._timed("second reference"):
                stages = self._hold_steady(stages, reference)
        stages = [steadiness.doubt_coarse(stage) for stage in stages]
        return Report(
            verdict=worst_of(stage.verdict for stage in stages),
            environment=versions.environment(),
            case=self.case,
            stages=tuple(stages),
            questions=self._questions(truth),
            graphs=candidate.graphs,
            unmatched=tuple(unmatched),
            notes=tuple(dict.fromkeys((*self.notes, *candidate.notes))),
            failure=candidate.failure,
            cost=Cost(seconds=self.seconds, peak_bytes=_peak_bytes()),
        )

    def _original(self) -> Side:
        return Side.of(self.program.call, self.program.args, dict(self.program.kwargs))

    def _run_reference(self) -> Observation:
        """Run the reference; random inputs that it rejects are not the program's fault, and end the iterations."""
        try:
            with shared_state_unchanged(self.program.call, name=self.program.name):
                return observe(Side.copied_from(self.program), self.plan, self._original(), self._eager_scope)
        except SideFailed as failed:
            if failed.iteration:
                self.shortfall = (
                    f"iteration {failed.iteration} did not run: the program rejects random inputs ({failed})"
                )
                self.plan = replace(self.plan, iterations=failed.iteration)
                return self._run_reference()
            remedy = "" if failed.stage == "forward" else f", or leave the stage {failed.stage} out"
            raise ProgramError(
                f"{self.program.name} fails when run eagerly, before any transform: {failed}. Mend it{remedy}"
            ) from failed.error

    def _run_truth(self) -> Observation | None:
        original = self._original()
        floats = (tensor.dtype for tensor in started_from(original) if tensor.is_floating_point())
        drawn_in = next(floats, torch.get_default_dtype())

        @contextmanager
        def lifted() -> Iterator[None]:
            with self._eager_scope(), lift.Lift(drawn_in):
                yield

        try:
            side = Side.copied_from(self.program, convert=lift.widened)
            return observe(side, self.plan, original, lifted, lift.widened)
        except (SideFailed, ProgramError) as error:
            self.notes.append(
                f"no truth: the program does not run in float64 ({error}). "
                "Pass policy 'rtol=…,atol=…' or 'close' to judge by fixed tolerances"
            )
            return None

    def _judge(
        self, reference: Observation, candidate: CandidateRun, truth: Observation | None
    ) -> tuple[list[Stage], list[Unmatched]]:
        terms = Terms(
            ignore=frozenset(self.case.ignore),
            strict=frozenset(self.case.strict),
            lowered_to=self.transform.lowered_to,
        )
        judge = Judge(policy=self.policy, terms=terms)
        stages: list[Stage] = []
        unmatched: list[Unmatched] = []
        for name in self.case.stages:
            if candidate.failure and candidate.has_failed_by(name):
                reason = f"{candidate.failure.type}: {candidate.failure.message}"
                return [*stages, Stage(name=name, verdict=Verdict.CRASHED, reason=reason)], unmatched
            if name not in reference.stages:
                stages += self._without_gradients(name)
                continue
            of_reference, of_candidate = reference.stages[name], candidate.observation.stages.get(name, {})
            if not self.transform.keeps_names:
                of_reference, of_candidate, nameless = common_state(name, reference, candidate.observation)
                unmatched += nameless
            found, alone = judge.compare(
                of_reference,
                of_candidate,
                truth.stages.get(name) if truth else None,
                (reference.aliases, candidate.observation.aliases),
            )
            vacuous = _vacuous(found)
            if vacuous and stages and self.stages_by_default and not self.transform.keeps_names:
                self.notes.append(f"{name} were not compared: no name is the same on both sides")
                continue
            doubt = vacuous or candidate.untransformed() or self.shortfall
            stages.append(Stage.of(name, tuple(found), doubt))
            unmatched += alone
        if unmatched and not self.transform.keeps_names:
            self.notes.append(
                f"{len(unmatched)} parameters, buffers or gradients have a name on one side only: another "
                "implementation has its own, and what it computes was compared without them"
            )
        return stages, unmatched

    def _without_gradients(self, name: str) -> list[Stage]:
        if self.stages_by_default and self.plan.loss is None:
            self.notes.append(f"{name} were not compared: no output of the reference requires grad")
            return []
        what = "no output requires grad" if self.plan.loss is None else "the loss does not require grad"
        reason = f"{what}, so there is nothing to compare"
        return [Stage(name=name, verdict=Verdict.INCONCLUSIVE, reason=reason)]

    def _hold_steady(self, stages: list[Stage], reference: Observation) -> list[Stage]:
        unsteady = steadiness.differing_runs(reference, self._run_reference())
        if unsteady:
            named = ", ".join(path for _, path in list(unsteady)[:4])
            self.notes.append(
                f"the reference is not deterministic: {named} differ between two eager runs of the same seed"
            )
        return [steadiness.excuse(stage, unsteady) for stage in stages]

    def _questions(self, truth: Observation | None) -> Questions:
        if truth is not None:
            return Questions()
        why = "no truth could be computed" if self.policy.needs_truth else f"policy {self.case.policy} needs no truth"
        return Questions(native=f"not asked: {why}")

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with runtime.preserved_flags():
            if self.case.deterministic:
                runtime.use_deterministic()
            if self.case.anomaly:
                torch.autograd.set_detect_anomaly(True)
            yield

    @contextmanager
    def _eager_scope(self) -> Iterator[None]:
        # a program that compiles a part of itself is no reference as long as it does
        with self._scope(), torch.compiler.set_stance("force_eager"):
            yield

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        self.progress(part)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = time.perf_counter() - started
            # what a side leaves in cycles and caches must not add to the peak of the next
            gc.collect()
            runtime.release_memory()


def _vacuous(comparisons: list[Comparison]) -> str:
    if any(seen.measurement and seen.measurement.numel for seen in comparisons):
        return ""
    return "nothing was compared: no output has values and nothing was changed"


@contextmanager
def _set_aside() -> Iterator[None]:
    """Keep what is alive already out of the garbage collections between the sides: they cost a tenth of a second."""
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
