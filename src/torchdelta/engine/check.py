"""Does it still compute the same thing? Reference, candidate and truth run one after the other, then the judge."""

from __future__ import annotations

import gc
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdelta._torch import dynamo, lift, runtime, versions
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Bitwise, Policy
from torchdelta.errors import EnvironmentUnfit, ProgramError, TorchDeltaError
from torchdelta.execute.copies import shared_state_unchanged
from torchdelta.execute.programs import Program
from torchdelta.execute.sides import Side
from torchdelta.execute.stages import Observation, Plan, SideFailed, observe
from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison, Unmatched
from torchdelta.records.failure import Failure
from torchdelta.records.report import Cost, Graphs, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform, Transformed

Progress = Callable[[str], None]

COARSE = 0.3
"""A resolution above this share of the values themselves says that the noise is as large as they are."""


@dataclass
class _Candidate:
    """What came of the candidate: how far it ran, how much of it was transformed, and how it failed if it did."""

    observation: Observation
    graphs: Graphs
    notes: list[str]
    failure: Failure | None = None
    failed_stage: str | None = None


def run_case(
    case: Case,
    *,
    program: Program,
    transform: Transform,
    policy: Policy,
    plan: Plan,
    is_default_stages: bool = False,
    progress: Progress = lambda _: None,
) -> Report:
    """Answer the case; raise for what is the user's or the machine's fault, and report what is the candidate's."""
    versions.require_supported()
    with runtime.preserved(), _set_aside():
        return _Check(case, program, transform, policy, plan, is_default_stages, progress).report()


