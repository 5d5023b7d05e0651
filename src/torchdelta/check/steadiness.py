"""May a verdict rest on its noise? Not if the reference differs from run to run, or if noise is as large as values.

A leaf in which two runs of the reference differ is inconclusive, and so is one that passed only because its noise
would let much pass. Unregistered state in which they differ, such as a timestamp, is not compared at all. Start with
`rests_on_steadiness` and `doubt_coarse`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from torchdelta.check.pairing import complete, is_state, state_name
from torchdelta.compare.judge import Judge
from torchdelta.compare.magnitudes import ZERO
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.policy import Bitwise
from torchdelta.compare.protocol import COARSE, is_coarse_answer
from torchdelta.program.stages import Observation
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

NEAR_ZERO = 64.0
"""Values within so many times the rounding of float64 are zero in exact arithmetic."""
OWN_SHARE = 0.125
"""A difference of two reference runs beyond this share of the candidate's error may explain the error."""
_STEPPED = re.compile(r"steps\[\d+\]\.(gradients|optimizer)(?P<name>\['[^']*'\])")
_FIRST_GRADIENT = re.compile(r"parameters(?P<name>\['[^']*'\])\.grad|steps\[0\]\.gradients(?P<of_step>\['[^']*'\])")
FEW = 8
"""So few elements may all be exact by chance."""
SUSPECT = 100.0
"""Noise of this many times the rounding of a single operation may come from other random numbers."""


def rests_on_steadiness(comparison: Comparison) -> bool:
    """Tell whether a verdict is right only if the reference is the same each time it runs.

    That holds for a divergence, and for any doubt about unregistered state, which may be an `id` or a time. It also
    holds if the values differ and their noise is more than `SUSPECT` times the rounding of a single operation: it may
    come from other random numbers.
    """
    if comparison.verdict is Verdict.INCONCLUSIVE and is_state(comparison.path):
        return True
    floor = float(comparison.details.get("floor", 0.0))
    is_suspect = comparison.noise is not None and comparison.noise > SUSPECT * floor
    return comparison.verdict is Verdict.DIVERGED or (is_suspect and _differs(comparison))


def fine_gradients(stages: Sequence[Stage]) -> frozenset[str]:
    """Return the names, in brackets, of parameters whose first gradient is not coarse, or at least not in float64."""
    return frozenset(
        match["name"] or match["of_step"]
        for stage in stages
        for each in stage.comparisons
        if (match := _FIRST_GRADIENT.fullmatch(each.path)) and (not is_coarse(each) or _is_fine_in_float64(each))
    )


def doubt_coarse(stage: Stage, fine: Collection[str] = (), *, has_gradients: bool = False) -> Stage:
    """Return the stage with the leaves inconclusive that passed only because their noise is as large as their values.

    Only equivalent leaves whose values differ are looked at, natively or in float64. Equivalent stay: a leaf that is
    coarse natively and not in float64; a leaf that is zero in exact arithmetic (`_is_zero`); and, with a detail, a
    gradient or an optimizer's state after a step of a parameter in `fine`, which is judged by its first gradient. In
    the stage `forward`, leaves that are rounding errors themselves are inconclusive too, unless `has_gradients`: then
    gradients are among the outputs.
    """
    is_exact_by_purpose = stage.name == "forward" and not has_gradients
    scales = [float(each.details["rms_of_truth"]) for each in stage.comparisons if "rms_of_truth" in each.details]
    largest = max((scale for scale in scales if math.isfinite(scale)), default=0.0)

    def doubt(comparison: Comparison) -> Comparison:
        """Return a comparison: inconclusive, with a detail, or unchanged, as `doubt_coarse` says of its leaf."""
        if is_exact_by_purpose and comparison.verdict is Verdict.EQUIVALENT and _is_rounding_alone(comparison):
            reason = f"{comparison.reason}, but the values of the reference are rounding errors themselves"
            return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)
        # noise that small beside the stage's values is that of a leaf which is zero in float64
        is_visible = float(comparison.details.get("semantic_noise", 0.0)) > ZERO * largest
        is_coarse_in_float64 = is_visible and bool(comparison.details.get("semantic_coarse"))
        is_judged = comparison.verdict is Verdict.EQUIVALENT and comparison.noise is not None
        if not is_judged or not (is_coarse(comparison) or is_coarse_in_float64):
            return comparison
        if _is_fine_in_float64(comparison) or _is_zero(comparison, largest):
            return comparison
        if (match := _STEPPED.match(comparison.path)) and match["name"] in fine:
            return replace(comparison, details={**comparison.details, "judged_by_gradient": True})
        where = "in float64 " if is_coarse_in_float64 else ""
        reason = f"{comparison.reason}, but {where}the noise is nearly as large as the values, and would let much pass"
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)

    return _map_comparisons(stage, doubt)


