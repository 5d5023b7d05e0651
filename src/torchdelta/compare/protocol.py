"""How a candidate is judged: one order of steps for the stages of a program, for one node and for one module.

1. Identical bits: most nodes and modules end here, and nothing more is run for them.
2. The truth and one noisy run: is the candidate further from the truth than rounding explains?
3. Near the threshold: more noisy runs, because the noise of one run is partly chance.
4. Integers that differ: a correct program may get them either way if rounding decides them.
5. The semantic question: are both sides the same function where nothing is rounded?

`JudgingSteps.judge` runs the steps; start there. Its subclasses say how their subject is run and compared:
`check.check.Check` for a program, `nodewise.local.NodeJudging` for a node, `nodewise.module_judge.ModuleJudging` for a
module.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from torchdelta.compare.judge import is_inexact
from torchdelta.compare.magnitudes import ZERO
from torchdelta.records.comparison import Comparison, Scalar
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

RUNS = 3
"""Noisy runs for comparisons near the threshold."""
MOST_RUNS = 8
"""Noisy runs for those that diverge narrowly: one relu that flips moves a row, and three runs may show no such flip.

Measured on T5 in bfloat16: a row's error of a correct candidate is 5.9 times the noise of 3 runs, and 1.5 times of 8.
"""
NARROW = 2.0
"""A comparison diverges narrowly if its error is up to this many times the allowed error."""
NEAR = 0.5
"""A comparison whose error is at least this share of the allowed error is near the threshold."""
FAR = 8.0
"""A comparison whose error is this many times the allowed error is not near it any more."""
COARSE = 0.3
"""Noise beyond this share of the values themselves would let anything pass."""
FINE = 1e-6
"""A resolution in float64 beyond this is not that of its rounding, however large the noise of the program."""
UNSEEN = 2.0**-30
"""An error of this share of the largest gradient is far below the rounding of float32."""
FLIPS = 2.0
"""How many times as many integers may differ in the candidate as differ between two correct runs."""

Run = TypeVar("Run")
"""One run of the subject: an observation of a program, the leaves of a node, the result of a module."""
Answers = dict[str, dict[str, Comparison]]
"""The comparisons of the semantic question, by stage and path."""


@dataclass(frozen=True, kw_only=True)
class Yardstick(Generic[Run]):
    """The correct runs that a candidate is held against."""

    reference: Run
    truth: Run | None = None
    """None if there is none, or if the policy does not need one."""
    noisy: Sequence[Run] = ()


class JudgingSteps(ABC, Generic[Run]):
    """One candidate of one subject that is being judged; `judge` runs the steps, subclasses say how."""

    names: Sequence[str] = ("forward",)
    """The stages that both sides have."""
    rounds: Sequence[int] = (RUNS, MOST_RUNS)
    """The numbers of noisy runs to judge by, one after the other, while a comparison is near the threshold."""
    keeps_distant: bool = False
    """Whether comparisons that are not near the threshold keep the numbers of the first noisy run."""
    is_brief: bool = False
    """Whether to stop after the first comparison with truth and noise."""

    def judge(self) -> list[Stage]:
        """Judge the candidate by bits, then by truth and noise; return the stages with their comparisons.

        If bits decide all, nothing else is run. With `is_brief` the comparison with the truth and one noisy run is the
        last step. Otherwise stages are compared again, by one number of noisy runs of `rounds` after the other, while a
        comparison is near the threshold (`is_near`). Then integers that rounding decides become INCONCLUSIVE, and the
        semantic question is asked.
        """
        stages = self.judge_by_bits()
        if stages is not None:
            return stages
        yardstick = Yardstick(reference=self.reference, truth=self.truth(), noisy=self.noisy(1))
        stages = self.compare_stages(yardstick)
        if self.is_brief:
            return stages
        for count in self.rounds:
            if not any(self.is_near(comparison) for stage in stages for comparison in stage.comparisons):
                break
            yardstick = replace(yardstick, noisy=self.noisy(count))
            stages = [self._compare_again(stage, yardstick) for stage in stages]
        stages = self.excuse_integers(stages, yardstick)
        return self.ask_in_float64(stages, yardstick)

    @property
    @abstractmethod
    def reference(self) -> Run:
        """The original's own run."""

    @abstractmethod
    def judge_by_bits(self) -> list[Stage] | None:
        """Return the stages if they need neither truth nor noise, or None if they do."""

    @abstractmethod
    def truth(self) -> Run | None:
        """Return the reference run in float64, or None if it cannot be run or is not needed."""

    @abstractmethod
    def noisy(self, count: int) -> list[Run]:
        """Return the first `count` noisy runs of the reference, without those that failed."""

    @abstractmethod
    def compare(self, stage: str, yardstick: Yardstick[Run]) -> Sequence[Comparison]:
        """Return the comparisons of the candidate's leaves of one stage with those of the yardstick."""

    @abstractmethod
    def excuse_integers(self, stages: list[Stage], yardstick: Yardstick[Run]) -> list[Stage]:
        """Return the stages; integers that rounding decides become inconclusive."""

    def compare_stages(self, yardstick: Yardstick[Run]) -> list[Stage]:
        """Return every stage of `names`, compared for the first time."""
        return [Stage.of(name, tuple(self.compare(name, yardstick))) for name in self.names]

    def ask_in_float64(self, stages: list[Stage], yardstick: Yardstick[Run]) -> list[Stage]:  # noqa: ARG002 — see below
        """Return the stages unchanged; a subject that asks the semantic question returns them with its answers."""
        return stages

    def is_near(self, comparison: Comparison) -> bool:
        """Tell whether more noisy runs may change the verdict, because the error is near the allowed one.

        That is between `NEAR` and `FAR` times the allowed error and, if it used `RUNS` noisy runs already, between one
        and `NARROW` times. False for a comparison that used no noisy run.
        """
        runs = int(comparison.details.get("noisy_runs", 0))
        least, most = (NEAR, FAR) if runs < RUNS else (1.0, NARROW)
        return runs > 0 and least < comparison.ratio < most

    def _compare_again(self, stage: Stage, yardstick: Yardstick[Run]) -> Stage:
        """Return the stage compared again with the yardstick, which has more noisy runs.

        With `keeps_distant` only its comparisons near the threshold are replaced, and a stage without any is returned
        unchanged.
        """
        if self.keeps_distant and not any(map(self.is_near, stage.comparisons)):
            return stage
        closer = tuple(self.compare(stage.name, yardstick))
        if self.keeps_distant:
            by_path = {comparison.path: comparison for comparison in closer}
            closer = tuple(by_path[each.path] if self.is_near(each) else each for each in stage.comparisons)
        return Stage.of(stage.name, closer, stage.reason)


