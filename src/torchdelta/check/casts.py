"""Narrowing casts that the candidate left out.

They are not a divergence, because the candidate is closer to the truth without them, but they are always reported. The
reference is run once more with its narrowing casts elided; a candidate that is nearer to that run than to the
reference has elided them too. Start with `notice`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from torchdelta._torch.modes.elided_casts import Elide
from torchdelta._torch.tensors import has_values
from torchdelta.check.baseline import Baseline
from torchdelta.compare.contract import Terms
from torchdelta.compare.kernels import measure
from torchdelta.program.stages import Observation, SideFailed
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

NEARER = 0.7
"""Elided casts explain a difference that shrinks to less than this share of itself if both sides elide them."""
_NAMED = 3
"""Casts that a note names."""


def notice(stages: list[Stage], baseline: Baseline, candidate: Observation, terms: Terms) -> tuple[list[Stage], str]:
    """Return the stages with a breach of the clause `casts` at each leaf that elided casts explain, and a note on them.

    The reference runs again with its narrowing casts elided. If the run elides no cast, or no leaf is explained, the
    stages are returned unchanged, with an empty note. If the run fails, the note says so, and if `casts` is strict in
    the terms, the stages with comparisons are at best inconclusive.
    """
    mode = Elide()
    try:
        with baseline.timed("casts"):
            elided = baseline.observe(mode)
    except SideFailed as failed:
        why = f"whether narrowing casts were elided is not known: the program without them fails ({failed})"
        is_strict = "casts" in terms.strict
        # a stage without comparisons has a verdict of its own, such as a crash
        doubted = [
            Stage.of(stage.name, stage.comparisons, why) if is_strict and stage.comparisons else stage
            for stage in stages
        ]
        return doubted, why
    if not mode.elided:
        return stages, ""
    with_breaches = [_add_breaches(stage, baseline.reference, candidate, elided, mode, terms) for stage in stages]
    count = sum(1 for stage in with_breaches for comparison in stage.comparisons if _has_elided(comparison, mode))
    if not count:
        return stages, ""
    return with_breaches, (
        f"narrowing casts were elided: {_names(mode)}. In {count} of the leaves the candidate is nearer to the program "
        "without these casts, which is closer to the truth, than to the reference; --strict-casts makes that diverge"
    )


def _add_breaches(
    stage: Stage, reference: Observation, candidate: Observation, elided: Observation, mode: Elide, terms: Terms
) -> Stage:
    """Return the stage with a breach of the clause `casts` at every leaf that elided casts explain (`_is_explained`).

    A breach that the terms do not excuse makes the leaf diverged; otherwise its verdict stays. All other leaves stay as
    they are. `elided` is the run without narrowing casts, and `mode` has their places.
    """
    if not stage.comparisons:
        return stage
    comparisons = []
    for comparison in stage.comparisons:
        leaves = [side.stages.get(stage.name, {}).get(comparison.path) for side in (reference, candidate, elided)]
        if _is_explained(*leaves):
            breach = terms.breach("casts", _rounding(mode), "keeps the value wide")
            comparison = replace(comparison, contract=(*comparison.contract, breach))
            if not breach.excused and comparison.verdict is not Verdict.DIVERGED:
                comparison = replace(comparison, verdict=Verdict.DIVERGED, reason=str(breach))
        comparisons.append(comparison)
    return Stage.of(stage.name, tuple(comparisons), stage.reason)


def _is_explained(reference: object, candidate: object, elided: object) -> bool:
    """Tell whether the candidate's leaf is much nearer to the run without casts, `elided`, than to the reference.

    It is if fewer NaN and Inf are misplaced between it and `elided` than between it and the reference. It also is if it
    differs from the reference, and its rms distance to `elided` is less than `NEARER` times that to the reference.
    Return False unless all three are tensors of one shape and layout, with values, and the reference's is of floats.
    """
    sides = [side for side in (reference, candidate, elided) if isinstance(side, torch.Tensor) and has_values(side)]
    if len(sides) < 3 or len({(side.shape, side.layout) for side in sides}) > 1 or not sides[0].is_floating_point():
        return False
    to_reference, to_elided = measure(sides[0], sides[1]), measure(sides[2], sides[1])
    if to_elided.misplaced < to_reference.misplaced:
        return True
    return to_reference.mismatches > 0 and to_elided.rms_error < NEARER * to_reference.rms_error


def _has_elided(comparison: Comparison, mode: Elide) -> bool:
    """Tell whether a comparison has the breach that `_add_breaches` adds for the casts of this mode."""
    return any(breach.clause == "casts" and breach.reference == _rounding(mode) for breach in comparison.contract)


def _rounding(mode: Elide) -> str:
    """Return the words for the reference's side of a breach: `rounds at` and the places of the elided casts."""
    return f"rounds at {_names(mode)}"


def _names(mode: Elide) -> str:
    """Return the places of up to three elided casts, sorted, and the number of the others, as a text."""
    places = sorted(mode.elided)
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return ", ".join(places[:_NAMED]) + more
