"""Overflow of the reference that the candidate avoids.

A narrow dtype overflows where a wider one does not: the square of 5000 is infinite in float16. A compiler that keeps
the value in float32 is right where the reference is NaN or Inf. That is not a divergence, because the truth is finite
there too, but it is always reported, as a breach of the clause `casts`, which a case may hold strictly.

The elements that overflow are judged apart from the others. The reference has no rounding there that they could be
held against, so they are held against noisy runs in float64, whose roundings are as large as those of the narrow dtype.
Start with `notice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from torchdelta._torch.modes.elided_casts import coarser
from torchdelta._torch.modes.overflows import Overflows
from torchdelta._torch.tensors import dtype_name, resolve
from torchdelta.check.baseline import Baseline
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.noise import Noise
from torchdelta.compare.protocol import Yardstick
from torchdelta.compare.spread import MASK
from torchdelta.program.stages import Observation, SideFailed
from torchdelta.records.comparison import Breach, Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

RUNS = 2
"""Noisy runs for the elements that overflow."""
_NAMED = 3
"""Operations, and leaves, that a note names."""

Compare = Callable[[str, Yardstick[Observation], Observation], list[Comparison]]
"""Compares a candidate with a yardstick in one stage."""
Masks = dict[str, dict[str, torch.Tensor]]
"""For each stage and path of a leaf: at which of its elements the candidate avoids an overflow."""


def notice(
    stages: list[Stage],
    baseline: Baseline,
    yardstick: Yardstick[Observation],
    candidate: Observation,
    terms: Terms,
    compare: Compare,
) -> tuple[list[Stage], str]:
    """Return the stages with each leaf judged anew in which the candidate avoids an overflow, and a note on them.

    If there is such a leaf, the program runs once more, to see where it overflows; a failure of that run is ignored.
    Elements that overflow in the reference are judged by themselves, and all others by `compare`; `_combined` puts both
    together. The leaf gets a breach of the clause `casts`, unless its verdict is that of elements that overflow and are
    not near the truth. Without such a leaf nothing runs: the stages are returned unchanged, with an empty note.
    """
    masks = _avoided(stages, yardstick, candidate)
    if not masks:
        return stages, ""
    mode = Overflows()
    try:
        with baseline.timed("casts"):
            baseline.observe(mode)
    except SideFailed:
        pass  # the operations that it came to are named all the same
    by_zero = replace(
        yardstick,
        reference=_zeroed(yardstick.reference, masks),
        truth=_zeroed(yardstick.truth, masks) if yardstick.truth is not None else None,
        noisy=[_zeroed(run, masks) for run in yardstick.noisy],
    )
    without = _zeroed(candidate, masks)
    judged = []
    for stage in stages:
        if stage.name in masks:
            others = {each.path: each for each in compare(stage.name, by_zero, without)}
            comparisons = []
            for comparison in stage.comparisons:
                mask = masks[stage.name].get(comparison.path)
                if mask is not None:
                    overflowed = _judge_overflowed(comparison, stage.name, mask, baseline, candidate, mode)
                    breach = terms.breach("casts", _described(comparison, mask, mode), "finite")
                    comparison = _combined(comparison, others[comparison.path], overflowed, breach, int(mask.sum()))
                comparisons.append(comparison)
            stage = Stage.of(stage.name, tuple(comparisons), stage.reason)
        judged.append(stage)
    return judged, _note(judged, masks, mode)


def _avoided(stages: Sequence[Stage], yardstick: Yardstick[Observation], candidate: Observation) -> Masks:
    """Return masks, by stage and path, of where the reference is NaN or Inf, and candidate and truth are finite.

    Leaves without such elements have none, and elements at which the truth is a mask constant are not among them. Empty
    without a truth.
    """
    masks: Masks = {}
    if yardstick.truth is None:
        return masks
    for stage in stages:
        sides = [run.stages.get(stage.name, {}) for run in (yardstick.reference, yardstick.truth, candidate)]
        for comparison in stage.comparisons:
            if comparison.measurement is None or not comparison.measurement.misplaced:
                continue
            reference, truth, other = (side.get(comparison.path) for side in sides)
            if not isinstance(reference, torch.Tensor) or not isinstance(truth, torch.Tensor):
                continue
            if not isinstance(other, torch.Tensor) or not _are_alike(reference, truth, other):
                continue
            reference, truth, other = map(_with_arithmetic, (reference, truth, other))
            mask = ~reference.isfinite() & truth.isfinite() & other.isfinite() & (truth.abs() <= MASK)
            if mask.any():
                masks.setdefault(stage.name, {})[comparison.path] = mask.detach()
    return masks


def _are_alike(*sides: torch.Tensor) -> bool:
    """Tell whether tensors have one shape, and all of them are strided floats."""
    are_floats = all(is_inexact(side.dtype) and side.layout is torch.strided for side in sides)
    return are_floats and len({side.shape for side in sides}) == 1


def _with_arithmetic(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float of one byte, which has no arithmetic of its own, as float32, and any other tensor itself."""
    return tensor.float() if tensor.itemsize == 1 else tensor