def excuse_integer(
    comparison: Comparison, reference: Any, correct: Iterable[Any], *, times: float = FLIPS, other_shape: int = 0
) -> Comparison:
    """Return a diverged comparison of integers or booleans as INCONCLUSIVE if correct runs differ in them too.

    `reference` is the reference's leaf, and `correct` has the same leaf of other correct runs. The candidate may differ
    in `times` times as many elements as the correct run that differs most; a run whose leaf is missing or has another
    shape counts as `other_shape` elements. Any other comparison is returned unchanged. A breach of the contract does
    not prevent it, so callers leave comparisons with a breach out.
    """
    is_integer = isinstance(reference, torch.Tensor) and not is_inexact(reference.dtype)
    if comparison.verdict is not Verdict.DIVERGED or comparison.measurement is None or not is_integer:
        return comparison
    flips = max(
        (
            int((other != reference).sum())
            if isinstance(other, torch.Tensor) and other.shape == reference.shape
            else other_shape
            for other in correct
        ),
        default=0,
    )
    if not flips or comparison.measurement.mismatches > times * flips:
        return comparison
    reason = f"{comparison.reason}; but {flips} differ among correct runs too, because rounding decides them"
    return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)


def answer_in_float64(
    compare: Callable[[Yardstick[Run]], Answers], native: Yardstick[Run], lifted: Callable[[], Yardstick[Run] | None]
) -> Answers:
    """Return what `compare` says about both sides in float64, by stage and path.

    `compare` is called with the yardstick `native` first. If an answer diverges, or if one is coarse
    (`is_coarse_answer`) and not all are fine (`_is_all_fine`), `lifted` is called for a yardstick of runs in float64
    itself. Unless that is None, `compare` is called with it, and its answers replace the first ones.
    """
    answers = compare(native)
    is_coarse = any(
        is_coarse_answer(answer, stage) for stage, of_stage in answers.items() for answer in of_stage.values()
    )
    is_asked = has_diverged(answers) or (is_coarse and not _is_all_fine(answers))
    if is_asked and (yardstick := lifted()) is not None:
        answers = compare(yardstick)
    return answers


