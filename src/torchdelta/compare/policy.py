"""When is a difference a divergence? What a policy is, and the policies that need no truth.

A policy judges the values of one pair of floating-point leaves. The policies that need a truth have files of their
own: `noise.Noise`, the default, `semantic.Semantic` and `quantization_noise.StepNoise`. `policy_parser` reads the text
by which a user names a policy. `METRICS` are the numbers of a measurement that a policy can put a bound on, such as
`sqnr>=35`. Start with `Policy`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from torchdelta.compare import torch_kernels
from torchdelta.errors import UsageError
from torchdelta.records.comparison import Breach, Measurement, Scalar, Worst
from torchdelta.records.verdict import Verdict
from torchdelta.registry import Registry

Metric = Callable[[Measurement], float]

IDENTICAL = "bitwise identical"

METRICS: Registry[Metric] = Registry("metric")
METRICS.add("sqnr", attrgetter("sqnr_db"))
METRICS.add("cosine", lambda pair: pair.cosine if pair.square_error else 1.0)  # the square roots would round below 1
METRICS.add("max_abs", attrgetter("max_abs"))
METRICS.add("max_rel", attrgetter("max_rel"))
METRICS.add("rms", attrgetter("rms_error"))
METRIC_RANGES = {"cosine": (-1.0, 1.0), "max_abs": (0.0, math.inf), "max_rel": (0.0, math.inf), "rms": (0.0, math.inf)}
"""The smallest and the largest value of a metric, where it has them."""


# tuples instead of dataclasses: every leaf has one of each, and a frozen dataclass takes three times as long to build
class Sample(NamedTuple):
    """Two floating-point tensors of one shape, their truth if there is one, and the measurement of the two."""

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
        """Return |reference| at the worst element, or 0 if it is not finite or there is none."""
        value = self.worst.reference if self.worst else None
        size = abs(complex(value) if isinstance(value, str) else value or 0.0)
        return size if math.isfinite(size) else 0.0


class Judgement(NamedTuple):
    """A verdict on values alone, with its evidence."""

    verdict: Verdict
    reason: str
    error: float | None = None
    noise: float | None = None
    allowed: float | None = None
    resolution: float | None = None
    details: dict[str, Scalar] | None = None
    breaches: tuple[Breach, ...] = ()
    """The breaches that the verdict excuses."""

    @classmethod
    def of_statistic(
        cls, statistic: str, error: float, noise: float, limit: float, unit: str, *, names_limit: bool = True
    ) -> Judgement:
        """Return DIVERGED if `error` is NaN or more than `limit` times `noise`, and otherwise EQUIVALENT.

        `statistic` names the error in the reason and in the details, and `unit` is the noise in words, for the reason.
        With `names_limit` the reason of a divergence ends with the limit. The allowed error is `limit` times `noise`.
        """
        is_within = error <= limit * noise  # False for an error that is NaN
        times = f"{error / noise:.3g} times" if noise else "infinitely many times"
        reason = f"{statistic} error is {times} {unit}"
        return cls(
            verdict=Verdict.EQUIVALENT if is_within else Verdict.DIVERGED,
            reason=reason if is_within or not names_limit else f"{reason}; up to {limit:.3g} times would be rounding",
            error=error,
            noise=noise,
            allowed=limit * noise,
            details={"statistic": statistic},
        )

    @property
    def rank(self) -> tuple[int, float]:
        """The key by which the worst of several judgements of one sample is the largest."""
        error = self.error or 0.0
        if not error:
            return self.verdict.severity, 0.0
        if self.allowed is None:  # by a policy that bounds no error
            return self.verdict.severity, 0.0
        return self.verdict.severity, error / self.allowed if self.allowed and math.isfinite(error) else math.inf


class Policy(ABC):
    """Judges the values of one pair; the judge compares the contract, and integers unless the policy does."""

    needs_truth: bool = False
    judges_integers: bool = False
    """Whether it judges integers and booleans too, which otherwise have to be equal."""
    rtol: float | None = 0.0
    """The relative tolerance beyond which elements are counted; None takes both tolerances of the dtype."""
    atol: float | None = 0.0
    """The absolute tolerance beyond which elements are counted."""

    @abstractmethod
    def judge(self, sample: Sample) -> Judgement:
        """Return whether the difference of these values matters, with the evidence."""


@dataclass(frozen=True)
class Bitwise(Policy):
    """Every bit has to be the same, except that any NaN equals any NaN."""

    def judge(self, sample: Sample) -> Judgement:
        """Return DIVERGED if a single bit differs, and otherwise EQUIVALENT; any NaN equals any NaN.

        Between two dtypes the values are compared. The error is the largest difference, or infinity if NaN or Inf is
        misplaced.
        """
        pair = sample.measurement
        return Judgement(
            verdict=Verdict.DIVERGED if pair.mismatches else Verdict.EQUIVALENT,
            reason=f"{pair.mismatches} of {pair.numel} elements differ" if pair.mismatches else IDENTICAL,
            error=largest_error(pair),
            allowed=0.0,
            resolution=0.0,
        )


@dataclass(frozen=True)
class ByFunction(Policy):
    """A user's function of two tensors, integers too: it raises AssertionError or returns False if they differ."""

    function: Callable[[torch.Tensor, torch.Tensor], object]
    judges_integers = True

    def judge(self, sample: Sample) -> Judgement:
        """Call the user's function with copies of both tensors; return DIVERGED if it complains, else EQUIVALENT.

        It complains by raising AssertionError or by returning a false value other than None. UsageError if it raises
        anything else, or returns what is neither true nor false, such as a tensor of several elements.
        """
        name, complaint = getattr(self.function, "__qualname__", type(self.function).__qualname__), ""
        try:
            answer: Any = self.function(sample.reference.clone(), sample.candidate.clone())
            if answer is not None and not bool(answer):
                complaint = f"it returned {answer}"
        except AssertionError as error:
            complaint = str(error).strip() or "AssertionError"
        except Exception as error:
            raise UsageError(f"{name}, which compares, raised {type(error).__name__}: {error}") from error
        return Judgement(
            verdict=Verdict.DIVERGED if complaint else Verdict.EQUIVALENT,
            reason=f"{name} says: {complaint}" if complaint else f"{name} takes them for the same",
            error=largest_error(sample.measurement),
        )


