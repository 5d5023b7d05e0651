"""Is it noise or a bug? The default policy compares the candidate's distance from the truth with that of correct runs.

A correct program of the same dtype is about as far from the float64 truth as the reference is, and as noisy runs are:
the reference with every rounding moved. The candidate may be as far off as the largest of these, times a limit, by
four statistics: the root mean square; the largest element; the upper quartile, which elements that jump do not move;
and the worst block of elements, which finds a wrong row that the whole tensor hides. Values of very different sizes are
judged apart (`magnitudes`). A candidate that is *closer* to the truth than the reference has not diverged. Start with
`Noise.judge`; the limits are `SINGLE` and the constants after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchdelta.compare.kernels import measure
from torchdelta.compare.magnitudes import Part, coarsest_resolution, parts_of
from torchdelta.compare.policy import IDENTICAL, Judgement, Policy, Sample, describe_misplaced, luck, relative
from torchdelta.compare.spread import MASK, Array, Spread, is_finite, lost_masks, quartile_distances, spreads
from torchdelta.records.comparison import Measurement, Scalar
from torchdelta.records.verdict import Verdict

COARSEST = 0.3
"""A dtype whose own rounding allows a larger relative error than this is too coarse to judge: float8."""


class Slack(NamedTuple):
    """How far from the truth a correct program may be."""

    limit: float
    """In multiples of the noise."""
    exaggeration: float
    """How much further from the truth a noisy run is than a correct program: it moves roundings by a whole unit."""


# measured with benchmarks/verdicts.py
SINGLE = Slack(4.0, 4.0)
NARROW = Slack(2.5, 8.0)
"""bfloat16 and float16, which are multiplied and summed in a wider dtype."""
STEPS = Slack(4.0, 2.0)
LOWERED = Slack(4.0, 1.0)
"""The candidate computes in a lower dtype on purpose: only the noisy runs, and not the reference, have its noise."""
ALONE = Slack(16.0, 1.0)
"""Without a noisy run the reference is the only correct program there is."""
ROW = 2.0
"""The limit of the worst block is so many times that of the others, because a maximum over blocks varies more."""
LARGEST = 2.0
"""As `exaggeration`, of the largest element."""
ORDINARY = 16.0
"""The limit of the upper quartile of the error is so many times that of the others.

A few elements that rounding decides, such as a `floor` at its threshold, jump and make the noise of the tensor. The
quartile alone shows that all other elements are wrong, and it then is off by orders of magnitude.
"""


@dataclass(frozen=True)
class Noise(Policy):
    """The default policy: the program's own rounding sets the tolerance."""

    accepted: float = 1.0
    """A candidate that is the same function may be less accurate, by so many times the noise."""
    needs_truth = True

    def judge(self, sample: Sample) -> Judgement:
        """Return DIVERGED if the candidate is further from the truth than rounding explains, and otherwise EQUIVALENT.

        Values of very different sizes are judged apart (`parts_of`), and the worst part decides. In a part it is the
        worst of rms, largest and quartile error and, with noisy runs, error of the worst block. Identical tensors are
        EQUIVALENT. Lost mask constants, and a NaN or Inf out of place where reference and truth agree, are DIVERGED.
        INCONCLUSIVE if values differ without a truth, if the dtype is too coarse, if the noise overflows float64, or if
        NaN or Inf leave values that cannot be judged. `accepted` has no effect here.
        """
        if sample.truth is None:
            return _judge_without_truth(sample.measurement)
        if not sample.measurement.mismatches:
            return _judge_identical(sample)
        parts = parts_of(sample, sample.truth)
        judgements = [_judge_part(part, sample) for part in parts]
        judgement = max(judgements, key=lambda judgement: judgement.rank)
        judgement = judgement._replace(resolution=coarsest_resolution(parts, judgements))
        return _judge_non_finite(judgement, sample)


