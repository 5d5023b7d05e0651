"""Narrowing casts that the candidate left out: no divergence, for it is closer to the truth, but never silent.

The reference is run once more with its narrowing casts elided; a candidate that is nearer to that run than to the
reference has elided them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from torchdelta._torch.modes.elided_casts import Elide
from torchdelta.check.baseline import Baseline
from torchdelta.compare.contract import Terms
from torchdelta.compare.kernels import measure
from torchdelta.program.sides import Side
from torchdelta.program.stages import Observation, SideFailed, observe
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

NEARER = 0.7
"""Elided casts explain a difference that is smaller than this share of itself when they are elided in both."""
_NAMED = 3


def notice(stages: list[Stage], baseline: Baseline, candidate: Observation, terms: Terms) -> tuple[list[Stage], str]:
    """Return the stages with every elided cast as a breach of the clause `casts`, and a note that names the casts."""
    mode = Elide()

    @contextmanager
    def eliding() -> Iterator[None]:
        with baseline.eager_scope(), mode:
            yield

    try:
        with baseline.timed("casts"):
            elided = observe(Side.copied_from(baseline.program), baseline.plan, baseline.original, eliding)
    except SideFailed as failed:
        why = f"whether narrowing casts were elided is not known: the program without them fails ({failed})"
        is_strict = "casts" in terms.strict
        return [Stage.of(stage.name, stage.comparisons, why) if is_strict else stage for stage in stages], why
    if not mode.elided:
        return stages, ""
    noticed = [_noticed(stage, baseline.reference, candidate, elided, mode, terms) for stage in stages]
    count = sum(1 for stage in noticed for seen in stage.comparisons if _is_elided(seen))
    if not count:
        return stages, ""
    return noticed, (
        f"narrowing casts were elided: {_named(mode)}. In {count} of the leaves the candidate is nearer to the program "
        "without these casts, which is closer to the truth, than to the reference; --strict-casts makes that diverge"
    )


def _noticed(
    stage: Stage, reference: Observation, candidate: Observation, elided: Observation, mode: Elide, terms: Terms
) -> Stage:
    if not stage.comparisons:
        return stage
    comparisons = []
    for seen in stage.comparisons:
        leaves = [side.stages.get(stage.name, {}).get(seen.path) for side in (reference, candidate, elided)]
        if _is_explained(*leaves):
            breach = terms.breach("casts", f"rounds at {_named(mode)}", "keeps the value wide")
            seen = replace(seen, contract=(*seen.contract, breach))
            if not breach.excused and seen.verdict is not Verdict.DIVERGED:
                seen = replace(seen, verdict=Verdict.DIVERGED, reason=str(breach))
        comparisons.append(seen)
    return Stage.of(stage.name, tuple(comparisons), stage.reason)


def _is_explained(reference: object, candidate: object, elided: object) -> bool:
    sides = [side for side in (reference, candidate, elided) if isinstance(side, torch.Tensor)]
    if len(sides) < 3 or len({(side.shape, side.layout) for side in sides}) > 1 or not sides[0].is_floating_point():
        return False
    to_reference, to_elided = measure(sides[0], sides[1]), measure(sides[2], sides[1])
    return to_reference.mismatches > 0 and to_elided.rms_error < NEARER * to_reference.rms_error


def _is_elided(seen: Comparison) -> bool:
    return any(breach.clause == "casts" for breach in seen.contract)


def _named(mode: Elide) -> str:
    places = sorted(mode.elided)
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return ", ".join(places[:_NAMED]) + more
