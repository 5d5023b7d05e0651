"""When is a difference a divergence? What a policy is, and those that ask for no truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torchdelta.compare.metrics import METRICS
from torchdelta.records.comparison import Measurement, Scalar
from torchdelta.records.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Two floating-point tensors of one shape, the truth where there is one, and the pass over the first two."""

    reference: torch.Tensor
    candidate: torch.Tensor
    truth: torch.Tensor | None
    measurement: Measurement
    lowered_to: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict on values alone, with what it rests on."""

    verdict: Verdict
    reason: str
    error: float | None = None
    noise: float | None = None
    allowed: float | None = None
    resolution: float | None = None
    details: dict[str, Scalar] = field(default_factory=dict)


class Policy(Protocol):
    """Judges the values of one pair; the contract and integers are not its business."""

    needs_truth: bool

    @property
    def rtol(self) -> float | None:
        """Relative tolerance to count the elements beyond; None leaves it to the dtype."""

    @property
    def atol(self) -> float | None:
        """Absolute tolerance to count the elements beyond; None leaves it to the dtype."""

    def judge(self, sample: Sample) -> Judgement:
        """Say whether the difference of these values matters."""


@dataclass(frozen=True)
class Bitwise:
    """Every bit, but any NaN equals any NaN."""

    needs_truth = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged on the first differing bit."""
        seen = sample.measurement
        verdict = Verdict.DIVERGED if seen.mismatches else Verdict.EQUIVALENT
        reason = f"{seen.mismatches} of {seen.numel} elements differ" if seen.mismatches else "bitwise identical"
        return Judgement(verdict=verdict, reason=reason, error=seen.max_abs, allowed=0.0, resolution=0.0)


# what torch.testing.assert_close documents for each dtype: (rtol, atol)
_BY_DTYPE = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


def default_tolerance(*dtypes: torch.dtype) -> tuple[float, float]:
    """Return torch.testing's rtol and atol, of the coarser dtype where both sides have one."""
    known = [_BY_DTYPE[dtype] for dtype in dtypes if dtype in _BY_DTYPE]
    return max(known, default=(0.0, 0.0))


@dataclass(frozen=True)
class Tolerance:
    """|candidate − reference| ≤ atol + rtol·|reference| at every element, as torch means it."""

    rtol: float | None = None
    atol: float | None = None
    needs_truth = False

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when a single element is beyond the tolerance."""
        seen = sample.measurement
        rtol, atol = default_tolerance(sample.reference.dtype, sample.candidate.dtype)
        rtol, atol = self.rtol if self.rtol is not None else rtol, self.atol if self.atol is not None else atol
        said = f"rtol={rtol:g}, atol={atol:g}"
        if seen.beyond:
            verdict, reason = Verdict.DIVERGED, f"{seen.beyond} of {seen.numel} elements are beyond {said}"
        else:
            verdict, reason = Verdict.EQUIVALENT, f"every element is within {said}"
        allowed = atol + rtol * seen.rms_reference
        return Judgement(
            verdict=verdict,
            reason=reason,
            error=seen.max_abs,
            allowed=allowed,
            resolution=relative(allowed, seen.rms_reference),
            details={"rtol": rtol, "atol": atol},
        )


@dataclass(frozen=True)
class Threshold:
    """A registered metric on the right side of a bound: `sqnr>=35`."""

    metric: str
    at_least: bool
    bound: float
    needs_truth = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when the metric misses the bound or is not a number, or a non-finite value is out of place."""
        seen = sample.measurement
        value = METRICS.get(self.metric)(seen)
        holds = value >= self.bound if self.at_least else value <= self.bound
        holds = holds and not seen.misplaced
        sign = ">=" if self.at_least else "<="
        said = f"{self.metric} is {value:.6g}, asked for {sign} {self.bound:g}"
        if seen.misplaced:
            said = f"NaN or Inf out of place at {seen.misplaced} elements; {said}"
        return Judgement(
            verdict=Verdict.EQUIVALENT if holds else Verdict.DIVERGED,
            reason=said,
            error=seen.rms_error,
            details={self.metric: value, "bound": self.bound},
        )


def relative(error: float, scale: float) -> float | None:
    """Return error over scale; None where there is no scale to speak of."""
    return error / scale if scale > 0.0 and math.isfinite(scale) else None
