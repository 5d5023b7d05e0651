"""Is the reference the same each time it runs? Where it is not, nothing can be said about a candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Bitwise
from torchdelta.program.stages import Observation
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

COARSE = 0.3
"""Noise that is this share of the values themselves is no rounding: it would let anything pass."""
NEAR_ZERO = 64.0
"""Noise within so many units of rounding of the largest values of a stage is that of a tensor that should be zero."""
OWN_SHARE = 0.125
"""Two runs of the reference that differ by more than this share of the candidate's error may explain it."""
SUSPECT = 100.0
"""Noise this many times the rounding of a single operation may be another draw, and not rounding."""


def rests_on_steadiness(seen: Comparison) -> bool:
    """Tell whether a verdict rests on the reference being the same each time it runs.

    A divergence does. So does noise far above rounding: a reference that draws other numbers each time is far from
    the truth too, and would let any candidate pass.
    """
    floor = float(seen.details.get("floor", 0.0))
    is_suspect = seen.noise is not None and seen.noise > SUSPECT * floor
    return seen.verdict is Verdict.DIVERGED or (is_suspect and _differs(seen))


def doubt_coarse(stage: Stage) -> Stage:
    """Return the stage with what passed only because its noise is as large as its values inconclusive.

    A gradient that is zero in exact arithmetic is all noise too, but tiny beside the others: that one may pass.
    """
    scales = [float(seen.details["rms_of_truth"]) for seen in stage.comparisons if "rms_of_truth" in seen.details]
    largest = max((scale for scale in scales if math.isfinite(scale)), default=0.0)

    def doubted(seen: Comparison) -> Comparison:
        if seen.verdict is not Verdict.EQUIVALENT or not _differs(seen) or seen.noise is None:
            return seen
        if "semantic_error" in seen.details:
            return seen  # float64 told it apart
        is_near_zero = seen.noise <= NEAR_ZERO * float(seen.details["roundoff"]) * largest
        if not is_coarse(seen) or is_near_zero:
            return seen
        reason = f"{seen.reason}, but the noise is nearly as large as the values are, and would let much pass"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)

    return _changed(stage, doubted)


def vouched_for(stages: Sequence[Stage]) -> list[str]:
    """Return a note on what is too noisy natively to be told apart from anything, and passed in float64 alone."""
    coarse = [
        f"{stage.name} {seen.path}"
        for stage in stages
        for seen in stage.comparisons
        if seen.verdict is Verdict.EQUIVALENT and "semantic_error" in seen.details and is_coarse(seen)
    ]
    if not coarse:
        return []
    named = ", ".join(coarse[:3]) + (f" and {len(coarse) - 3} more" if len(coarse) > 3 else "")
    return [f"float64 alone vouches for {named}: natively the noise is nearly as large as the values"]


def is_coarse(seen: Comparison) -> bool:
    """Tell whether noise nearly as large as the values would let anything pass."""
    return _differs(seen) and (seen.resolution or 0.0) > COARSE


def _differs(seen: Comparison) -> bool:
    return seen.measurement is not None and seen.measurement.mismatches > 0


def differing_runs(first: Observation, second: Observation) -> dict[tuple[str, str], Comparison]:
    """Return the leaves, by stage and path, in which two runs of the same side differ."""
    judge = Judge(policy=Bitwise())
    return {
        (stage, seen.path): seen
        for stage, leaves in first.stages.items()
        for seen in judge.compare(leaves, second.stages.get(stage, {}))[0]
        if seen.verdict is Verdict.DIVERGED
    }


def excuse(stage: Stage, unsteady: dict[tuple[str, str], Comparison]) -> Stage:
    """Return the stage with every unsteady leaf inconclusive; a broken contract stays broken."""

    def excused(seen: Comparison) -> Comparison:
        other = unsteady.get((stage.name, seen.path))
        if other is None or any(not breach.excused for breach in seen.contract) or _is_negligible(seen, other):
            return seen
        reason = f"the reference itself differs between two eager runs ({other.reason}); {seen.reason}"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)

    return _changed(stage, excused)


def _is_negligible(seen: Comparison, between_runs: Comparison) -> bool:
    """Tell whether two runs of the reference differ by rounding only, and by less than the candidate is off.

    Sums that threads take in any order differ so. Other random numbers make a difference of the values' own size.
    """
    difference = between_runs.measurement
    if seen.noise is None or seen.error is None or difference is None or difference.misplaced:
        return False
    if seen.verdict is Verdict.DIVERGED:
        return difference.max_abs < OWN_SHARE * seen.error
    roundoff, scale = float(seen.details["roundoff"]), float(seen.details["rms_of_truth"])
    return difference.rms_error <= math.sqrt(roundoff) * scale


def _changed(stage: Stage, change: Callable[[Comparison], Comparison]) -> Stage:
    if not stage.comparisons:
        return stage
    return Stage.of(stage.name, tuple(change(seen) for seen in stage.comparisons), stage.reason)
