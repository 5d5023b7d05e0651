"""Is the reference the same each time it runs? Where it is not, nothing can be said about a candidate."""

from __future__ import annotations

from dataclasses import replace

from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Bitwise
from torchdelta.execute.stages import Observation
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

COARSE = 0.3
"""A resolution above this share of the values themselves says that the noise is as large as they are."""


def rests_on_steadiness(seen: Comparison) -> bool:
    """Tell whether a verdict rests on the reference being the same each time it runs.

    A divergence does. So does noise as large as the values: a reference that draws other numbers each time is far
    from the truth too, and would let any candidate pass.
    """
    return seen.verdict is Verdict.DIVERGED or (seen.resolution or 0.0) > COARSE


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
    """Return the stage with every difference of an unsteady leaf inconclusive; a broken contract stays broken."""
    if not stage.comparisons:
        return stage
    comparisons = (_excuse(seen, unsteady.get((stage.name, seen.path))) for seen in stage.comparisons)
    return Stage.of(stage.name, tuple(comparisons), stage.reason)


def _excuse(seen: Comparison, unsteady: Comparison | None) -> Comparison:
    broken = any(not breach.excused for breach in seen.contract)
    if unsteady is None or broken or not (seen.measurement and seen.measurement.mismatches):
        return seen
    reason = f"the reference itself differs between two eager runs ({unsteady.reason}); {seen.reason}"
    return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
