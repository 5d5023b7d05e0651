"""The noise of quantized values: a value that is rounded to levels is off by up to half a step, and that is not a bug.

The step is the range of the values over the number of levels. A quantizer's own step counts if it is coarser by no
more than `COARSER`, and one that cuts off the largest values counts if the finer step is worth it. Otherwise a wrong
scale would excuse itself. Start with `StepNoise` for the policy, and with `rounded` for the noisy runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchdelta._torch.graphs.quantization import Levels
from torchdelta.compare.policy import IDENTICAL, Judgement, Policy, Sample, describe_misplaced, luck, relative
from torchdelta.compare.spread import MASK, lost_masks, sizes, spread
from torchdelta.records.verdict import Verdict

RUNS = 3
"""Roundings of the same values to levels that lie elsewhere."""
LIMIT = 2.5
"""How many times its noise a correctly quantized layer may be off. The worst of 1230 healthy layers was off by 2.0."""
COARSER = 4.0
"""How many times as coarse as the values need a scale may be: they may share it with larger values."""
WORTH = 2.0
"""Cutting off values is worth it while its error is no more than so many times that of rounding."""
COARSEST = 0.3
"""Noise beyond this share of the values would let bugs pass."""


def rounded(values: torch.Tensor, levels: Levels, run: int, generator: torch.Generator, *, apart: bool) -> torch.Tensor:
    """Return the values, in their own dtype, as another correct quantizer with these levels might have rounded them.

    Without `apart` values are rounded to levels that are shifted by a random share of the step plus `run` / `RUNS` of
    it, and clipped if that is worth it. With `apart` every element is moved by a random share of its own of up to half
    a step, for values that lie on the levels already. Random numbers are drawn from `generator`.
    """
    wide = values.detach().double()
    step = step_for(wide, levels)
    if apart:
        moved = wide + step * (torch.rand(wide.shape, generator=generator, dtype=torch.float64) - 0.5)
        return moved.to(values.dtype)
    # the runs divide the step between them, so that in one of them even a constant is off by a third of it
    shift = (float(torch.rand((), generator=generator)) + run / RUNS) % 1.0
    clipped = _clip(wide, levels, step)
    on_levels = (torch.round(clipped / step - shift) + shift) * step
    return torch.where(step > 0, on_levels, clipped).to(values.dtype)


def step_for(values: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Return the step between levels for these values, in a shape that broadcasts over them.

    It is the quantizer's own scale, but no finer than the range of the values needs, and no more than `COARSER` times
    as coarse. If the scale is not known, it is the step that the range needs. The range includes zero, and is symmetric
    around it if the zero point is the middle of the levels. Values that are not finite count as zero.
    """
    kept = levels.axes_in(values)
    others = [axis for axis in range(values.dim()) if axis not in kept]
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    highest = finite.amax(others, keepdim=True).clamp(min=0.0) if values.numel() else finite.new_zeros(())
    lowest = finite.amin(others, keepdim=True).clamp(max=0.0) if values.numel() else finite.new_zeros(())
    count = levels.high - levels.low
    if _is_centred(levels):
        needed = 2.0 * torch.maximum(highest, -lowest) / count
    else:
        needed = (highest - lowest) / count
    if levels.scale is None:
        return needed
    own = levels.along(levels.scale, values)
    return torch.maximum(needed, torch.minimum(own, COARSER * needed))


def _is_centred(levels: Levels) -> bool:
    """Tell whether the zero point is known, and is the middle of the levels everywhere."""
    middle = (levels.low + levels.high + 1) // 2
    return levels.zero_point is not None and bool((levels.zero_point == middle).all())


def _clip(values: torch.Tensor, levels: Levels, step: torch.Tensor) -> torch.Tensor:
    """Return the values clipped to the first and last level if that is worth the finer step, or else unchanged.

    It is worth it if the clipping error is at most `WORTH` times the rounding error of `step`. Without a known scale or
    zero point nothing is clipped.
    """
    if levels.scale is None or levels.zero_point is None:
        return values
    scale, zero = levels.along(levels.scale, values), levels.along(levels.zero_point, values)
    clipped = torch.minimum(torch.maximum(values, (levels.low - zero) * scale), (levels.high - zero) * scale)
    error = float((clipped - values).square().mean())
    return clipped if error <= WORTH**2 * float(step.square().mean()) / 12.0 else values


@dataclass(frozen=True)
class StepNoise(Policy):
    """Judges a quantized layer by the error that rounding its inputs to levels makes; the truth is the float layer."""

    needs_truth = True

    def judge(self, sample: Sample) -> Judgement:
        """Return DIVERGED if a quantized layer is further from the float layer than its steps explain, else EQUIVALENT.

        The reference is the float layer, and the noise is the largest error of the noisy runs; the worse of rms and
        largest error decides. A misplaced NaN or Inf and a lost mask constant are DIVERGED; other elements are not held
        to the size of mask constants. INCONCLUSIVE if values differ and there are no noisy runs, or in place of
        EQUIVALENT if the noise is large beside the values.
        """
        pair = sample.measurement
        if not pair.mismatches:
            return Judgement(verdict=Verdict.EQUIVALENT, reason=IDENTICAL, error=0.0, noise=0.0, allowed=0.0)
        if pair.misplaced:
            return Judgement(verdict=Verdict.DIVERGED, reason=describe_misplaced(pair), error=math.inf, allowed=0.0)
        if not sample.noisy:
            reason = "how it is quantized is not known, so there is no step to hold the difference against"
            return Judgement(verdict=Verdict.INCONCLUSIVE, reason=reason, error=pair.rms_error)
        if lost := lost_masks(sample.reference, sample.reference, sample.candidate):
            reason = f"{lost} values beyond {MASK:g}, which are taken for mask constants, are not what they were"
            return Judgement(verdict=Verdict.DIVERGED, reason=reason, error=math.inf, allowed=0.0)
        runs = [spread(sample.reference, run) for run in sample.noisy]
        candidate = spread(sample.reference, sample.candidate)
        limit = LIMIT * luck(pair.numel)
        scale = sizes(sample.reference).rms
        floor = float(torch.finfo(sample.reference.dtype).eps) * scale
        unit = "what quantizing makes"
        rms_noise, max_noise = max(floor, *(run.rms for run in runs)), max(floor, *(run.peak for run in runs))
        judgement = max(
            Judgement.of_statistic("rms", candidate.rms, rms_noise, limit, unit),
            Judgement.of_statistic("max", candidate.peak, max_noise, limit, unit),
            key=lambda judgement: judgement.rank,
        )
        resolution = relative(limit * rms_noise, scale)
        judgement = judgement._replace(
            resolution=resolution,
            details={**(judgement.details or {}), "question": "local", "sqnr": pair.sqnr_db},
        )
        if judgement.verdict is Verdict.EQUIVALENT and (resolution or 0.0) > COARSEST:
            reason = f"{judgement.reason}, but the steps are so coarse beside the values that much else would pass"
            return judgement._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
        return judgement
