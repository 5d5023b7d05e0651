"""Is it noise or a bug? The candidate's distance from the truth, held against that of correct programs.

A correct program of the same dtype is about as far from the float64 truth as the reference is, and as noisy runs are:
the reference with every rounding moved. The candidate is held to the largest of these in three ways: by the root mean
square, by the largest element, and by the worst block of elements, which finds the one row that a whole tensor hides. A
candidate that is *closer* to the truth than the reference has not diverged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchdelta.compare.kernels import measure
from torchdelta.compare.policy import Judgement, Sample, relative
from torchdelta.compare.spread import MASK, Array, Spread, are_masks, lost_masks, sizes, spread
from torchdelta.records.comparison import Measurement
from torchdelta.records.verdict import Verdict

COARSEST = 0.3
"""A dtype whose own rounding allows a larger relative error than this tells nothing apart: float8."""


class Slack(NamedTuple):
    """How far from the truth a correct program may be."""

    limit: float
    """In multiples of the noise."""
    exaggeration: float
    """How much further from the truth a noisy run is than a correct program: it moves roundings by a whole unit."""


# measured: benchmarks/verdicts.py
SINGLE = Slack(4.0, 4.0)
NARROW = Slack(2.5, 8.0)
"""bfloat16 and float16: what they are multiplied and summed in is wider than they are."""
STEPS = Slack(4.0, 2.0)
LOWERED = Slack(4.0, 1.0)
"""The candidate computes in a lower dtype on purpose: only the noisy runs, and not the reference, have its noise."""
ALONE = Slack(16.0, 1.0)
"""No noisy run: the reference is the only correct program there is."""
ROW = 2.0
"""A maximum over many blocks is more a matter of luck than one over elements: by so much more may it be off."""
LARGEST = 2.0
"""As `exaggeration`, of the largest element."""


@dataclass(frozen=True)
class Noise:
    """The default policy: no tolerance is tuned by hand, the program's own rounding sets it."""

    needs_truth = True
    judges_integers = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when the candidate is further from the truth than rounding explains."""
        seen = sample.measurement
        if sample.truth is None:
            return _judge_without_truth(seen)
        if not seen.mismatches:
            return _identical(sample)
        around = _ErrorScale.of(sample)
        judged = max(around.judgements(), key=_excess)
        roundoff = _coarsest_roundoff(sample)
        if judged.verdict is Verdict.EQUIVALENT and around.limit * around.floor > COARSEST * around.scale:
            reason = f"{judged.reason}, but rounding alone may be that large in so coarse a dtype"
            judged = judged._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
        judged = judged._replace(
            resolution=around.resolution,
            details={
                **(judged.details or {}),
                "rms_of_truth": around.scale,
                "floor": around.floor,
                "reference_error": around.reference.rms,
                "roundoff": roundoff,
                "noisy_runs": len(sample.noisy),
                "question": "native",
            },
        )
        return _judge_non_finite(judged, sample, around)


@dataclass(frozen=True, kw_only=True)
class _ErrorScale:
    """Every run of a sample as it lies around the truth."""

    candidate: Spread
    reference: Spread
    noisy: list[Spread]
    sizes: Array
    slack: Slack
    unit: float
    scale: float
    numel: int
    largest_rounding: float

    @classmethod
    def of(cls, sample: Sample) -> _ErrorScale:
        truth = sample.truth
        assert truth is not None
        mask = MASK if are_masks(truth) else math.inf
        of_truth = sizes(truth, mask)
        unit = _coarsest_roundoff(sample)
        candidate = spread(truth, sample.candidate, mask)
        return cls(
            candidate=candidate,
            reference=spread(truth, sample.reference, mask),
            noisy=[spread(truth, run, mask) for run in sample.noisy],
            sizes=of_truth.squares,
            slack=_slack(sample),
            unit=unit,
            scale=of_truth.rms,
            numel=truth.numel(),
            # one large element rounds more coarsely than the others: by its own size
            largest_rounding=0.5 * unit * _size_at(truth, candidate.at),
        )

    @property
    def limit(self) -> float:
        # the ratio of two statistics of few elements is a matter of luck
        return self.slack.limit * (1.0 + 4.0 / math.sqrt(max(self.numel, 1)))

    @property
    def floor(self) -> float:
        return 0.5 * self.unit * self.scale

    @property
    def rms_noise(self) -> float:
        exaggeration = self.slack.exaggeration
        return max(self.reference.rms, self.floor, *(run.rms / exaggeration for run in self.noisy), 0.0)

    @property
    def resolution(self) -> float | None:
        return relative(self.limit * self.rms_noise, self.scale)

    def judgements(self) -> list[Judgement]:
        exaggeration = min(LARGEST, self.slack.exaggeration)
        peaks = (run.peak / exaggeration for run in self.noisy)
        max_noise = max(self.reference.peak, self.floor, self.largest_rounding, *peaks, 0.0)
        judged = [
            _judge("rms", self.candidate.rms, self.rms_noise, self.limit),
            _judge("max", self.candidate.peak, max_noise, self.limit),
        ]
        if self.noisy and self.candidate.squares.size > 1 and math.isfinite(float(self.candidate.squares.sum())):
            judged.append(self._judge_rows())
        return judged

    def _judge_rows(self) -> Judgement:
        """Judge the worst block in units of what its own noise is; luck is what the correct runs have among them."""
        exaggeration = self.slack.exaggeration
        floor = (0.5 * self.unit) ** 2 * self.sizes + (self.unit * self.scale * 2.0**-10) ** 2
        correct = [run.squares for run in self.noisy]
        if self.slack is not LOWERED:
            correct.append(self.reference.squares)
        total = np.sum(correct, axis=0)
        pooled = total / len(correct) + floor
        ratios = self.candidate.squares / np.maximum(pooled, 5e-324)
        worst = int(ratios.argmax())
        luck = 1.0 / exaggeration
        if len(correct) > 1:
            for run in correct:
                others = (total - run) / (len(correct) - 1) + floor
                of_run = math.sqrt(float((run / np.maximum(others, 5e-324)).max()))
                luck = max(luck, of_run if run is correct[-1] else of_run / exaggeration)
        noise = math.sqrt(float(pooled[worst])) * luck
        return _judge("row", math.sqrt(float(self.candidate.squares[worst])), noise, ROW * self.limit)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to the dtype."""
    return float(torch.finfo(dtype).eps) / 2.0


