"""Integers and booleans that a correct program may get either way: their margin from the edge is within noise.

The program is run again for the margins alone, in float64, natively and with noise: by how much a margin moves between
correct runs is its noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdelta._torch import lift, runtime
from torchdelta._torch.ledges import Ledges
from torchdelta._torch.noisy import Noisy
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.engine.baseline import Baseline
from torchdelta.execute.sides import Side, varied_in
from torchdelta.execute.stages import Observation
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

WITHIN = 8.0
"""So many times its noise from the edge, a margin may still be on either side of it."""


@dataclass(frozen=True)
class _Edge:
    """The margins of one leaf: in the truth, and by how much correct runs move them."""

    margins: torch.Tensor
    noise: float
    operation: str


def excuse(stages: list[Stage], baseline: Baseline, candidate: Observation, noisy: list[Observation]) -> list[Stage]:
    """Return the stages with every integer within noise of its edge inconclusive, and its margin as evidence."""
    return [_excused_stage(stage, baseline, candidate, noisy) for stage in stages]


def _excused_stage(stage: Stage, baseline: Baseline, candidate: Observation, noisy: list[Observation]) -> Stage:
    suspects = [seen for seen in stage.comparisons if _is_suspect(seen)]
    if not suspects or baseline.truth is None:
        return stage
    edges: dict[str, _Edge] = {}
    if stage.name == "forward":
        try:
            edges = _edges(baseline)
        except Exception as error:  # the program's own: it runs on other values than it was given
            baseline.notes.append(f"margins are not known: a noisy run of the program fails ({error})")
    changed = []
    for seen in stage.comparisons:
        if seen in suspects:
            sides = (baseline.truth, baseline.reference, candidate, *noisy)
            leaves = [side.stages.get(stage.name, {}).get(seen.path) for side in sides]
            seen = _excused(seen, leaves, edges.get(seen.path))
        changed.append(seen)
    return Stage.of(stage.name, tuple(changed), stage.reason)


def _is_suspect(seen: Comparison) -> bool:
    is_exact = seen.dtype is not None and not seen.dtype.startswith(("float", "bfloat", "complex"))
    is_broken = any(not breach.excused for breach in seen.contract)
    return is_exact and not is_broken and seen.verdict is Verdict.DIVERGED and seen.measurement is not None


def _excused(seen: Comparison, leaves: list[Any], edge: _Edge | None) -> Comparison:
    truth, reference, candidate, *noisy = leaves
    if not isinstance(truth, torch.Tensor) or truth.shape != reference.shape:
        return seen
    noisy = [run for run in noisy if isinstance(run, torch.Tensor) and run.shape == truth.shape]
    if torch.equal(candidate, truth):
        reason = f"{seen.reason.partition(',')[0]}, and in all of them the candidate is as the truth is"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
    differs = (candidate != reference) | (candidate != truth)
    if edge is not None and edge.margins.shape == differs.shape:
        margin = float(edge.margins[differs].max())
        details = {**seen.details, "margin": margin, "margin_noise": edge.noise, "decided_by": edge.operation}
        where = f"{seen.reason.partition(',')[0]}; {edge.operation} decided them by a margin of up to {margin:.3g}"
        if edge.noise > 0.0 and margin <= WITHIN * edge.noise:
            reason = f"{where}, and rounding moves that margin by {edge.noise:.3g}: either way may be right"
            return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason, details=details)
        return replace(seen, reason=f"{where}, and rounding moves it by {edge.noise:.3g} only", details=details)
    among_correct = max(int((run != truth).sum()) for run in (reference, *noisy))
    if 0 < int((candidate != truth).sum()) < 2 * among_correct:
        reason = f"{seen.reason.partition(',')[0]}; {among_correct} differ between correct runs of the program too"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
    return seen


def _edges(baseline: Baseline) -> dict[str, _Edge]:
    """Run the program's forward three times, and return the margins of its integer outputs."""
    mode = Noisy(seed=baseline.plan.seed)
    wide, native, noisy = Ledges(), Ledges(), Ledges()
    drawn_in = baseline.drawn_in
    lifted = _outputs(baseline, [baseline.lifted_scope(drawn_in), lambda: wide], lift.widened)
    plain = _outputs(baseline, [baseline.eager_scope, lambda: native])
    moved = _outputs(baseline, [baseline.eager_scope, lambda: mode, lambda: noisy], start=mode.start_from)
    edges = {}
    for path, value in lifted.items():
        if not isinstance(value, torch.Tensor) or (found := wide.margin_of(value)) is None:
            continue
        margins, operation = found
        others = [
            seen[0]
            for ledges, outputs in ((native, plain), (noisy, moved))
            if isinstance(outputs.get(path), torch.Tensor) and (seen := ledges.margin_of(outputs[path])) is not None
        ]
        moves = [torch.nan_to_num(other.double() - margins.double()).abs() for other in others]
        noise = max((float(move.max()) for move in moves if move.shape == margins.shape and move.numel()), default=0.0)
        edges[path] = _Edge(margins, noise, operation)
    return edges


def _outputs(
    baseline: Baseline,
    scopes: list[Callable[[], AbstractContextManager[Any]]],
    convert: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    start: Callable[[list[torch.Tensor]], None] = lambda _: None,
) -> Leaves:
    side = Side.copied_from(baseline.program, convert=convert)
    start(varied_in(side))
    runtime.seed_everything(baseline.plan.seed)
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        outputs = side.call(*side.args, **side.kwargs)
    return leaves_of(outputs, "outputs")
