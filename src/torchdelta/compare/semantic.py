"""Are the two the same function? Both lifted to float64, where what differs is not rounding.

The noise of a float64 run is that of a native noisy run, scaled down from its unit of rounding to float64's: noise is
proportional to it. The limit is generous, because a real difference is larger by many orders of magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.policy import Judgement, Sample, relative
from torchdelta.compare.spread import MASK, Array, Spread, are_masks, lost_masks, sizes, spread
from torchdelta.records.verdict import Verdict

LIMIT = 100.0
"""Multiples of the noise of a float64 run that are still rounding."""
ROW = 10.0
"""A block of a single noisy run may have less noise than it should: by so much more may one block be off."""
KEPT_IN_FLOAT32 = 2.0**-23
"""The relative error of a constant that one of two implementations wrote down in float32."""


@dataclass(frozen=True)
class Semantic:
    """Judges lifted values: `reference` and `candidate` in float64, `truth` and `noisy` as the native question has."""

    floor: float = 0.0
    """A relative error that is none, however small the rounding is."""
    needs_truth = True
    judges_integers = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when the candidate differs by more than rounding in float64."""
        seen = sample.measurement
        if not seen.mismatches:
            return Judgement(verdict=Verdict.EQUIVALENT, reason="bitwise identical in float64", error=0.0, noise=0.0)
        if seen.misplaced:
            return _broken(f"NaN or Inf out of place at {seen.misplaced} of {seen.numel} elements in float64")
        mask = MASK if are_masks(sample.reference) else math.inf
        error = spread(sample.reference, sample.candidate, mask)
        if error.masked and (lost := lost_masks(sample.reference, sample.reference, sample.candidate)):
            return _broken(f"{lost} values beyond {MASK:g} are not what they were in float64")
        of_values = sizes(sample.reference, mask)
        squares, peak = _noise(sample, mask, error)
        unit = unit_roundoff(torch.float64)
        limit = LIMIT * (1.0 + 4.0 / math.sqrt(max(seen.numel, 1)))
        own = (self.floor / limit) ** 2 + (0.5 * unit) ** 2
        blocks = squares + own * of_values.squares
        # among rows of one size an empty one is zero but for the rounding of the others
        blocks += (0.5 * unit * of_values.rms) ** 2
        ratios = error.squares / np.maximum(blocks, 5e-324)
        worst = int(ratios.argmax())
        floor = math.sqrt(own)
        judged = [
            _judge("rms", error.rms, max(math.sqrt(float(squares.mean())), floor * of_values.rms), limit),
            _judge("max", error.peak, max(peak, floor * of_values.peak), limit),
            _judge("row", math.sqrt(float(error.squares[worst])), math.sqrt(float(blocks[worst])), ROW * limit),
        ]
        found = max(judged, key=lambda each: (each.verdict.severity, (each.error or 0.0) / (each.allowed or math.inf)))
        return found._replace(resolution=relative(found.allowed or 0.0, of_values.rms))


def _noise(sample: Sample, mask: float, error: Spread) -> tuple[Array, float]:
    """Return the noise by block and the largest, scaled from the unit of the noisy runs to that of float64."""
    squares, peak = np.zeros_like(error.squares), 0.0
    for run in sample.noisy:
        assert sample.truth is not None
        scale = unit_roundoff(torch.float64) / unit_roundoff(run.dtype)
        noise = spread(sample.truth, run, mask)
        squares = np.maximum(squares, scale**2 * noise.squares)
        peak = max(peak, scale * noise.peak)
    return squares, peak


def _broken(reason: str) -> Judgement:
    return Judgement(
        verdict=Verdict.DIVERGED, reason=f"not the same function: {reason}", error=math.inf, noise=0.0, allowed=0.0
    )


def _judge(statistic: str, error: float, noise: float, limit: float) -> Judgement:
    allowed = limit * noise
    is_more = not error <= allowed
    times = f"{error / noise:.3g}" if noise else "infinitely many"
    reason = f"in float64 the {statistic} error is {times} times the rounding"
    return Judgement(
        verdict=Verdict.DIVERGED if is_more else Verdict.EQUIVALENT,
        reason=f"not the same function: {reason}" if is_more else reason,
        error=error,
        noise=noise,
        allowed=allowed,
        details={"statistic": statistic},
    )