def _slack(sample: Sample) -> Slack:
    if not sample.noisy:
        return ALONE
    if sample.lowered_to is not None:
        return LOWERED
    if sample.is_stepped:
        return STEPS
    return NARROW if sample.reference.dtype.itemsize < 4 else SINGLE


def _coarsest_roundoff(sample: Sample) -> float:
    return max(unit_roundoff(dtype) for dtype in (sample.reference.dtype, sample.lowered_to) if dtype)


def _size_at(truth: torch.Tensor, flat: int) -> float:
    if flat < 0:
        return 0.0
    whole = torch.view_as_real(truth) if truth.is_complex() else truth
    size = abs(float(whole.detach()[tuple(int(i) for i in np.unravel_index(flat, whole.shape))]))
    return size if math.isfinite(size) else 0.0


def _judge(statistic: str, error: float, noise: float, limit: float) -> Judgement:
    allowed = limit * noise
    times = f"{error / noise:.3g} times" if noise else "infinitely many times"
    if not math.isfinite(allowed):
        verdict, reason = Verdict.INCONCLUSIVE, f"{statistic} noise is beyond what float64 can hold"
    elif not error <= allowed:  # an error that is not a number is no pass
        verdict = Verdict.DIVERGED
        reason = f"{statistic} error is {times} the noise; up to {limit:.3g} times would be rounding"
    else:
        verdict = Verdict.EQUIVALENT
        reason = f"{statistic} error is {times} the noise" if error else "no error against the truth"
    return Judgement(
        verdict=verdict,
        reason=reason,
        error=error,
        noise=noise,
        allowed=allowed,
        details={"statistic": statistic},
    )


def _excess(judged: Judgement) -> tuple[int, float]:
    error, allowed = judged.error or 0.0, judged.allowed or math.inf
    return judged.verdict.severity, error / allowed


def _identical(sample: Sample) -> Judgement:
    """Judge two tensors without a difference: any change of one unit in the last place would have been one."""
    roundoff = _coarsest_roundoff(sample)
    return Judgement(
        verdict=Verdict.EQUIVALENT,
        reason="bitwise identical",
        error=0.0,
        noise=0.0,
        allowed=0.0,
        resolution=2.0 * roundoff,
        details={"roundoff": roundoff, "rms_of_truth": sample.measurement.rms_reference},
    )


def _judge_without_truth(seen: Measurement) -> Judgement:
    if not seen.mismatches:
        return Judgement(verdict=Verdict.EQUIVALENT, reason="bitwise identical", error=0.0, allowed=0.0, resolution=0.0)
    return Judgement(
        verdict=Verdict.INCONCLUSIVE,
        reason=f"{seen.mismatches} of {seen.numel} elements differ, and there is no truth to hold that against",
        error=math.inf if seen.misplaced else seen.rms_error,
        allowed=0.0,
        resolution=0.0,
    )


def _judge_non_finite(judged: Judgement, sample: Sample, around: _ErrorScale) -> Judgement:
    """Judge the NaNs and infinities too: they must be where reference and truth agree that they are."""
    seen = sample.measurement
    assert sample.truth is not None
    if around.candidate.masked and (lost := lost_masks(sample.truth, sample.reference, sample.candidate)):
        reason = f"{lost} values beyond {MASK:g}, which are taken for mask constants, are not what they were"
        return judged._replace(verdict=Verdict.DIVERGED, reason=reason, error=math.inf)
    if not (around.candidate.skipped or around.reference.skipped or seen.misplaced):
        return judged
    of_reference, of_candidate = measure(sample.truth, sample.reference), measure(sample.truth, sample.candidate)
    places = f"NaN or Inf out of place at {seen.misplaced} of {seen.numel} elements"
    if seen.misplaced > of_reference.misplaced:
        return judged._replace(verdict=Verdict.DIVERGED, reason=places, error=math.inf)
    if judged.verdict is Verdict.DIVERGED:
        return judged
    if seen.misplaced and of_candidate.misplaced:
        reason = f"{places}; the reference itself overflows or is undefined where the truth is not"
        return judged._replace(verdict=Verdict.INCONCLUSIVE, reason=reason, error=math.inf)
    finite_in_reference = seen.numel - of_reference.nan_candidate - of_reference.inf_candidate
    untold = finite_in_reference - of_reference.finite
    if untold > 0:
        reason = (
            f"the truth is NaN or Inf at {untold} of {seen.numel} elements where the reference is not; {judged.reason}"
        )
        return judged._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
    return judged
