"""The noise of quantized values: whatever is rounded to levels is off by up to half a step, and that is no bug.

The step is the one that the values call for: their range over the number of levels. A coarser one counts only up to a
point, and a finer one that cuts off the largest values only if that is worth it, for otherwise a wrong scale would
excuse itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchdelta._torch.graphs.quantization import Levels
from torchdelta.compare.policy import Judgement, Sample, relative
from torchdelta.compare.spread import spread
from torchdelta.records.verdict import Verdict

RUNS = 3
"""Roundings of the same values to levels that lie elsewhere."""
LIMIT = 2.5
"""How many times the noise a correctly quantized layer may be off; of 1230 healthy ones the worst was off by 2.0."""
COARSER = 4.0
"""A scale may be so many times as coarse as the values call for: they may share it with larger ones."""
WORTH = 2.0
"""Cutting off is worth it while it takes no more than so many times what rounding would."""
COARSEST = 0.3
"""Noise beyond this share of the values lets much pass."""


def rounded(values: torch.Tensor, levels: Levels, run: int, generator: torch.Generator, *, apart: bool) -> torch.Tensor:
    """Return the values as another correct quantizer might have rounded them; `run` shifts its levels.

    With `apart` every element is off by its own share of a step: values that lie on the levels already tell nothing of
    how they came there. Otherwise equal values are off by the same, as they really are.
    """
    wide = values.detach().double()
    step = step_for(wide, levels)
    if apart:
        moved = wide + step * (torch.rand(wide.shape, generator=generator, dtype=torch.float64) - 0.5)
        return moved.to(values.dtype)
    # the runs divide the step between them, so that in one of them even a constant is off by a third of it
    shift = (float(torch.rand((), generator=generator)) + run / RUNS) % 1.0
    held = _cut(wide, levels, step)
    on_levels = (torch.round(held / step - shift) + shift) * step
    return torch.where(step > 0, on_levels, held).to(values.dtype)


def step_for(values: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Return the step between the levels of these values, as far as it can be justified by their range."""
    kept = levels.axes_in(values)
    others = [axis for axis in range(values.dim()) if axis not in kept]
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    highest = finite.amax(others, keepdim=True).clamp(min=0.0) if values.numel() else finite.new_zeros(())
    lowest = finite.amin(others, keepdim=True).clamp(max=0.0) if values.numel() else finite.new_zeros(())
    count = levels.high - levels.low
    if _is_centred(levels):
        called_for = 2.0 * torch.maximum(highest, -lowest) / count
    else:
        called_for = (highest - lowest) / count
    if levels.scale is None:
        return called_for
    given = levels.along(levels.scale, values)
    return torch.maximum(called_for, torch.minimum(given, COARSER * called_for))


def _is_centred(levels: Levels) -> bool:
    middle = (levels.low + levels.high + 1) // 2
    return levels.zero_point is not None and bool((levels.zero_point == middle).all())


def _cut(values: torch.Tensor, levels: Levels, step: torch.Tensor) -> torch.Tensor:
    """Return the values without what is beyond the last level, if that is worth a finer step."""
    if levels.scale is None or levels.zero_point is None:
        return values
    scale, zero = levels.along(levels.scale, values), levels.along(levels.zero_point, values)
    held = torch.minimum(torch.maximum(values, (levels.low - zero) * scale), (levels.high - zero) * scale)
    taken = float((held - values).square().mean())
    return held if taken <= WORTH**2 * float(step.square().mean()) / 12.0 else values


@dataclass(frozen=True)
class StepNoise:
    """Holds a quantized layer to what rounding its inputs to their levels makes of it; the truth is the float one."""

    needs_truth = True
    judges_integers = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Diverged when the layer is further off than its steps explain."""
        seen = sample.measurement
        if not seen.mismatches:
            return Judgement(verdict=Verdict.EQUIVALENT, reason="bitwise identical", error=0.0, noise=0.0, allowed=0.0)
        if seen.misplaced:
            reason = f"NaN or Inf out of place at {seen.misplaced} of {seen.numel} elements"
            return Judgement(verdict=Verdict.DIVERGED, reason=reason, error=math.inf, allowed=0.0)
        if not sample.noisy:
            reason = "how it is quantized is not known, so there is no step to hold the difference against"
            return Judgement(verdict=Verdict.INCONCLUSIVE, reason=reason, error=seen.rms_error)
        runs = [spread(sample.reference, run) for run in sample.noisy]
        candidate = spread(sample.reference, sample.candidate)
        # the ratio of two statistics of few elements is a matter of luck
        limit = LIMIT * (1.0 + 4.0 / math.sqrt(max(seen.numel, 1)))
        floor = float(torch.finfo(sample.reference.dtype).eps) * seen.rms_reference
        judged = max(
            _judged("rms", candidate.rms, max(floor, *(run.rms for run in runs)), limit),
            _judged("max", candidate.peak, max(floor, *(run.peak for run in runs)), limit),
            key=lambda each: (each.error or 0.0) / (each.allowed or math.inf),
        )
        allowed = limit * max(floor, *(run.rms for run in runs))
        resolution = relative(allowed, seen.rms_reference)
        judged = judged._replace(
            resolution=resolution,
            details={**(judged.details or {}), "question": "local", "sqnr": seen.sqnr_db},
        )
        if judged.verdict is Verdict.EQUIVALENT and (resolution or 0.0) > COARSEST:
            reason = f"{judged.reason}, but the steps are so coarse beside the values that much else would pass"
            return judged._replace(verdict=Verdict.INCONCLUSIVE, reason=reason)
        return judged


def _judged(statistic: str, error: float, noise: float, limit: float) -> Judgement:
    times = f"{error / noise:.3g} times" if noise else "infinitely many times"
    is_within = error <= limit * noise  # an error that is not a number is not
    reason = f"{statistic} error is {times} what quantizing makes"
    return Judgement(
        verdict=Verdict.EQUIVALENT if is_within else Verdict.DIVERGED,
        reason=reason if is_within else f"{reason}; up to {limit:.3g} times would be rounding",
        error=error,
        noise=noise,
        allowed=limit * noise,
        details={"statistic": statistic},
    )
