"""The policy of the semantic question: are two programs, run in float64, the same function?

The noise of a float64 run is that of a native noisy run, scaled down from its unit of rounding to float64's, because
noise is proportional to that unit. The limit is generous, because a real difference is larger by many orders of
magnitude. Start with `Semantic.judge`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from torchdelta.compare.magnitudes import Part, coarsest_resolution, parts_of
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.policy import IDENTICAL, Judgement, Policy, Sample, describe_misplaced, luck, relative
from torchdelta.compare.spread import MASK, Array, Spread, lost_masks, quartile_distances, spread, spreads
from torchdelta.records.verdict import Verdict

LIMIT = 100.0
"""Multiples of the noise of a float64 run that are still rounding."""
ROW = 10.0
"""The limit of one block is so many times that of the tensor, because a block of one noisy run may vary little."""
KEPT_IN_FLOAT32 = 2.0**-23
"""The relative error of a constant that one of two implementations has in float32."""


@dataclass(frozen=True)
class Semantic(Policy):
    """Judges `reference` and `candidate` in float64; `truth` and `noisy` are those of the native question."""

    floor: float = 0.0
    """A relative error up to which two values are the same, however small the rounding is."""
    needs_truth = True

    def judge(self, sample: Sample) -> Judgement:
        """Return DIVERGED if both sides, run in float64, differ by more than rounding there, and otherwise EQUIVALENT.

        Values of very different sizes are judged apart (`parts_of`), and the worst part decides. In a part it is the
        worst of rms, largest and quartile error and error of the worst block. The rounding is the noise of the noisy
        runs, scaled down to float64, but at least half a unit of rounding or what `floor` allows. A misplaced NaN or
        Inf and a lost mask constant are DIVERGED, with an infinite error.
        """
        pair = sample.measurement
        if not pair.mismatches:
            return Judgement(verdict=Verdict.EQUIVALENT, reason=f"{IDENTICAL} in float64", error=0.0, noise=0.0)
        if pair.misplaced:
            return _diverged(f"{describe_misplaced(pair)} in float64")
        parts = parts_of(sample, sample.reference)
        judgements = [self._judge_part(part) for part in parts]
        worst = max(judgements, key=lambda judgement: judgement.rank)
        return worst._replace(resolution=coarsest_resolution(parts, judgements))

    def _judge_part(self, part: Part) -> Judgement:
        """Return the judgement of values of about one size, by the worst of its statistics.

        Mask constants are DIVERGED if one is not what it was, and otherwise EQUIVALENT.
        """
        sample = part.sample
        if part.is_mask:
            lost = lost_masks(sample.reference, sample.reference, sample.candidate, self.floor)
            if lost:
                return _diverged(f"{lost} values beyond {MASK:g} are not what they were in float64")
            return Judgement(Verdict.EQUIVALENT, "mask constants are what they were in float64", 0.0, 0.0, 0.0)
        error, of_values = spreads(sample.reference, (sample.candidate, None), math.inf)
        (quartile_error,) = quartile_distances(sample.reference, (sample.candidate,))
        squares, peak, quartile = _noise(sample, error)
        unit = unit_roundoff(torch.float64)
        limit = LIMIT * luck(part.elements)
        own = (self.floor / limit) ** 2 + (0.5 * unit) ** 2
        blocks = squares + own * of_values.squares
        # a row that should be zero still has the rounding of the other rows
        blocks += (0.5 * unit * of_values.rms) ** 2
        with np.errstate(over="ignore"):  # an error beside zeros is infinitely large
            ratios = error.squares / np.maximum(blocks, 5e-324)
        worst = int(ratios.argmax())
        floor = math.sqrt(own)
        own_rms = floor * of_values.rms
        rms_noise = max(math.sqrt(float(squares.mean())), own_rms)
        judgements = [
            _judge("rms", error.rms, rms_noise, limit),
            _judge("max", error.peak, max(peak, floor * of_values.peak), limit),
            _judge("quartile", quartile_error, max(quartile, own_rms), ROW * limit),
            _judge("row", math.sqrt(float(error.squares[worst])), math.sqrt(float(blocks[worst])), ROW * limit),
        ]
        judgement = max(judgements, key=lambda judgement: judgement.rank)
        resolution = relative(limit * rms_noise, of_values.rms)
        return part.unscaled(judgement._replace(resolution=resolution))


def _noise(sample: Sample, error: Spread) -> tuple[Array, float, float]:
    """Return the noise as it would be in float64: mean squares by block, the largest element and the upper quartile.

    Each is the maximum over the noisy runs, whose distances from the truth are scaled by the ratio of float64's unit
    of rounding to that of their dtype; zeros without noisy runs. `error` only gives the number of blocks.
    """
    squares, peak, quartile = np.zeros_like(error.squares), 0.0, 0.0
    for run in sample.noisy:
        assert sample.truth is not None
        scale = unit_roundoff(torch.float64) / unit_roundoff(run.dtype)
        noise = spread(sample.truth, run, math.inf)
        squares = np.maximum(squares, scale**2 * noise.squares)
        peak = max(peak, scale * noise.peak)
        (quartile_noise,) = quartile_distances(sample.truth, (run,))
        quartile = max(quartile, scale * quartile_noise)
    return squares, peak, quartile


def _diverged(reason: str) -> Judgement:
    """Return a judgement that it is not the same function: DIVERGED, with an infinite error."""
    return Judgement(
        verdict=Verdict.DIVERGED, reason=f"not the same function: {reason}", error=math.inf, noise=0.0, allowed=0.0
    )


def _judge(statistic: str, error: float, noise: float, limit: float) -> Judgement:
    """Return DIVERGED, for another function, if `error` is NaN or more than `limit` times `noise`, else EQUIVALENT.

    `statistic` is the name of the error in the reason and in the details.
    """
    judgement = Judgement.of_statistic(
        f"in float64 the {statistic}", error, noise, limit, "the rounding", names_limit=False
    )
    is_diverged = judgement.verdict is Verdict.DIVERGED
    reason = f"not the same function: {judgement.reason}" if is_diverged else judgement.reason
    return judgement._replace(reason=reason, details={"statistic": statistic})