def _is_all_fine(answers: Answers) -> bool:
    """Tell whether each answer is either fine, or about a gradient that is zero but for rounding.

    A fine answer has no measurement, no mismatch or no resolution, or resolves errors of `FINE` times the values. A
    gradient is zero but for rounding if its rms in the reference is at most `ZERO` times the largest one of any
    gradient, and the error that its answer allows at most `UNSEEN` times; such is that of an attention key's bias.
    Answers about steps do not count.
    """
    gradients = [each.measurement for each in answers.get("gradients", {}).values() if each.measurement is not None]
    largest = max((each.rms_reference for each in gradients if math.isfinite(each.rms_reference)), default=0.0)

    def is_zero(answer: Comparison) -> bool:
        assert answer.measurement is not None
        allowed = math.inf if answer.allowed is None else answer.allowed
        return answer.measurement.rms_reference <= ZERO * largest and allowed <= UNSEEN * largest

    return all(
        answer.measurement is None
        or answer.measurement.mismatches == 0
        or (answer.resolution or 0.0) <= FINE
        or (stage == "gradients" and is_zero(answer))
        for stage, of_stage in answers.items()
        if stage != "steps"
        for answer in of_stage.values()
    )


def is_coarse_answer(answer: Comparison, stage: str) -> bool:
    """Tell whether an answer says that both sides differ in float64, and has a resolution above `COARSE`.

    Errors of up to that share of the values would then pass. A step by the sign of a gradient is coarse in any dtype,
    so answers of the stage `steps` do not count.
    """
    differs = answer.measurement is not None and answer.measurement.mismatches > 0
    return stage != "steps" and differs and (answer.resolution or 0.0) > COARSE


def has_diverged(answers: Answers) -> bool:
    """Tell whether an answer to the semantic question is DIVERGED: the candidate is another function."""
    return any(answer.verdict is Verdict.DIVERGED for stage in answers.values() for answer in stage.values())


def select_answers(comparisons: Iterable[Comparison]) -> dict[str, Comparison]:
    """Return, by path, the comparisons in float64 that say whether both sides are the same function.

    They are those of float64 and complex128 leaves, because integers are exact in the native run already, and those
    that have diverged without a measurement, such as that of a leaf that only one side has.
    """
    return {
        comparison.path: comparison
        for comparison in comparisons
        if comparison.dtype in ("float64", "complex128")
        or (comparison.measurement is None and comparison.verdict is Verdict.DIVERGED)
    }


def as_answered(comparison: Comparison, answer: Comparison, **details: Scalar) -> Comparison:
    """Return a copy of a native comparison with verdict, reason, error, noise and allowed error of its float64 answer.

    Its other fields stay. The entry `question: semantic` and the given ones are added to its details.
    """
    return replace(
        comparison,
        verdict=answer.verdict,
        reason=answer.reason,
        error=answer.error,
        noise=answer.noise,
        allowed=answer.allowed,
        details={**comparison.details, "question": "semantic", **details},
    )
