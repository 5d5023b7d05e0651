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
COARSEST = 0.3
"""A dtype whose own rounding allows a larger relative error than this tells nothing apart: float8."""
MASK = 1e30
"""Beyond this a value is a mask constant, which says nothing of the scale of the others."""


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
            return _judge_without_truth(seen)
        of_reference = measure(sample.truth, sample.reference)
        of_candidate = measure(sample.truth, sample.candidate)
        slack = SLACK * (1.0 + 4.0 / math.sqrt(max(seen.finite, 1)))
        scale = of_reference.rms_reference
        floor = _ulp_floor(sample, scale)
        # one large element rounds more coarsely than the others: by its own size
        at_worst = _ulp_floor(sample, _size_at(sample.truth, of_candidate.worst))
        judged = max(
            _judge("rms", of_candidate.rms_error, max(of_reference.rms_error, floor), slack, scale),
            _judge("max", of_candidate.max_abs, max(of_reference.max_abs, floor, at_worst), slack, scale),
            key=_excess,
        )
        judged = judged._replace(
            details={**(judged.details or {}), "floor": floor, "roundoff": _coarsest_roundoff(sample)}
        )
        if not seen.mismatches:
            return judged._replace(verdict=Verdict.EQUIVALENT, reason="bitwise identical")
        if judged.verdict is Verdict.EQUIVALENT and seen.mismatches and slack * floor > COARSEST * scale:
            reason = f"{judged.reason}, but rounding alone may be that large in so coarse a dtype"
            judged = judged._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
        return _judge_non_finite(judged, seen, of_reference, of_candidate)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to the dtype."""
    return float(torch.finfo(dtype).eps) / 2.0


def _ulp_floor(sample: Sample, scale: float) -> float:
    return 0.0 if scale > MASK else 0.5 * scale * _coarsest_roundoff(sample)


def _coarsest_roundoff(sample: Sample) -> float:
    return max(unit_roundoff(dtype) for dtype in (sample.reference.dtype, sample.lowered_to) if dtype)


def _size_at(truth: torch.Tensor, flat: int) -> float:
    size = float(truth.detach().reshape(-1)[flat].abs()) if truth.is_contiguous() and flat >= 0 else 0.0
    return size if math.isfinite(size) else 0.0


def _judge(statistic: str, error: float, noise: float, slack: float, scale: float) -> Judgement:
    allowed = slack * noise
    times = f"{error / noise:.3g} times" if noise else "infinitely many times"
    if not math.isfinite(allowed):
        verdict, reason = Verdict.INCONCLUSIVE, f"{statistic} noise is beyond what float64 can hold"
    elif not error <= allowed:  # an error that is not a number is no pass
        verdict = Verdict.DIVERGED
        reason = f"{statistic} error is {times} the noise; up to {slack:.3g} times would be rounding"
    else:
        verdict = Verdict.EQUIVALENT
        reason = f"{statistic} error is {times} the noise" if error else "no error against the truth"
    return Judgement(
        verdict=verdict,
        reason=reason,
        error=error,
        noise=noise,
        allowed=allowed,
        resolution=relative(allowed, scale),
        details={"statistic": statistic, "rms_of_truth": scale},
    )


def _excess(judged: Judgement) -> tuple[int, float]:
    error, allowed = judged.error or 0.0, judged.allowed or math.inf
    return judged.verdict.severity, error / allowed


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


def _judge_non_finite(
    judged: Judgement, seen: Measurement, of_reference: Measurement, of_candidate: Measurement
) -> Judgement:
    """Judge the NaNs and infinities too: they must be where reference and truth agree that they are."""
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
    if seen.mismatches and untold > 0:
        reason = (
            f"the truth is NaN or Inf at {untold} of {seen.numel} elements where the reference is not; {judged.reason}"
        )
        return judged._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
    return judged
