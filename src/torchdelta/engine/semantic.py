"""The semantic question: the same transform, applied to the lifted program, still gives the same function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta._torch import lift
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.kernels import measure
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.semantic import Semantic
from torchdelta.engine.baseline import Baseline
from torchdelta.engine.candidate import run_candidate
from torchdelta.engine.pairing import differing, paired
from torchdelta.engine.undecided import settle
from torchdelta.execute.sides import Side
from torchdelta.execute.stages import Observation
from torchdelta.records.case import IGNORABLE
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import ASKED, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform

FOREIGN = 100.0
"""A reference that is so many times its noise away from the truth is another function in float64."""


@dataclass(frozen=True, kw_only=True)
class Lifted:
    """The candidate run in float64, or why it was not."""

    asked: str = ASKED
    reference: Observation = field(default_factory=Observation)
    candidate: Observation = field(default_factory=Observation)

    @property
    def differs(self) -> bool:
        """Whether anything in float64 is not bitwise the same."""
        return differing(self.reference, self.candidate)


def run_lifted(baseline: Baseline, transform: Transform) -> Lifted:
    """Lift the program, apply the transform to it, and run both."""
    if transform.lowered_to is not None:
        return Lifted(asked="not asked: the transform lowers precision on purpose")
    reference = baseline.lifted_reference
    if reference is None:
        return Lifted(asked=f"not asked: {baseline.no_truth}")
    with baseline.timed("semantic"):
        candidate = run_candidate(
            transform,
            Side.copied_from(baseline.program, convert=lift.widened),
            baseline.plan,
            original=baseline.original,
            scope=baseline.scope,
            draws_random=baseline.reference.draws_random,
            lifted=baseline.lifted_scope(baseline.lifted_draws),
        )
    if failure := candidate.failure:
        words = f"{failure.type}: {failure.message}".partition("\n")[0]
        return Lifted(asked=f"not asked: the transform fails on the program in float64 ({words})")
    if why := candidate.untransformed():
        return Lifted(asked=f"not asked: in float64 {why}")
    return Lifted(reference=reference, candidate=candidate.observation)


def judge_lifted(lifted: Lifted, baseline: Baseline, *, keeps_names: bool) -> dict[str, dict[str, Comparison]]:
    """Return what float64 tells about each leaf, by stage and path."""
    noisy = baseline.noisy(1) if lifted.differs else []
    found = _judge(lifted, baseline.truth, noisy, keeps_names)
    is_in_doubt = any(seen.verdict is Verdict.DIVERGED for stage in found.values() for seen in stage.values())
    if is_in_doubt and (in_float64 := baseline.noisy(1, lifted=True)):
        # the noise of the native run was an estimate of that in float64
        found = _judge(lifted, lifted.reference, in_float64, keeps_names)
    return found


def _judge(
    lifted: Lifted, truth: Observation | None, noisy: Sequence[Observation], keeps_names: bool
) -> dict[str, dict[str, Comparison]]:
    # a broken contract and integers show in the native run
    judge = Judge(policy=Semantic(), terms=Terms(ignore=frozenset(IGNORABLE)))
    found = {}
    for stage in lifted.candidate.stages:
        reference, candidate, _ = paired(stage, lifted.reference, lifted.candidate, keeps_names=keeps_names)
        runs = [run.stages.get(stage, {}) for run in noisy]
        if stage == "steps":
            # what both sides differ by is all the noise that a gradient has in float64; it is judged by itself
            reference, candidate, *_ = settle((reference, candidate), lifted.reference, (lifted.candidate,))
        comparisons, _ = judge.compare(reference, candidate, truth.stages.get(stage) if truth else None, runs)
        found[stage] = {seen.path: seen for seen in comparisons if _tells(seen)}
    return found


def _tells(seen: Comparison) -> bool:
    return seen.measurement is not None and seen.dtype in ("float64", "complex128") and seen.noise is not None


def add(stage: Stage, lifted: Mapping[str, Comparison], baseline: Baseline) -> Stage:
    """Return the stage with what float64 told about each of its leaves."""
    if not lifted or not stage.comparisons:
        return stage
    comparisons = []
    for seen in stage.comparisons:
        told = lifted.get(seen.path)
        if told is None or told.error is None:
            comparisons.append(seen)
            continue
        details = {**seen.details, "semantic_error": told.error, "semantic_noise": told.noise or 0.0}
        if told.verdict is Verdict.DIVERGED and seen.verdict is not Verdict.DIVERGED:
            details |= {
                "question": "semantic",
                "native_error": seen.error or 0.0,
                "native_allowed": seen.allowed or 0.0,
            }
            verdict, reason = Verdict.DIVERGED, told.reason
            if _is_of_another_program(baseline, stage.name, seen.path):
                verdict = Verdict.INCONCLUSIVE
                reason = (
                    f"{reason}; but there the reference is another function too, further off than rounding takes it"
                )
            seen = replace(
                seen, verdict=verdict, reason=reason, error=told.error, noise=told.noise, allowed=told.allowed
            )
        comparisons.append(replace(seen, details=details))
    return Stage.of(stage.name, tuple(comparisons), stage.reason)


def _is_of_another_program(baseline: Baseline, stage: str, path: str) -> bool:
    """Tell whether the truth is further from the reference than noise is: the program branches on its dtype."""
    found = [run.stages.get(stage, {}).get(path) for run in baseline.noisy(1)]
    runs = [run for run in found if isinstance(run, torch.Tensor)]
    reference = baseline.reference.stages[stage][path]
    truth = baseline.truth.stages[stage].get(path) if baseline.truth else None
    if not isinstance(truth, torch.Tensor):
        return False
    of_truth = measure(truth, reference)
    noise = max((measure(run, reference).rms_error for run in runs), default=0.0)
    return of_truth.rms_error > FOREIGN * max(noise, unit_roundoff(reference.dtype) * of_truth.rms_reference)
