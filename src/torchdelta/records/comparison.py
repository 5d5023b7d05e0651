"""The evidence for one leaf: the comparison of the reference's leaf with its partner in the candidate.

`Measurement` has the raw numbers of one pass over both tensors, `Breach` a broken clause of the contract, and
`Comparison` the verdict with all of it. Start reading at `Comparison`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torchdelta.records.verdict import Verdict

ANOTHER_FUNCTION = "another_function"
"""Both sides differ in float64 too, where almost nothing is rounded."""
LESS_ACCURATE = "less_accurate"
"""Both sides agree in float64, so the candidate is the same function, and further from the truth than noise is."""
CONTRACT = "contract"
"""A clause of the contract is broken, such as a dtype or a shape."""
UNKNOWN = "unknown"
"""Float64 was not asked, or could not tell."""

Scalar = bool | int | float | str
"""A value as JSON can hold it; complex numbers are strings such as `(1+2j)`."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Every number of one fused pass over two buffers of the same shape, raw.

    Sums and maxima of finite numbers run over the elements that are finite on both sides. Of complex tensors the
    real and imaginary components are measured as elements of their own.
    """

    numel: int
    finite: int
    """Elements that are finite on both sides."""
    mismatches: int
    """Elements whose bits differ; any NaN equals any NaN. Between two dtypes: whose values differ."""
    misplaced: int
    """Elements where one side has a NaN or an infinity and the other does not have the same."""
    nan_reference: int
    nan_candidate: int
    inf_reference: int
    inf_candidate: int
    max_abs: float
    max_rel: float
    """max |candidate − reference| / |reference|; infinite where only the reference is zero."""
    square_error: float
    square_reference: float
    square_candidate: float
    dot: float
    max_ulp: int | None
    """The largest distance in representable numbers; None between two dtypes and for integers."""
    beyond: int
    """Elements with |candidate − reference| > atol + rtol·|reference|."""
    worst: int
    """Flat index of the worst element, a misplaced one before any other; −1 for an empty tensor."""

    @classmethod
    def of(cls, numbers: dict[str, Any]) -> Measurement:
        """Return a measurement with these numbers, which must name every field; nothing is checked.

        The constructor would set each field apart, which takes longer than measuring a small tensor.
        """
        measurement = object.__new__(cls)
        measurement.__dict__.update(numbers)
        return measurement

    @property
    def rms_error(self) -> float:
        """Root mean square of candidate − reference over the elements that are finite on both sides; 0 without any."""
        return math.sqrt(self.square_error / max(self.finite, 1))

    @property
    def rms_reference(self) -> float:
        """Root mean square of the reference over the elements that are finite on both sides; 0 without any."""
        return math.sqrt(self.square_reference / max(self.finite, 1))

    @property
    def sqnr_db(self) -> float:
        """Signal to noise in dB over the elements that are finite on both sides, the reference being the signal.

        Infinite without any error; minus infinity if there is an error and the reference is zero everywhere; NaN if
        both sums of squares overflow.
        """
        if self.square_error == 0.0:
            return math.inf
        if self.square_reference == 0.0:
            return -math.inf
        # a difference of logarithms: the ratio itself may be too small or too large for a float
        return 10.0 * (math.log10(self.square_reference) - math.log10(self.square_error))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both sides, over the elements that are finite on both.

        1 when both are zero, 0 when one is.
        """
        if self.square_reference == 0.0 and self.square_candidate == 0.0:
            return 1.0
        norms = math.sqrt(self.square_reference) * math.sqrt(self.square_candidate)
        return self.dot / norms if norms > 0.0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Breach:
    """One clause of the contract that the candidate broke, as each side has it."""

    clause: str
    reference: str
    candidate: str
    excused: bool = False
    """True when `--ignore` or the transform itself allows it; it stays on the report."""

    def __str__(self) -> str:
        return f"{self.clause}: {self.reference} in the reference, {self.candidate} in the candidate"


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The worst element: where it is, and the three values there."""

    index: tuple[int, ...]
    reference: Scalar | None
    candidate: Scalar | None
    truth: Scalar | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One leaf: its verdict and the evidence for it."""

    path: str
    verdict: Verdict
    reason: str
    leaf: str = "tensor"
    """What the leaf is: `tensor`, `object`, `structure`, `statistics` or `exception`."""
    kind: str | None = None
    """Of a divergence, what it is: `another_function`, `less_accurate`, `contract` or `unknown`."""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    contract: tuple[Breach, ...] = ()
    error: float | None = None
    """The candidate's error, in the unit of the values."""
    noise: float | None = None
    """The error that a correct program would show; None under a policy that does not use it."""
    allowed: float | None = None
    """The largest error that would still have passed."""
    resolution: float | None = None
    """The smallest relative error that would have been a divergence."""
    worst: Worst | None = None
    measurement: Measurement | None = None
    """The candidate against the reference."""
    details: dict[str, Scalar] = field(default_factory=dict)
    """Further numbers that the policy used, by name."""

    @property
    def ratio(self) -> float:
        """Error over allowed error: above 1 is a divergence; 0 if the error is 0 or None, or `allowed` is None.

        Infinite if there is an error and `allowed` is 0, or if the ratio is NaN.
        """
        if not self.error or self.allowed is None:
            return 0.0
        ratio = self.error / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(ratio) else ratio

    @property
    def rank(self) -> tuple[float, ...]:
        """A sort key that is higher for worse comparisons: verdict, broken contract, misplaced values, ratio, error.

        Excused breaches do not break the contract here. An unknown error counts as 0, and NaN as infinite.
        """
        is_broken = any(not breach.excused for breach in self.contract)
        misplaced = self.measurement.misplaced if self.measurement else 0
        error = self.error or 0.0
        return self.verdict.severity, is_broken, misplaced, self.ratio, math.inf if math.isnan(error) else error


@dataclass(frozen=True, kw_only=True)
class UnmatchedLeaf:
    """A leaf that has no partner on the other side."""

    path: str
    side: str
    what: str