def _judge_part(part: Part, whole: Sample) -> Judgement:
    """Return the judgement of the finite values of one part of a sample, by the worst of its statistics.

    Mask constants are DIVERGED if one is not what it was, and otherwise EQUIVALENT. Any other part is INCONCLUSIVE in
    place of EQUIVALENT if its dtype is too coarse. A resolution above `COARSEST` becomes that of the dtype if
    `_is_rounded_truth`. `whole` is the sample before it was cut into parts.
    """
    sample = part.sample
    if part.is_mask:
        return _judge_masks(sample, whole)
    distances = _Distances.of(sample, part.elements)
    judgement = max(distances.judgements(), key=lambda judgement: judgement.rank)
    if judgement.verdict is Verdict.EQUIVALENT and distances.limit * distances.floor > COARSEST * distances.scale:
        reason = f"{judgement.reason}, but rounding alone may be that large in so coarse a dtype"
        judgement = judgement._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
    details = {
        **(judgement.details or {}),
        "rms_of_truth": part.unscale(distances.scale),
        "floor": part.unscale(distances.floor),
        "reference_error": part.unscale(distances.reference.rms),
        "roundoff": _coarsest_roundoff(sample),
        "noisy_runs": len(sample.noisy),
        "question": "native",
    }
    resolution = distances.resolution
    if resolution is not None and resolution > COARSEST and _is_rounded_truth(sample):
        resolution = 2.0 * distances.unit
    return part.unscaled(judgement._replace(resolution=resolution, details=details))


def _is_rounded_truth(sample: Sample) -> bool:
    """Tell whether each element of the candidate is the truth but for one rounding of its own size.

    No correct program is closer, however much larger other elements of the tensor are. False for complex tensors.
    """
    assert sample.truth is not None
    if sample.truth.is_complex():
        return False
    truth, candidate = sample.truth.detach().double(), sample.candidate.detach().double()
    return bool(((candidate - truth).abs() <= 2.0 * _coarsest_roundoff(sample) * truth.abs()).all())


def _judge_masks(sample: Sample, whole: Sample) -> Judgement:
    """Return DIVERGED if a mask constant of a part is not what it was (`lost_masks`), and otherwise EQUIVALENT.

    `whole`, the sample that the part belongs to, only gives the roundoff and the number of noisy runs for the details.
    """
    assert sample.truth is not None
    lost = lost_masks(sample.truth, sample.reference, sample.candidate)
    details: dict[str, Scalar] = {
        "roundoff": _coarsest_roundoff(whole),
        "noisy_runs": len(whole.noisy),
        "question": "native",
    }
    if lost:
        reason = f"{lost} values beyond {MASK:g}, which are taken for mask constants, are not what they were"
        return Judgement(Verdict.DIVERGED, reason, error=math.inf, noise=0.0, allowed=0.0, details=details)
    return Judgement(Verdict.EQUIVALENT, "mask constants are what they were", 0.0, 0.0, 0.0, details=details)


class Quartiles(NamedTuple):
    """The upper quartiles of the distances from the truth; of several noisy runs the largest."""

    candidate: float
    reference: float
    noisy: float