def _zeroed(run: Observation, masks: Masks) -> Observation:
    """Return a copy of an observation with zeros at the elements of the masks; leaves of another shape stay."""
    stages = dict(run.stages)
    for stage, by_path in masks.items():
        leaves = dict(stages.get(stage, {}))
        for path, mask in by_path.items():
            leaf = leaves.get(path)
            if isinstance(leaf, torch.Tensor) and leaf.shape == mask.shape:
                zeroed = _with_arithmetic(leaf.detach()).masked_fill(mask, 0).to(leaf.dtype)
                leaves[path] = zeroed.requires_grad_(leaf.requires_grad)
        stages[stage] = leaves
    return replace(run, stages=stages)


def _judge_overflowed(
    comparison: Comparison, stage: str, mask: torch.Tensor, baseline: Baseline, candidate: Observation, mode: Overflows
) -> Comparison:
    """Return the comparison of the elements of a leaf that overflow in the reference alone with the truth.

    Each element is judged relative to its size, because those that overflow may be orders of magnitude apart. The noise
    is that of float64 runs with roundings of the coarsest dtype of the leaf, the overflows and the program's casts.
    """
    path = comparison.path
    assert baseline.truth is not None
    dtype = baseline.reference.stages[stage][path].dtype.to_real()
    for other in (*mode.places.values(), baseline.narrowed_to):
        dtype = coarser(dtype, other) if other is not None else dtype
    noisy = [run.stages.get(stage, {}).get(path) for run in baseline.noisy(RUNS, lowered_to=dtype)]
    truth, ours, *runs = (
        _with_arithmetic(resolve(leaf.detach()))[mask].to(torch.complex128 if leaf.is_complex() else torch.float64)
        for leaf in (baseline.truth.stages[stage][path], candidate.stages[stage][path], *noisy)
        if isinstance(leaf, torch.Tensor) and leaf.shape == mask.shape
    )
    size = truth.abs()
    for run in runs:
        size = torch.maximum(size, (run - truth).abs().nan_to_num(0.0, 0.0, 0.0))
    size = size.where(size > 0, 1.0)
    judge = Judge(policy=Noise(), terms=Terms(lowered_to=dtype))
    leaves = {path: truth / size}
    overflowed, _ = judge.compare(leaves, {path: ours / size}, leaves, noisy=[{path: run / size} for run in runs])
    return overflowed[0]


def _combined(
    comparison: Comparison, others: Comparison, overflowed: Comparison, breach: Breach, count: int
) -> Comparison:
    """Return the comparison of a whole leaf from those of its `count` elements that overflow and of all `others`.

    If `others` is not equivalent, and no better than `overflowed`, it decides. Otherwise, if `overflowed` is not
    equivalent, its verdict is taken. If both are equivalent, the leaf is too if the breach is excused, and else
    diverged. The breach is added in the first and in the last case.
    """
    if others.verdict is not Verdict.EQUIVALENT and others.verdict.severity >= overflowed.verdict.severity:
        return replace(others, contract=(*comparison.contract, breach))
    numel = comparison.measurement.numel if comparison.measurement is not None else count
    where = f"at {count} of {numel} elements the reference alone is NaN or Inf"
    details = {**others.details, "overflowed": count}
    if overflowed.verdict is not Verdict.EQUIVALENT:
        return replace(
            comparison,
            verdict=overflowed.verdict,
            reason=f"{where}, and the candidate is not near the truth there: relative {overflowed.reason}",
            details=details,
        )
    return replace(
        comparison,
        verdict=Verdict.EQUIVALENT if breach.excused else Verdict.DIVERGED,
        reason=f"{others.reason}; {where}" if breach.excused else str(breach),
        contract=(*comparison.contract, breach),
        error=others.error,
        noise=others.noise,
        allowed=others.allowed,
        resolution=max((each.resolution for each in (others, overflowed) if each.resolution), default=None),
        details=details,
    )


def _described(comparison: Comparison, mask: torch.Tensor, mode: Overflows) -> str:
    """Return how many elements of a leaf overflow, and in which operations."""
    return f"NaN or Inf at {int(mask.sum())} of {mask.numel()} elements ({_names(comparison.dtype, mode.places)})"


def _names(dtype: str | None, places: Mapping[str, torch.dtype]) -> str:
    """Return in words up to three operations that overflow, and the number of others; without any, the dtype."""
    if not places:
        return f"an overflow of {dtype}"
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"overflow in {', '.join(list(places)[:_NAMED])}{more}"


def _note(stages: Sequence[Stage], masks: Masks, mode: Overflows) -> str:
    """Return a note on the leaves in which the candidate avoids an overflow and that have a breach of `casts`.

    It names up to three of them. It is empty if no leaf with a mask has such a breach.
    """
    leaves = [
        f"{int(mask.sum())} of {mask.numel()} elements of {stage.name} {comparison.path}"
        for stage in stages
        for comparison in stage.comparisons
        if (mask := masks.get(stage.name, {}).get(comparison.path)) is not None
        and any(breach.clause == "casts" for breach in comparison.contract)
    ]
    if not leaves:
        return ""
    more = f" and of {len(leaves) - _NAMED} more leaves" if len(leaves) > _NAMED else ""
    dtypes = sorted({dtype_name(dtype) for dtype in mode.places.values()})
    return (
        f"the reference overflows{' in ' + ' and '.join(dtypes) if dtypes else ''}, and the candidate does not: "
        f"{', '.join(leaves[:_NAMED])}{more} are NaN or Inf in the reference alone "
        f"({_names(None, mode.places) if mode.places else 'inside of an operation'}); "
        "--strict-casts makes that diverge"
    )