# (rtol, atol) of each dtype, as documented for torch.testing.assert_close
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
    """Return torch.testing's rtol and atol for the coarsest of these dtypes; both are 0 for integers and float8."""
    return max(_BY_DTYPE.get(dtype, (0.0, 0.0)) for dtype in dtypes)


@dataclass(frozen=True)
class Tolerance(Policy):
    """|candidate − reference| ≤ atol + rtol·|reference| at every element, as in torch.testing."""

    rtol: float | None = None
    atol: float | None = None

    def judge(self, sample: Sample) -> Judgement:
        """Return DIVERGED if a single element is beyond the tolerance or a NaN or Inf misplaced, else EQUIVALENT.

        The tolerance is that of the sample. Complex elements count by their modulus. The error is the largest
        difference, or infinity if a NaN or Inf is misplaced; `allowed` is the tolerance at the worst element.
        """
        pair, rtol, atol = sample.measurement, sample.rtol, sample.atol
        is_complex = sample.reference.dtype.is_complex or sample.candidate.dtype.is_complex
        beyond = _count_beyond_by_modulus(sample) if is_complex else pair.beyond
        tolerance = _format_tolerance(rtol, atol)
        scale = pair.rms_reference
        return Judgement(
            verdict=Verdict.DIVERGED if beyond else Verdict.EQUIVALENT,
            reason=f"{beyond} of {sample.reference.numel()} elements are beyond {tolerance}"
            if beyond
            else f"every element is within {tolerance}",
            error=largest_error(pair),
            allowed=atol + rtol * sample.size_at_worst,
            resolution=relative(atol + rtol * scale, scale),
            details={"rtol": rtol, "atol": atol},
        )


