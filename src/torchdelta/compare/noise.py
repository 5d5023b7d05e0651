"""Is it noise or a bug? The candidate's distance from the truth, held against the reference's own.

A correct program of the same dtype is about as far from the float64 truth as the reference is. The candidate may be
`SLACK` times as far (more for few elements, where a ratio of two maxima is a matter of luck), and never less than a
few units in the last place. A candidate that is *closer* to the truth than the reference has not diverged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchdelta.compare.kernels import measure
from torchdelta.compare.policy import Judgement, Sample, relative
from torchdelta.records.comparison import Measurement
from torchdelta.records.verdict import Verdict

SLACK = 16.0


@dataclass(frozen=True)
class Noise:
    """The default policy: no tolerance is tuned by hand, the program's own rounding sets it."""

    needs_truth = True
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when the candidate is further from the truth than rounding explains."""
        seen = sample.measurement
        if sample.truth is None:
            return _without_truth(seen)
        of_reference = measure(sample.truth, sample.reference)
        if seen.misplaced:
            return _misplaced(seen, of_reference, measure(sample.truth, sample.candidate))
        of_candidate = measure(sample.truth, sample.candidate)

        roundoff = max(unit_roundoff(dtype) for dtype in (sample.reference.dtype, sample.lowered_to) if dtype)
        floor = 0.5 * roundoff * of_reference.rms_reference
        slack = SLACK * (1.0 + 4.0 / math.sqrt(max(seen.finite, 1)))
        judgements = [
            _judge("rms", of_candidate.rms_error, max(of_reference.rms_error, floor), slack, of_reference),
            _judge("max", of_candidate.max_abs, max(of_reference.max_abs, floor), slack, of_reference),
        ]
        return max(judgements, key=lambda judgement: (judgement.error or 0.0) / (judgement.allowed or math.inf))


def _judge(statistic: str, error: float, noise: float, slack: float, of_reference: Measurement) -> Judgement:
    allowed = slack * noise
    diverged = not error <= allowed  # an error that is not a number is no pass
    times = f"{error / noise:.3g} times" if noise else "infinitely many times"
    if diverged:
        reason = f"{statistic} error is {times} the noise; up to {slack:.3g} times would be rounding"
    elif error == 0.0:
        reason = "no error against the truth"
    else:
        reason = f"{statistic} error is {times} the noise"
    return Judgement(
        verdict=Verdict.DIVERGED if diverged else Verdict.EQUIVALENT,
        reason=reason,
        error=error,
        noise=noise,
        allowed=allowed,
        resolution=relative(allowed, of_reference.rms_reference),
        details={"statistic": statistic, "rms_of_truth": of_reference.rms_reference},
    )


def _without_truth(seen: Measurement) -> Judgement:
    if not seen.mismatches:
        return Judgement(verdict=Verdict.EQUIVALENT, reason="bitwise identical", error=0.0)
    return Judgement(
        verdict=Verdict.INCONCLUSIVE,
        reason=f"{seen.mismatches} of {seen.numel} elements differ, and there is no truth to hold that against",
        error=seen.rms_error,
    )


def _misplaced(seen: Measurement, of_reference: Measurement, of_candidate: Measurement) -> Judgement:
    places = f"NaN or Inf out of place at {seen.misplaced} of {seen.numel} elements"
    if not of_reference.misplaced:
        return Judgement(verdict=Verdict.DIVERGED, reason=places, error=of_candidate.rms_error)
    return Judgement(
        verdict=Verdict.INCONCLUSIVE,
        reason=f"{places}; the reference itself overflows or is undefined where the truth is not",
        error=of_candidate.rms_error,
    )


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to the dtype."""
    return float(torch.finfo(dtype).eps) / 2.0