def _is_rounding_alone(comparison: Comparison) -> bool:
    """Tell whether a leaf differs, and its truth is small beside the reference's error, as a compensated sum's rest is.

    Then any candidate of that size passes. Many correct gradients are such; an output or a state is so on purpose.
    """
    error, rms_of_truth = (float(comparison.details.get(name, 0.0)) for name in ("reference_error", "rms_of_truth"))
    return _differs(comparison) and rms_of_truth < COARSE * error


def _is_zero(comparison: Comparison, largest: float) -> bool:
    """Tell whether a leaf is zero in exact arithmetic, such as the gradient of an attention key's bias.

    Then its truth is as small as the noise that float64 itself has, or at most `ZERO` times the `largest` values of the
    stage. A program in float64 has no finer truth: there its noise must be at most `NEAR_ZERO` roundings of `largest`.
    """
    roundoff = float(comparison.details.get("roundoff", 0.0))
    rms_of_truth = float(comparison.details.get("rms_of_truth", math.inf))
    noise, of_float64 = comparison.noise or 0.0, unit_roundoff(torch.float64)
    if roundoff <= of_float64:
        return noise <= NEAR_ZERO * roundoff * largest
    return rms_of_truth <= max(NEAR_ZERO * noise * of_float64 / roundoff, ZERO * largest)


def _is_fine_in_float64(comparison: Comparison) -> bool:
    """Tell whether both sides were compared in float64, and finely enough that the answer means something."""
    details = comparison.details
    return "semantic_error" in details and float(details.get("semantic_resolution", 0.0)) <= COARSE


def vouched_for(stages: Sequence[Stage]) -> list[str]:
    """Return a list of one note on the leaves that are too noisy to be judged natively, and passed in float64 alone.

    The note names up to three of them and counts the others. The list is empty if there are no such leaves.
    """
    coarse = [
        f"{stage.name} {comparison.path}"
        for stage in stages
        for comparison in stage.comparisons
        if comparison.verdict is Verdict.EQUIVALENT and _is_fine_in_float64(comparison) and is_coarse(comparison)
    ]
    if not coarse:
        return []
    names = ", ".join(coarse[:3]) + (f" and {len(coarse) - 3} more" if len(coarse) > 3 else "")
    return [f"float64 alone vouches for {names}: natively the noise is nearly as large as the values"]


def judged_by_gradients(stages: Sequence[Stage]) -> list[str]:
    """Return a list of one note on the leaves after a step for which only first gradients vouch; empty without any."""
    leaves = [each for stage in stages for each in stage.comparisons if each.details.get("judged_by_gradient")]
    if not leaves:
        return []
    return [
        f"after a step the noise of {len(leaves)} leaves is nearly as large as their values, as in {leaves[0].path}: "
        "the gradients before the first step were judged in their place"
    ]


def doubt_few(stage: Stage, answers: Mapping[str, Comparison], *, unit: float, reach: float) -> Stage:
    """Return the stage with the diverged leaves inconclusive whose few elements only the candidate rounds.

    Another order of the same sum rounds where the reference, by chance, does not, and no noisy run shows that. Such a
    leaf has at most `FEW` elements and no breach that is not excused. Its noise is at most half of `unit`, the relative
    rounding of the program, times the rms of its truth; its error is at most `reach`; and its answer in float64, from
    `answers`, is equivalent and not coarse. All other leaves are unchanged.
    """

    def doubt(comparison: Comparison) -> Comparison:
        """Return a comparison, inconclusive if only the candidate rounds its few elements, or else unchanged."""
        answer, measurement = answers.get(comparison.path), comparison.measurement
        if comparison.verdict is not Verdict.DIVERGED or answer is None or measurement is None:
            return comparison
        is_exact = (comparison.noise or 0.0) <= 0.5 * unit * float(comparison.details.get("rms_of_truth", 0.0))
        is_same = answer.verdict is Verdict.EQUIVALENT and not is_coarse_answer(answer, stage.name)
        is_held = not any(not breach.excused for breach in comparison.contract)
        is_near = comparison.error is not None and comparison.error <= reach
        if not (is_exact and is_same and is_held and is_near and measurement.numel <= FEW):
            return comparison
        why = "but float64 agrees, and the reference rounds none of these few elements, so its noise is not known"
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=f"{comparison.reason}; {why}")

    return _map_comparisons(stage, doubt)