@dataclass(frozen=True, kw_only=True)
class _Distances:
    """The distances from the truth of the candidate and of every correct run, and what they are held against."""

    candidate: Spread
    reference: Spread
    noisy: list[Spread]
    sizes: Array
    """The mean square of the truth, by block."""
    slack: Slack
    unit: float
    scale: float
    numel: int
    largest_rounding: float
    quartiles: Quartiles

    @classmethod
    def of(cls, sample: Sample, numel: int) -> _Distances:
        """Return how far candidate, reference and noisy runs of a sample are from its truth, which must not be None.

        `numel` is the number of elements that count: the others are zero on all sides.
        """
        truth = sample.truth
        assert truth is not None
        unit = _coarsest_roundoff(sample)
        runs = sample.candidate, sample.reference, *sample.noisy
        of_truth, candidate, reference, *noisy = spreads(truth, (None, *runs), math.inf)
        quartiles = quartile_distances(truth, runs)
        return cls(
            candidate=candidate,
            reference=reference,
            noisy=noisy,
            sizes=of_truth.squares,
            slack=_slack(sample),
            unit=unit,
            scale=of_truth.rms,
            numel=numel,
            # an element rounds in proportion to its own size, and one may be much larger than the others
            largest_rounding=0.5 * unit * _size_at(truth, candidate.at),
            quartiles=Quartiles(candidate=quartiles[0], reference=quartiles[1], noisy=max(quartiles[2:], default=0.0)),
        )

    @property
    def limit(self) -> float:
        """How many times the noise an error may be; more for few elements."""
        return self.slack.limit * luck(self.numel)

    @property
    def floor(self) -> float:
        """The least noise: half a unit of rounding of the truth's rms."""
        return 0.5 * self.unit * self.scale

    @property
    def rms_noise(self) -> float:
        """The rms error of a correct program: the largest of the reference's, the noisy runs', and the floor.

        Those of the noisy runs are divided by their exaggeration.
        """
        exaggeration = self.slack.exaggeration
        return max(self.reference.rms, self.floor, *(run.rms / exaggeration for run in self.noisy), 0.0)

    @property
    def resolution(self) -> float | None:
        """The smallest rms error that would diverge, relative to the truth's; None if that is zero or not finite."""
        return relative(self.limit * self.rms_noise, self.scale)

    def judgements(self) -> list[Judgement]:
        """Return the judgements of the rms, largest and quartile errors, and, with noisy runs, of the worst block.

        The noise of the first three is the largest of the reference's error, the errors of the noisy runs over their
        exaggeration (for the largest error at most `LARGEST`), and half a unit of rounding of the truth's rms; for the
        largest error also of the truth where the candidate is furthest off. Blocks are not judged if there is only one,
        or if their squared errors overflow.
        """
        exaggeration = min(LARGEST, self.slack.exaggeration)
        peaks = (run.peak / exaggeration for run in self.noisy)
        max_noise = max(self.reference.peak, self.floor, self.largest_rounding, *peaks, 0.0)
        quartiles = self.quartiles
        quartile_noise = max(quartiles.reference, self.floor, quartiles.noisy / self.slack.exaggeration)
        judgements = [
            _judge("rms", self.candidate.rms, self.rms_noise, self.limit),
            _judge("max", self.candidate.peak, max_noise, self.limit),
            _judge("quartile", quartiles.candidate, quartile_noise, ORDINARY * self.limit),
        ]
        if self.noisy and self.candidate.squares.size > 1 and math.isfinite(float(self.candidate.squares.sum())):
            judgements.append(self._judge_rows())
        return judgements

    def _judge_rows(self) -> Judgement:
        """Return the judgement of the block whose error is the largest in multiples of its noise.

        The noise of a block is its error in the correct runs together: the noisy ones and, unless precision is lowered,
        the reference. It is multiplied by a factor for chance: how far a block of one correct run exceeds the others.
        The limit is `ROW` times that of other statistics.
        """
        exaggeration = self.slack.exaggeration
        floor = (0.5 * self.unit) ** 2 * self.sizes + (self.unit * self.scale * 2.0**-10) ** 2
        correct = [run.squares for run in self.noisy]
        if self.slack is not LOWERED:
            correct.append(self.reference.squares)
        total = np.sum(correct, axis=0)
        pooled = total / len(correct) + floor
        ratios = self.candidate.squares / np.maximum(pooled, 5e-324)
        worst = int(ratios.argmax())
        chance = 1.0 / exaggeration
        if len(correct) > 1:
            for run in correct:
                others = (total - run) / (len(correct) - 1) + floor
                of_run = math.sqrt(float((run / np.maximum(others, 5e-324)).max()))
                chance = max(chance, of_run if run is correct[-1] else of_run / exaggeration)
        noise = math.sqrt(float(pooled[worst])) * chance
        return _judge("row", math.sqrt(float(self.candidate.squares[worst])), noise, ROW * self.limit)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a floating-point or complex dtype: half of its eps."""
    return float(torch.finfo(dtype).eps) / 2.0


def _slack(sample: Sample) -> Slack:
    """Return the slack of a sample: ALONE without noisy runs, or else LOWERED, STEPS, NARROW or SINGLE.

    LOWERED is that of a transform that lowers precision, STEPS that of values after optimizer steps, and NARROW that of
    a reference dtype of fewer than four bytes; the first that applies is taken.
    """
    if not sample.noisy:
        return ALONE
    if sample.lowered_to is not None:
        return LOWERED
    if sample.is_stepped:
        return STEPS
    return NARROW if sample.reference.dtype.itemsize < 4 else SINGLE


def _coarsest_roundoff(sample: Sample) -> float:
    """Return the unit roundoff of the reference's dtype, or of `lowered_to` if that is coarser."""
    return max(unit_roundoff(dtype) for dtype in (sample.reference.dtype, sample.lowered_to) if dtype)


def _size_at(truth: torch.Tensor, flat: int) -> float:
    """Return |truth| at a flat index, or 0 if it is not finite there or the index is −1.

    The index of a complex truth is that of a component.
    """
    if flat < 0:
        return 0.0
    whole = torch.view_as_real(truth) if truth.is_complex() else truth
    size = abs(float(whole.detach()[tuple(int(i) for i in np.unravel_index(flat, whole.shape))]))
    return size if math.isfinite(size) else 0.0


