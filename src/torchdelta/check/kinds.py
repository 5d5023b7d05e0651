"""What kind of divergence is it: another function, or the same one less accurately computed?

Float64 tells: two programs that agree there, where almost nothing is rounded, are the same function. Start with
`tell_kinds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torchdelta.compare.judge import is_inexact
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.protocol import COARSE, NARROW
from torchdelta.program.stages import Observation
from torchdelta.records.comparison import ANOTHER_FUNCTION, CONTRACT, LESS_ACCURATE, UNKNOWN, Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

ROUNDED = 2.0**-6
"""The relative error of a few roundings to bfloat16."""
SHRUNK = 2.0**10
"""Rounding errors of two dtypes have the ratio of their units, within this factor."""


@dataclass(frozen=True, kw_only=True)
class LiftedSides:
    """Both sides of one stage in float64, as far as they ran."""

    answers: Mapping[str, Comparison]
    """What float64 says about each leaf, by path."""
    reference: Observation
    candidate: Observation
    graphs_agree: bool | None = None
    """Whether each graph by itself is the same function; None if the graphs were not asked one by one."""


def tell_kinds(stage: Stage, lifted: LiftedSides, accepted: float) -> Stage:
    """Return the stage; each leaf that diverged has its kind, and one that is less accurate says so in its reason.

    A leaf that is the same function becomes equivalent if it is off by at most `accepted` times the noise, and
    inconclusive if it diverges narrowly: correct compilers do so now and then in bfloat16. If no leaf diverged, the
    stage is returned unchanged.
    """
    if not any(comparison.verdict is Verdict.DIVERGED for comparison in stage.comparisons):
        return stage
    comparisons = tuple(_tell_kind(comparison, stage.name, lifted, accepted) for comparison in stage.comparisons)
    return Stage.of(stage.name, comparisons, stage.reason)


def _tell_kind(comparison: Comparison, stage: str, lifted: LiftedSides, accepted: float) -> Comparison:
    """Return the comparison with its kind if it diverged, or else unchanged.

    One that is less accurate gets a new reason, which says how many times the noise it is off: with the old reason in
    brackets, or, if that is at most `accepted` times, without it and as equivalent. It is inconclusive if its error is
    at most `NARROW` times the allowed one. If its error is not known, or its noise is not known or zero, it gets its
    kind alone.
    """
    if comparison.verdict is not Verdict.DIVERGED:
        return comparison
    kind = _kind_of(comparison, stage, lifted)
    if kind != LESS_ACCURATE or not comparison.noise or comparison.error is None:
        return replace(comparison, kind=kind)
    times = comparison.error / comparison.noise
    agreement = _agreement(comparison, lifted)
    reason = f"the same function (float64 agrees{agreement}), less accurate: {times:.3g} times the noise"
    if times <= accepted:
        reason = f"{reason}, which the policy accepts"
        return replace(comparison, verdict=Verdict.EQUIVALENT, kind=kind, reason=reason)
    if comparison.ratio <= NARROW:
        reason = f"{reason}, too near to what would be rounding to tell ({comparison.reason})"
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, kind=kind, reason=reason)
    return replace(comparison, kind=kind, reason=f"{reason} ({comparison.reason})")


def _kind_of(comparison: Comparison, stage: str, lifted: LiftedSides) -> str:
    """Return the kind of a leaf that diverged, by its contract, by its answer in float64, or by that of the graphs.

    With a breach that is not excused, or without a measurement, it is CONTRACT if it has any breach, and else UNKNOWN.
    Otherwise `_kind_by` reads its answer. Without an answer, a leaf that diverged in the semantic question is
    ANOTHER_FUNCTION. If the graphs were asked, it is LESS_ACCURATE if they agree and `_may_be_rounding`, and else
    UNKNOWN. If they were not, it is ANOTHER_FUNCTION if both sides have integers that differ in float64 as well, and
    else UNKNOWN.
    """
    if any(not breach.excused for breach in comparison.contract) or comparison.measurement is None:
        return CONTRACT if comparison.contract else UNKNOWN
    answer = lifted.answers.get(comparison.path)
    if answer is not None:
        return _kind_by(answer, comparison)
    if comparison.details.get("question") == "semantic":
        return ANOTHER_FUNCTION
    if lifted.graphs_agree is not None:
        return LESS_ACCURATE if lifted.graphs_agree and _may_be_rounding(comparison) else UNKNOWN
    sides = [run.stages.get(stage, {}).get(comparison.path) for run in (lifted.reference, lifted.candidate)]
    first, second = (side if isinstance(side, torch.Tensor) else None for side in sides)
    if first is None or second is None or is_inexact(first.dtype) or is_inexact(second.dtype):
        return UNKNOWN
    return UNKNOWN if torch.equal(first, second) else ANOTHER_FUNCTION


def _kind_by(answer: Comparison, native: Comparison) -> str:
    """Return the kind of a divergence by what float64 says about the leaf: less accurate, another function or unknown.

    An unstable formula is less accurate in float64 too, but only by as many units of rounding as it is natively; a
    difference that does not shrink with the unit is another function. It is unknown if the answer is inconclusive or
    coarse, and if the native error is too large for rounding although float64 agrees that far.
    """
    if answer.verdict is Verdict.EQUIVALENT:
        return LESS_ACCURATE if (answer.resolution or 0.0) <= COARSE and _may_be_rounding(native) else UNKNOWN
    if answer.verdict is not Verdict.DIVERGED or answer.error is None:
        return UNKNOWN
    scale, unit = (float(native.details.get(name, 0.0)) for name in ("rms_of_truth", "roundoff"))
    native_error = float(native.details.get("native_error", native.error or 0.0))
    shrinking = unit_roundoff(torch.float64) / unit if unit else 1.0
    is_rounding = answer.error <= SHRUNK * shrinking * max(native_error, unit * scale)
    if not is_rounding or shrinking >= 1.0:
        return ANOTHER_FUNCTION
    return LESS_ACCURATE if _may_be_rounding(native) else UNKNOWN


def _may_be_rounding(native: Comparison) -> bool:
    """Tell whether rounding could make a native error so large; otherwise a kernel is wrong, in one dtype alone.

    A formula may lose half of the digits of its dtype, or round to bfloat16: the error is at most the root of the unit
    of rounding, or `ROUNDED` if that is more, times the values.
    """
    scale, unit = (float(native.details.get(name, 0.0)) for name in ("rms_of_truth", "roundoff"))
    error = float(native.details.get("native_error", native.error or 0.0))
    return error <= max(math.sqrt(unit), ROUNDED) * scale


def _agreement(comparison: Comparison, lifted: LiftedSides) -> str:
    """Return the words for how far apart both sides are in float64, relative to the values; empty if not known."""
    answer = lifted.answers.get(comparison.path)
    scale = float(comparison.details.get("rms_of_truth", 0.0))
    if answer is None or answer.error is None or not scale:
        return ""
    return f" to {answer.error / scale:.0e}" if answer.error else " to the bit"