class _Check:
    def __init__(
        self,
        case: Case,
        program: Program,
        transform: Transform,
        policy: Policy,
        plan: Plan,
        is_default_stages: bool,
        progress: Progress,
    ) -> None:
        self.case = case
        self.program = program
        self.original = Side.of(program.call, program.args, dict(program.kwargs))
        self.transform = transform
        self.policy = policy
        self.plan = plan
        self.is_default_stages = is_default_stages
        self.progress = progress
        terms = Terms(ignore=frozenset(case.ignore), strict=frozenset(case.strict), lowered_to=transform.lowered_to)
        self.judge = Judge(policy=policy, terms=terms)
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    def report(self) -> Report:
        with self._timed("reference"):
            reference = self._run_reference()
        with self._timed("candidate"):
            candidate = self._run_candidate(reference)
        truth = None
        if self.policy.needs_truth and candidate.observation.stages:
            with self._timed("truth"):
                truth = self._run_truth()
        with self._timed("comparison"):
            stages, unmatched = self._judge_stages(reference, candidate, truth)
        if any(_needs_steady_reference(seen) for stage in stages for seen in stage.comparisons):
            with self._timed("second reference"):
                stages = self._excuse_nondeterminism(stages, reference)
        return Report(
            verdict=worst_of(stage.verdict for stage in stages),
            environment=versions.environment(),
            case=self.case,
            stages=tuple(stages),
            graphs=candidate.graphs,
            unmatched=tuple(unmatched),
            notes=tuple(dict.fromkeys((*self.notes, *candidate.notes))),
            failure=candidate.failure,
            cost=Cost(seconds=self.seconds, peak_bytes=_peak_bytes()),
        )

    def _run_reference(self) -> Observation:
        try:
            with shared_state_unchanged(self.program.call, name=self.program.name):
                return observe(Side.copied_from(self.program), self.plan, self.original, self._scope)
        except SideFailed as failed:
            remedy = "" if failed.stage == "forward" else f", or leave the stage {failed.stage} out"
            raise ProgramError(
                f"{self.program.name} fails when run eagerly, before any transform: {failed}. Mend it{remedy}"
            ) from failed.error

    def _run_truth(self) -> Observation | None:
        drawn_in = next((tensor.dtype for tensor in self._floats()), torch.get_default_dtype())

        @contextmanager
        def lifted() -> Iterator[None]:
            with self._scope(), lift.Lift(drawn_in):
                yield

        try:
            return observe(Side.copied_from(self.program, convert=lift.widened), self.plan, self.original, lifted)
        except (SideFailed, ProgramError) as error:
            self.notes.append(
                f"no truth: the program does not run in float64 ({error}). "
                "Pass policy 'rtol=…,atol=…' or 'close' to judge by fixed tolerances"
            )
            return None

    def _floats(self) -> Iterator[torch.Tensor]:
        inputs = (value for value in (*self.original.args, *self.original.kwargs.values()))
        for value in (*self.original.parameters.values(), *inputs):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                yield value

    def _run_candidate(self, reference: Observation) -> _Candidate:
        found = _Candidate(Observation(), Graphs(captured=0, transformed_calls=0), [])
        try:
            side = Side.copied_from(self.program)
            with self._scope(), self.transform.applied(side, draws_random=reference.draws_random) as transformed:
                found.notes += transformed.notes
                found.observation = self._attend(transformed, found)
        except TorchDeltaError:
            raise
        except SideFailed as failed:
            found.observation, found.failed_stage = failed.observation, failed.stage
            found.failure = self._failure(failed.error, failed.stage)
        except (Exception, SystemExit) as error:
            found.failed_stage = self.plan.stages[0]
            found.failure = self._failure(error, "transform")
        return found

    def _attend(self, transformed: Transformed, found: _Candidate) -> Observation:
        """Run the candidate and count, call by call, whether anything transformed ran."""
        witness = transformed.witness
        attended = _Attended(transformed.side.call, witness)
        try:
            return observe(replace(transformed.side, call=attended), self.plan, self.original, self._scope)
        finally:
            found.graphs = Graphs(
                captured=witness.captured, transformed_calls=witness.calls, untransformed_calls=attended.untransformed
            )
            found.notes += [f"part of the program ran eagerly: {reason}" for reason in witness.eager_reasons()]

    def _failure(self, error: BaseException, stage: str) -> Failure:
        if reason := dynamo.unfit_reason(error):
            raise EnvironmentUnfit(reason) from error
        return Failure.of(error, stage=stage, traceback="".join(traceback.format_exception(error)))

    def _judge_stages(
        self, reference: Observation, candidate: _Candidate, truth: Observation | None
    ) -> tuple[list[Stage], list[Unmatched]]:
        stages: list[Stage] = []
        unmatched: list[Unmatched] = []
        for name in self.case.stages:
            if name == candidate.failed_stage:
                assert candidate.failure is not None
                reason = f"{candidate.failure.type}: {candidate.failure.message}"
                stages.append(Stage(name=name, verdict=Verdict.CRASHED, reason=reason))
                break
            if name not in reference.stages:
                if not self.is_default_stages:
                    reason = "no output requires grad, so there is nothing to compare"
                    stages.append(Stage(name=name, verdict=Verdict.INCONCLUSIVE, reason=reason))
                else:
                    self.notes.append(f"{name} were not compared: no output of the reference requires grad")
                continue
            found, alone = self.judge.compare(
                reference.stages[name],
                candidate.observation.stages.get(name, {}),
                truth.stages.get(name) if truth else None,
                (reference.aliases, candidate.observation.aliases),
            )
            stages.append(Stage.of(name, tuple(found), self._doubt(found, candidate)))
            unmatched += alone
        return stages, unmatched

    def _doubt(self, comparisons: list[Comparison], candidate: _Candidate) -> str:
        """Return why a stage cannot be equivalent whatever its values are; empty where there is no such reason."""
        graphs, notes = candidate.graphs, candidate.notes
        if not any(seen.measurement and seen.measurement.numel for seen in comparisons):
            return "nothing was compared: no output has values and nothing was changed"
        if graphs.transformed_calls == 0:
            return "the transform did not happen: no transformed code ran at all"
        if graphs.untransformed_calls:
            return (
                f"the transform did not happen in {graphs.untransformed_calls} calls, which ran as the reference does"
            )
        if any("recompile limit" in note for note in notes):
            return "the compiler reached its recompile limit, and ran some calls as the reference does"
        return ""

    def _excuse_nondeterminism(self, stages: list[Stage], reference: Observation) -> list[Stage]:
        again = self._run_reference()
        unsteady: dict[str, Comparison] = {}
        for name, leaves in reference.stages.items():
            found, _ = Judge(policy=Bitwise()).compare(leaves, again.stages.get(name, {}))
            unsteady.update({f"{name}/{seen.path}": seen for seen in found if seen.verdict is Verdict.DIVERGED})
        if not unsteady:
            return stages
        self.notes.append(
            f"the reference is not deterministic: {', '.join(key.partition('/')[2] for key in list(unsteady)[:4])} "
            "differ between two eager runs of the same seed"
        )
        return [
            Stage.of(
                stage.name,
                tuple(_excused(seen, unsteady.get(f"{stage.name}/{seen.path}")) for seen in stage.comparisons),
                stage.reason,
            )
            if stage.comparisons
            else stage
            for stage in stages
        ]

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with runtime.preserved_flags(), ExitStack() as extras:
            if self.case.deterministic:
                runtime.use_deterministic()
            if self.case.anomaly:
                extras.enter_context(torch.autograd.detect_anomaly(check_nan=False))
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


class _Attended:
    """Counts the calls of a candidate in which nothing transformed ran."""

    def __init__(self, call: Callable[..., Any], witness: dynamo.Witness) -> None:
        self.call = call
        self.witness = witness
        self.untransformed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.witness.calls
        outputs = self.call(*args, **kwargs)
        self.untransformed += self.witness.calls == before
        return outputs


def _needs_steady_reference(seen: Comparison) -> bool:
    """Tell whether a verdict rests on the reference being the same each time it runs.

    A divergence does. So does noise as large as the values: a reference that draws other numbers each time is far
    from the truth too, and would let any candidate pass.
    """
    return seen.verdict is Verdict.DIVERGED or (seen.resolution or 0.0) > COARSE


def _excused(seen: Comparison, unsteady: Comparison | None) -> Comparison:
    broken = any(not breach.excused for breach in seen.contract)
    if unsteady is None or broken or not (seen.measurement and seen.measurement.mismatches):
        return seen
    reason = f"the reference itself differs between two eager runs ({unsteady.reason}); {seen.reason}"
    return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)


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
