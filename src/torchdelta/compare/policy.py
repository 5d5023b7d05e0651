"""Named numbers of a measurement that a policy can put a bound on.

When is a difference a divergence? What a policy is, and those that ask for no truth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from torchdelta.compare import torch_kernels
from torchdelta.errors import UsageError
from torchdelta.records.comparison import Breach, Measurement, Scalar, Worst
from torchdelta.records.verdict import Verdict
from torchdelta.registry import Registry

Metric = Callable[[Measurement], float]

METRICS: Registry[Metric] = Registry("metric")
METRICS.add("sqnr", attrgetter("sqnr_db"))
METRICS.add("cosine", lambda seen: seen.cosine if seen.square_error else 1.0)  # the square roots would round below 1
METRICS.add("max_abs", attrgetter("max_abs"))
METRICS.add("max_rel", attrgetter("max_rel"))
METRICS.add("rms", attrgetter("rms_error"))


# tuples and no dataclasses: one of each is made for every leaf, and a frozen dataclass takes three times as long
class Sample(NamedTuple):
    """Two floating-point tensors of one shape, the truth where there is one, and the pass over the first two."""

    reference: torch.Tensor
    candidate: torch.Tensor
    truth: torch.Tensor | None
    measurement: Measurement
    worst: Worst | None
    rtol: float
    atol: float
    """The tolerances that the measurement counted with."""
    lowered_to: torch.dtype | None = None
    noisy: tuple[torch.Tensor, ...] = ()
    """The reference run with every rounding moved."""
    is_stepped: bool = False
    """Whether an optimizer made these values."""

    @property
    def size_at_worst(self) -> float:
        """Return |reference| at the worst element; 0 where it is not finite or there is none."""
        value = self.worst.reference if self.worst else None
        size = abs(complex(value) if isinstance(value, str) else value or 0.0)
        return size if math.isfinite(size) else 0.0


class Judgement(NamedTuple):
    """A verdict on values alone, with what it rests on."""

    verdict: Verdict
    reason: str
    error: float | None = None
    noise: float | None = None
    allowed: float | None = None
    resolution: float | None = None
    details: dict[str, Scalar] | None = None
    breaches: tuple[Breach, ...] = ()
    """What the verdict excuses."""


class Policy(Protocol):
    """Judges the values of one pair; the contract and integers are not its business."""

    needs_truth: bool
    judges_integers: bool
    """Whether it judges integers and booleans too, which otherwise have to be the same."""

    @property
    def rtol(self) -> float | None:
        """Relative tolerance to count the elements beyond; None leaves both to the dtype."""

    @property
    def atol(self) -> float | None:
        """Absolute tolerance to count the elements beyond; None leaves both to the dtype."""

    def judge(self, sample: Sample) -> Judgement:
        """Say whether the difference of these values matters."""


@dataclass(frozen=True)
class Bitwise:
    """Every bit, but any NaN equals any NaN."""

    needs_truth = False
    judges_integers = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged on the first differing bit."""
        seen = sample.measurement
        return Judgement(
            verdict=Verdict.DIVERGED if seen.mismatches else Verdict.EQUIVALENT,
            reason=f"{seen.mismatches} of {seen.numel} elements differ" if seen.mismatches else "bitwise identical",
            error=largest_error(seen),
            allowed=0.0,
            resolution=0.0,
        )


@dataclass(frozen=True)
class ByFunction:
    """A function of the user's on two tensors, integers too: it raises or returns False where they are not the same."""

    function: Callable[[torch.Tensor, torch.Tensor], object]
    needs_truth = False
    judges_integers = True
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged where the function says so; what it raises besides is a mistake in it."""
        name, said = getattr(self.function, "__qualname__", type(self.function).__qualname__), ""
        try:
            answer: Any = self.function(sample.reference.clone(), sample.candidate.clone())
            if answer is not None and not bool(answer):
                said = f"it returned {answer}"
        except AssertionError as error:
            said = str(error).strip() or "AssertionError"
        except Exception as error:
            raise UsageError(f"{name}, which compares, raised {type(error).__name__}: {error}") from error
        return Judgement(
            verdict=Verdict.DIVERGED if said else Verdict.EQUIVALENT,
            reason=f"{name} says: {said}" if said else f"{name} takes them for the same",
            error=largest_error(sample.measurement),
        )


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


@functools.cache
def default_tolerance(*dtypes: torch.dtype) -> tuple[float, float]:
    """Return torch.testing's rtol and atol, of the coarser dtype where both sides have one."""
    return max(_BY_DTYPE.get(dtype, (0.0, 0.0)) for dtype in dtypes)


