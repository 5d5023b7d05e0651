"""The semantic question: the same transform, applied to the lifted program, still gives the same function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta._torch.modes import lift
from torchdelta.check.baseline import Baseline
from torchdelta.check.candidate import run_candidate
from torchdelta.check.decisions import settle_steps
from torchdelta.check.pairing import differing, paired
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.semantic import KEPT_IN_FLOAT32, Semantic
from torchdelta.compare.spread import MASK, are_masks, sizes, spread
from torchdelta.errors import ProgramError, UsageError
from torchdelta.program.sides import Side, started_from
from torchdelta.program.stages import Observation
from torchdelta.records.case import IGNORABLE
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import ASKED, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform

FOREIGN = 100.0
"""A reference that is so many times its noise away from the truth is another function in float64."""


@dataclass(frozen=True, kw_only=True)
class LiftedRun:
    """The candidate run in float64, or why it was not."""

    asked: str = ASKED
    reference: Observation = field(default_factory=Observation)
    candidate: Observation = field(default_factory=Observation)
    is_partly_eager: bool = False
    """Whether parts of the candidate ran between the graphs, where nobody lifts what they round."""

    @property
    def differs(self) -> bool:
        """Whether anything in float64 is not bitwise the same."""
        return differing(self.reference, self.candidate)


def run_lifted(baseline: Baseline, transform: Transform) -> LiftedRun:
    """Lift the program, apply the transform to it, and run both."""
    if transform.traits.lowered_to is not None:
        return LiftedRun(asked="not asked: the transform lowers precision on purpose")
    reference = baseline.lifted_reference
    if reference is None:
        why = baseline.no_truth or "the program does not run in float64 when it draws in it"
        return LiftedRun(asked=f"not asked: {why}")
    if baseline.unlifted:
        return LiftedRun(asked=f"not asked: {', '.join(sorted(baseline.unlifted))} has no float64")
    try:
        with baseline.timed("semantic"):
            candidate = run_candidate(
                transform,
                Side.copied_from(baseline.program, convert=lift.widened, with_callable=transform.traits.reads_program),
                baseline.plan,
                original=baseline.original,
                scope=baseline.scope,
                draws_random=baseline.reference.draws_random,
                lifted=baseline.lifted_scope(baseline.lifted_draws),
            )
    except (ProgramError, UsageError) as error:  # what was no error natively
        return LiftedRun(asked=f"not asked: {error}")
    if failure := candidate.failure:
        words = f"{failure.type}: {failure.message}".partition("\n")[0]
        return LiftedRun(asked=f"not asked: the transform fails on the program in float64 ({words})")
    if why := candidate.untransformed():
        return LiftedRun(asked=f"not asked: in float64 {why}")
    return LiftedRun(reference=reference, candidate=candidate.observation, is_partly_eager=candidate.is_partly_eager)


def judge_lifted(
    lifted: LiftedRun, baseline: Baseline, *, keeps_names: bool
) -> tuple[str, dict[str, dict[str, Comparison]]]:
    """Return whether the question could be asked, and what float64 tells about each leaf, by stage and path."""
    noisy = baseline.noisy(1) if lifted.differs else []
    # what a run leaves as it was is kept as the program's own tensor
    untouched = frozenset(map(id, started_from(baseline.original)))
    found = _judge(lifted, baseline.truth, noisy, untouched, keeps_names)
    is_in_doubt = any(seen.verdict is Verdict.DIVERGED for stage in found.values() for seen in stage.values())
    if is_in_doubt and (in_float64 := baseline.noisy(1, lifted=True)):
        # the noise of the native run was an estimate of that in float64
        found = _judge(lifted, lifted.reference, in_float64, untouched, keeps_names)
        is_in_doubt = any(seen.verdict is Verdict.DIVERGED for stage in found.values() for seen in stage.values())
    if is_in_doubt and lifted.is_partly_eager:
        return "not asked: part of the program runs between the compiler's graphs, and rounds there in float64 too", {}
    return lifted.asked, found


def _judge(
    lifted: LiftedRun,
    truth: Observation | None,
    noisy: Sequence[Observation],
    untouched: frozenset[int],
    keeps_names: bool,
) -> dict[str, dict[str, Comparison]]:
    # a broken contract and integers show in the native run
    floor = 0.0 if keeps_names else KEPT_IN_FLOAT32
    judge = Judge(policy=Semantic(floor), terms=Terms(ignore=frozenset(IGNORABLE)))
    found = {}
    for stage in lifted.candidate.stages:
        reference, candidate, _ = paired(stage, lifted.reference, lifted.candidate, keeps_names=keeps_names)
        # a write that a compiler drops in float64 alone (torch 2.13 does, of single numbers) is no other function: what
        # it drops natively shows there
        left = {path for path, leaf in candidate.items() if id(leaf) in untouched and leaf is not reference.get(path)}
        reference, candidate = (
            {path: leaf for path, leaf in each.items() if path not in left} for each in (reference, candidate)
        )
        runs = [run.stages.get(stage, {}) for run in noisy]
        if stage == "steps":
            # what both sides differ by is all the noise that a gradient has in float64; it is judged by itself
            (reference, candidate), _ = settle_steps((reference, candidate), lifted.reference, (lifted.candidate,))
        comparisons, _ = judge.compare(reference, candidate, truth.stages.get(stage) if truth else None, noisy=runs)
        found[stage] = {seen.path: seen for seen in comparisons if _tells(seen)}
    return found


def _tells(seen: Comparison) -> bool:
    # integers are exact natively; what cannot be measured is told if it is there on one side only
    return seen.dtype in ("float64", "complex128") or (seen.measurement is None and seen.verdict is Verdict.DIVERGED)


def add(stage: Stage, lifted: Mapping[str, Comparison], baseline: Baseline) -> Stage:
    """Return the stage with what float64 told about each of its leaves."""
    if not lifted or not stage.comparisons:
        return stage

    @functools.cache
    def is_foreign(path: str) -> bool:
        return _is_of_another_program(baseline, stage.name, path)

    # after a step all leaves have one answer
    asked = is_foreign if stage.name != "steps" else lambda _: is_foreign("")
    comparisons = tuple(_told(seen, lifted.get(seen.path), asked) for seen in stage.comparisons)
    return Stage.of(stage.name, comparisons, stage.reason)


def _told(seen: Comparison, told: Comparison | None, is_foreign: Callable[[str], bool]) -> Comparison:
    if told is None or seen.verdict is Verdict.DIVERGED or seen.measurement is None:
        return seen
    if told.measurement is None:
        reason = f"{seen.reason}; but in float64 it cannot be compared: {told.reason}"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
    if told.error is None:
        return seen
    details = {**seen.details, "semantic_error": told.error, "semantic_noise": told.noise or 0.0}
    if told.verdict is Verdict.DIVERGED:
        details |= {"question": "semantic", "native_error": seen.error or 0.0, "native_allowed": seen.allowed or 0.0}
        verdict, reason = Verdict.DIVERGED, told.reason
        if is_foreign(seen.path):
            verdict, reason = Verdict.INCONCLUSIVE, f"{reason}; but {_FOREIGN_TRUTH}"
        return replace(
            seen,
            verdict=verdict,
            reason=reason,
            error=told.error,
            noise=told.noise,
            allowed=told.allowed,
            details=details,
        )
    is_far = float(seen.details.get("reference_error", 0.0)) > 2.0 * FOREIGN * float(seen.details.get("floor", 0.0))
    if is_far and seen.verdict is Verdict.EQUIVALENT and is_foreign(seen.path):
        reason = f"{seen.reason}, but {_FOREIGN_TRUTH}"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason, details=details)
    return replace(seen, details=details)


_FOREIGN_TRUTH = "in float64 the reference is another function too, further off than rounding takes it"


def _is_of_another_program(baseline: Baseline, stage: str, path: str) -> bool:
    """Tell whether the truth is further from the reference than noise is: the program branches on its dtype.

    One that does is another function before the first step already. After it nothing is told by a distance: a gradient
    within rounding of zero takes the steps of two correct programs apart.
    """
    if stage != "steps":
        return _is_further_than_noise(baseline, stage, path)
    return any(
        _is_further_than_noise(baseline, before, leaf)
        for before, leaves in baseline.reference.stages.items()
        for leaf in leaves
        if before != "steps" or leaf.startswith("steps[0].gradients")
    )


def _is_further_than_noise(baseline: Baseline, stage: str, path: str) -> bool:
    found = [run.stages.get(stage, {}).get(path) for run in baseline.noisy(1)]
    runs = [run for run in found if isinstance(run, torch.Tensor)]
    reference = baseline.reference.stages[stage][path]
    truth = baseline.truth.stages[stage].get(path) if baseline.truth else None
    if not isinstance(truth, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return False
    if truth.shape != reference.shape or not is_inexact(reference.dtype):
        return False
    mask = MASK if are_masks(truth) else math.inf
    around = [spread(run, reference, mask).rms for run in runs if run.shape == reference.shape]
    noise = max(around, default=0.0)
    unit = max(unit_roundoff(dtype) for dtype in (reference.dtype, baseline.narrowed_to) if dtype is not None)
    floor = unit * sizes(truth, mask).rms
    return bool(around) and spread(truth, reference, mask).rms > FOREIGN * max(noise, floor)