@functools.cache  # formatting a float takes as long as all other arithmetic here
def _format_tolerance(rtol: float, atol: float) -> str:
    """Return both tolerances as a text."""
    return f"rtol={rtol:g}, atol={atol:g}"


def _count_beyond_by_modulus(sample: Sample) -> int:
    """Return the number of complex elements beyond the sample's tolerance, by modulus as in torch; NaN equals NaN.

    It is at least the number of misplaced components, some of which torch would not count.
    """
    beyond = 0
    for index in torch_kernels.pieces(sample.reference.shape, 2**14):
        reference, candidate = (side[index].to(torch.complex128) for side in (sample.reference, sample.candidate))
        near = torch.isclose(candidate, reference, rtol=sample.rtol, atol=sample.atol, equal_nan=True)
        beyond += near.numel() - int(near.sum())
    return max(beyond, sample.measurement.misplaced)


@dataclass(frozen=True)
class Threshold(Policy):
    """A registered metric on the right side of a bound: `sqnr>=35`."""

    metric: str
    at_least: bool
    bound: float

    def judge(self, sample: Sample) -> Judgement:
        """Return DIVERGED if the metric misses the bound or is NaN, or if a NaN or Inf is misplaced, else EQUIVALENT.

        The error is the rms error, or infinity if a NaN or Inf is misplaced. `allowed` is None if the metric does not
        bound the rms error.
        """
        pair = sample.measurement
        value = METRICS.get(self.metric)(pair)
        holds = value >= self.bound if self.at_least else value <= self.bound
        reason = f"{self.metric} is {value:.6g}, asked for {'>=' if self.at_least else '<='} {self.bound:g}"
        if pair.misplaced:
            reason = f"NaN or Inf out of place at {pair.misplaced} elements; {reason}"
        allowed = self._allowed(pair)
        return Judgement(
            verdict=Verdict.EQUIVALENT if holds and not pair.misplaced else Verdict.DIVERGED,
            reason=reason,
            error=math.inf if pair.misplaced else pair.rms_error,
            allowed=allowed,
            resolution=None if allowed is None else relative(allowed, pair.rms_reference),
            details={self.metric: value, "bound": self.bound},
        )

    def _allowed(self, pair: Measurement) -> float | None:
        """Return the largest rms error within the bound, or None if the metric does not bound the rms error."""
        if self.metric == "sqnr" and self.at_least:
            return rms_within(self, pair.rms_reference)
        return self.bound if self.metric == "rms" and not self.at_least else None


def rms_within(policy: Threshold, rms_reference: float) -> float:
    """Return the largest rms error within a bound `sqnr>=B`; infinity for any other threshold."""
    if policy.metric != "sqnr" or not policy.at_least:
        return math.inf
    try:
        return rms_reference * math.pow(10.0, -policy.bound / 20.0)
    except OverflowError:  # a bound so low that anything is within it
        return math.inf


def largest_error(pair: Measurement) -> float:
    """Return the largest difference, or infinity if a NaN or Inf is misplaced: not the same on both sides."""
    return math.inf if pair.misplaced else pair.max_abs


def describe_misplaced(pair: Measurement) -> str:
    """Return the words for how many elements are NaN or Inf on one side, and not the same on the other."""
    return f"NaN or Inf out of place at {pair.misplaced} of {pair.numel} elements"


def luck(numel: int) -> float:
    """Return the factor, above 1, of a limit for a tensor of this size: statistics of few elements vary by luck."""
    return 1.0 + 4.0 / math.sqrt(max(numel, 1))


def relative(error: float, scale: float) -> float | None:
    """Return error over scale, or None if the scale is not positive and finite."""
    return error / scale if scale > 0.0 and math.isfinite(scale) else None