def _judge(statistic: str, error: float, noise: float, limit: float) -> Judgement:
    """Return DIVERGED if `error` is NaN or more than `limit` times `noise`, and otherwise EQUIVALENT.

    INCONCLUSIVE in any case if `limit` times `noise` is not finite. `statistic` names the error in the reason and in
    the details.
    """
    judgement = Judgement.of_statistic(statistic, error, noise, limit, "the noise")
    if not math.isfinite(limit * noise):
        reason = f"{statistic} noise is beyond what float64 can hold"
        return judgement._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
    if not error:
        return judgement._replace(reason="no error against the truth")
    return judgement


def _judge_identical(sample: Sample) -> Judgement:
    """Return the judgement of two identical tensors: EQUIVALENT, with an error and a noise of zero.

    Its resolution is the eps of the reference's dtype, or of `lowered_to` if that is coarser.
    """
    roundoff = _coarsest_roundoff(sample)
    return Judgement(
        verdict=Verdict.EQUIVALENT,
        reason=IDENTICAL,
        error=0.0,
        noise=0.0,
        allowed=0.0,
        resolution=2.0 * roundoff,
        details={"roundoff": roundoff, "rms_of_truth": sample.measurement.rms_reference},
    )


def _judge_without_truth(pair: Measurement) -> Judgement:
    """Return EQUIVALENT for identical tensors, and INCONCLUSIVE for all others, because there is no truth.

    The error is the rms difference of the two, or infinity if NaN or Inf is out of place.
    """
    if not pair.mismatches:
        return Judgement(verdict=Verdict.EQUIVALENT, reason=IDENTICAL, error=0.0, allowed=0.0, resolution=0.0)
    return Judgement(
        verdict=Verdict.INCONCLUSIVE,
        reason=f"{pair.mismatches} of {pair.numel} elements differ, and there is no truth to hold that against",
        error=math.inf if pair.misplaced else pair.rms_error,
        allowed=0.0,
        resolution=0.0,
    )


def _judge_non_finite(judgement: Judgement, sample: Sample) -> Judgement:
    """Return the judgement of the finite values, corrected by misplaced NaNs and infinities.

    It becomes DIVERGED, with an infinite error, if NaN or Inf are misplaced between reference and candidate at an
    element where reference and truth agree. Unless it is DIVERGED already, it becomes INCONCLUSIVE if NaN or Inf of the
    candidate are misplaced against the reference and against the truth, or if the truth is NaN or Inf where the
    reference is finite. Otherwise it is returned unchanged.
    """
    pair = sample.measurement
    assert sample.truth is not None
    has_non_finite = pair.finite < pair.numel or not is_finite(sample.truth)
    if not has_non_finite and not pair.misplaced:
        return judgement
    of_reference, of_candidate = measure(sample.truth, sample.reference), measure(sample.truth, sample.candidate)
    places = describe_misplaced(pair)
    if _has_strayed(sample.reference, sample.candidate, sample.truth):
        return judgement._replace(verdict=Verdict.DIVERGED, reason=places, error=math.inf)
    if judgement.verdict is Verdict.DIVERGED:
        return judgement
    if pair.misplaced and of_candidate.misplaced:
        reason = f"{places}; the reference itself overflows or is undefined where the truth is not"
        return judgement._replace(verdict=Verdict.INCONCLUSIVE, reason=reason, error=math.inf)
    finite_in_reference = pair.numel - of_reference.nan_candidate - of_reference.inf_candidate
    unjudged = finite_in_reference - of_reference.finite
    if unjudged > 0:
        reason = (
            f"the truth is NaN or Inf at {unjudged} of {pair.numel} elements where the reference is not; "
            f"{judgement.reason}"
        )
        return judgement._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
    return judgement


def _has_strayed(reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor) -> bool:
    """Tell whether NaN or Inf is misplaced in the candidate at an element where reference and truth agree on them."""
    of_reference, of_candidate, of_truth = map(_non_finite_kinds, (reference, candidate, truth))
    return bool(((of_reference == of_truth) & (of_candidate != of_reference)).any())


def _non_finite_kinds(tensor: torch.Tensor) -> torch.Tensor:
    """Return 1 for +Inf, -1 for -Inf, 2 for NaN and 0 for a finite number, by element; of complex ones by component."""
    whole = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    whole = whole.float() if whole.itemsize == 1 else whole  # a float of one byte has no arithmetic of its own
    kinds = whole.isposinf().to(torch.int8) - whole.isneginf().to(torch.int8)
    return kinds.masked_fill_(whole.isnan(), 2)