def is_coarse(comparison: Comparison) -> bool:
    """Tell whether the values of a leaf differ, and its noise would let an error of `COARSE` times the values pass."""
    return _differs(comparison) and (comparison.resolution or 0.0) > COARSE


def _differs(comparison: Comparison) -> bool:
    """Tell whether the values of a leaf were measured, and differ."""
    return comparison.measurement is not None and comparison.measurement.mismatches > 0


def differing_runs(first: Observation, second: Observation) -> dict[tuple[str, str], Comparison]:
    """Return the comparisons of the leaves in which two runs of the same side differ, by (stage, path).

    Leaves differ if a bitwise judge says that they diverged, or if only one run has the leaf. Stages that only `second`
    has are not looked at. State that only one run changed is added to the other, in place.
    """
    judge = Judge(policy=Bitwise(), measures_identical=False)
    for stage in first.stages:
        complete(stage, (first, second))
    return {
        (stage, comparison.path): comparison
        for stage, leaves in first.stages.items()
        for comparison in judge.compare(leaves, second.stages.get(stage, {}))[0]
        if comparison.verdict is Verdict.DIVERGED
    }


def drop_unsteady(
    stage: Stage, unsteady: dict[tuple[str, str], Comparison], reference: Observation
) -> tuple[Stage, list[str]]:
    """Return the stage without unregistered state in which two runs of the reference differ, and the paths left out.

    `unsteady` has the comparisons of these runs that differ, by stage and path. If one of the runs lacks a leaf, such
    as an entry by a timestamp, leaves of the same name that the reference lacks are left out as well. If no leaf
    remains, the stage is inconclusive; if none is left out, it is returned itself.
    """
    known = reference.stages.get(stage.name, {})
    paths = {path for name, path in unsteady if name == stage.name and is_state(path)}
    names = {state_name(path) for path in paths if unsteady[stage.name, path].leaf == "structure"}

    def is_dropped(path: str) -> bool:
        return path in paths or (is_state(path) and path not in known and state_name(path) in names)

    dropped = [comparison.path for comparison in stage.comparisons if is_dropped(comparison.path)]
    if not dropped:
        return stage, []
    comparisons = tuple(comparison for comparison in stage.comparisons if comparison.path not in dropped)
    doubt = "" if comparisons else "nothing was compared: everything that was changed is unsteady"
    return Stage.of(stage.name, comparisons, stage.reason or doubt), dropped


def excuse(stage: Stage, unsteady: dict[tuple[str, str], Comparison]) -> Stage:
    """Return the stage; leaves in which two runs of the reference differ become inconclusive, whatever their verdict.

    `unsteady` has the comparisons of these runs that differ, by stage and path. A leaf keeps its verdict if it breaks a
    clause of the contract that is not excused and that these runs keep, or if the difference of the runs is negligible.
    """

    def excuse_leaf(comparison: Comparison) -> Comparison:
        """Return a comparison, inconclusive if two runs of the reference differ in its leaf, or else unchanged."""
        between_runs = unsteady.get((stage.name, comparison.path))
        if between_runs is None:
            return comparison
        broken = {breach.clause for breach in between_runs.contract}
        if any(not breach.excused and breach.clause not in broken for breach in comparison.contract):
            return comparison
        if _is_negligible(comparison, between_runs):
            return comparison
        reason = f"the reference itself differs between two eager runs ({between_runs.reason}); {comparison.reason}"
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)

    return _map_comparisons(stage, excuse_leaf)


def _is_negligible(comparison: Comparison, between_runs: Comparison) -> bool:
    """Tell whether two runs of the reference differ too little to doubt the verdict of a leaf.

    A divergence stands if the runs differ by less than `OWN_SHARE` of the candidate's error. Any other verdict stands
    if they differ by at most the square root of the rounding unit, relative to the values. Return False if a number is
    missing, or if a NaN or Inf is out of place between the runs.
    """
    difference = between_runs.measurement
    if comparison.noise is None or comparison.error is None or difference is None or difference.misplaced:
        return False
    if comparison.verdict is Verdict.DIVERGED:
        return difference.max_abs < OWN_SHARE * comparison.error
    roundoff, scale = float(comparison.details["roundoff"]), float(comparison.details["rms_of_truth"])
    return difference.rms_error <= math.sqrt(roundoff) * scale


def _map_comparisons(stage: Stage, change: Callable[[Comparison], Comparison]) -> Stage:
    """Return the stage with each of its comparisons changed, and a verdict to match; without any, the stage itself."""
    if not stage.comparisons:
        return stage
    return Stage.of(stage.name, tuple(map(change, stage.comparisons)), stage.reason)