@dataclass(frozen=True)
class Tolerance:
    """|candidate − reference| ≤ atol + rtol·|reference| at every element, as torch means it."""

    rtol: float | None = None
    atol: float | None = None
    needs_truth = False
    judges_integers = False

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when a single element is beyond the tolerance."""
        seen, rtol, atol = sample.measurement, sample.rtol, sample.atol
        is_complex = sample.reference.dtype.is_complex or sample.candidate.dtype.is_complex
        beyond = _beyond_by_modulus(sample) if is_complex else seen.beyond
        said = _said(rtol, atol)
        scale = seen.rms_reference
        return Judgement(
            verdict=Verdict.DIVERGED if beyond else Verdict.EQUIVALENT,
            reason=f"{beyond} of {sample.reference.numel()} elements are beyond {said}"
            if beyond
            else f"every element is within {said}",
            error=largest_error(seen),
            allowed=atol + rtol * sample.size_at_worst,
            resolution=relative(atol + rtol * scale, scale),
            details={"rtol": rtol, "atol": atol},
        )


@functools.cache  # writing a float takes as long as all other arithmetic here
def _said(rtol: float, atol: float) -> str:
    return f"rtol={rtol:g}, atol={atol:g}"


def _beyond_by_modulus(sample: Sample) -> int:
    # torch holds the modulus of a complex difference against that of the reference; the pass went by components
    beyond = 0
    for index in torch_kernels.pieces(sample.reference.shape, 2**14):
        reference, candidate = (side[index].to(torch.complex128) for side in (sample.reference, sample.candidate))
        near = torch.isclose(candidate, reference, rtol=sample.rtol, atol=sample.atol, equal_nan=True)
        beyond += near.numel() - int(near.sum())
    return max(beyond, sample.measurement.misplaced)


@dataclass(frozen=True)
class Threshold:
    """A registered metric on the right side of a bound: `sqnr>=35`."""

    metric: str
    at_least: bool
    bound: float
    needs_truth = False
    judges_integers = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when the metric misses the bound or is not a number, or a non-finite value is out of place."""
        seen = sample.measurement
        value = METRICS.get(self.metric)(seen)
        holds = value >= self.bound if self.at_least else value <= self.bound
        reason = f"{self.metric} is {value:.6g}, asked for {'>=' if self.at_least else '<='} {self.bound:g}"
        if seen.misplaced:
            reason = f"NaN or Inf out of place at {seen.misplaced} elements; {reason}"
        allowed = self._allowed(seen)
        return Judgement(
            verdict=Verdict.EQUIVALENT if holds and not seen.misplaced else Verdict.DIVERGED,
            reason=reason,
            error=math.inf if seen.misplaced else seen.rms_error,
            allowed=allowed,
            resolution=None if allowed is None else relative(allowed, seen.rms_reference),
            details={self.metric: value, "bound": self.bound},
        )

    def _allowed(self, seen: Measurement) -> float | None:
        """Return the largest rms error that holds; None where that is not what the metric bounds."""
        if self.metric == "sqnr" and self.at_least:
            return seen.rms_reference * math.pow(10.0, -self.bound / 20.0)
        return self.bound if self.metric == "rms" and not self.at_least else None


def largest_error(seen: Measurement) -> float:
    """Return the largest difference; infinite where one side is infinite or no number and the other is not."""
    return math.inf if seen.misplaced else seen.max_abs


def relative(error: float, scale: float) -> float | None:
    """Return error over scale; None where there is no scale to speak of."""
    return error / scale if scale > 0.0 and math.isfinite(scale) else None
