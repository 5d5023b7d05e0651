"""One matched pair of nodes in words and numbers, and which of many pairs are the worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torchdelta.records.comparison import Breach, Comparison, Measurement
from torchdelta.records.location import Row
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.report.marks import number

IDENTICAL = "identical"
NOT_JUDGED = "not judged"


def own(row: Row) -> tuple[Comparison, ...]:
    """Return what was seen of a node by itself; gradients of what is wrong already in its values tell nothing more."""
    is_wrong = any(seen.verdict.is_failure for seen in row.local)
    return row.local if is_wrong else (*row.local, *row.local_gradients)


def own_verdict(row: Row) -> Verdict:
    """Return whether a node is right by itself; inconclusive where that could not be judged."""
    if not own(row):
        return Verdict.INCONCLUSIVE if row.reason else Verdict.EQUIVALENT
    return worst_of(seen.verdict for seen in own(row))


def differs(row: Row) -> bool:
    """Tell whether there is anything to say of a pair besides that both sides are the same to the bit."""
    return bool(row.reason) or any(not _is_identical(seen) for seen in (*own(row), *row.inherited))


def by_itself(row: Row) -> str:
    """Write the error of a node that was fed the reference's values, in multiples of its noise."""
    worst = worst_seen(own(row))
    if worst is None:
        return NOT_JUDGED if row.reason else IDENTICAL
    stage = "" if worst in row.local else " (gradients)"
    return _by_itself(worst) + stage


def _by_itself(seen: Comparison) -> str:
    if broken := [breach.clause for breach in seen.contract if not breach.excused]:
        return f"other {' and '.join(broken)}"
    if _is_identical(seen):
        return IDENTICAL
    if seen.error is None:
        return seen.verdict.value
    if seen.noise:
        return f"{seen.error / seen.noise:.3g} × noise"
    return f"error {number(seen.error)}"


def inherited(row: Row) -> str:
    """Write how far the candidate's own value is from the reference's, what it was given included."""
    worst = worst_seen(row.inherited)
    if worst is None or _is_identical(worst):
        return IDENTICAL
    seen = worst.measurement
    if seen is None:
        return worst.verdict.value
    if seen.misplaced:
        return "NaN or Inf"
    return f"{seen.sqnr_db:.1f} dB" if math.isfinite(seen.sqnr_db) else f"max abs {number(seen.max_abs)}"


def measured(comparisons: Iterable[Comparison]) -> Measurement | None:
    """Return the numbers of the worst comparison; None where nothing differs or nothing was measured."""
    worst = worst_seen(comparisons)
    return None if worst is None or _is_identical(worst) else worst.measurement


def oddities(row: Row) -> str:
    """Write what no error tells: values that are not finite, and what else than values changed."""
    return ", ".join(dict.fromkeys(odd for seen in (*own(row), *row.inherited) for odd in _oddities(seen)))


def _oddities(seen: Comparison) -> Iterator[str]:
    if numbers := seen.measurement:
        if numbers.nan_reference != numbers.nan_candidate:
            yield f"NaN {numbers.nan_reference} → {numbers.nan_candidate}"
        if numbers.inf_reference != numbers.inf_candidate:
            yield f"Inf {numbers.inf_reference} → {numbers.inf_candidate}"
    for breach in seen.contract:
        if _tells(breach):
            yield f"{breach.clause} {breach.reference} → {breach.candidate}"
    if seen.measurement is None and not seen.contract and seen.verdict is not Verdict.EQUIVALENT:
        yield seen.reason


def worst_seen(comparisons: Iterable[Comparison]) -> Comparison | None:
    """Return the worst of them."""
    return max(comparisons, key=lambda seen: seen.rank, default=None)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Return the worst first: what is wrong by itself, then what was given the worst."""
    return sorted(rows, key=_rank, reverse=True)


def _rank(row: Row) -> tuple[tuple[float, ...], float, float]:
    worst = worst_seen(own(row))
    guilt = worst.rank if worst is not None and worst.verdict is not Verdict.EQUIVALENT else ()
    return guilt, max(map(_loss, row.inherited), default=-math.inf), worst.ratio if worst is not None else 0.0


def _loss(seen: Comparison) -> float:
    """Return the signal that was lost, in dB; infinite where that cannot be told."""
    if seen.measurement is None or seen.measurement.misplaced:
        return -math.inf if seen.verdict is Verdict.EQUIVALENT else math.inf
    lost = -seen.measurement.sqnr_db
    return math.inf if math.isnan(lost) else lost


def _is_identical(seen: Comparison) -> bool:
    if any(map(_tells, seen.contract)):
        return False
    if seen.measurement is None:
        return seen.verdict is Verdict.EQUIVALENT
    return seen.measurement.mismatches == 0 and seen.verdict is Verdict.EQUIVALENT


def _tells(breach: Breach) -> bool:
    # whether a value in the middle of a graph requires grad depends on how it is run
    return breach.clause in ("dtype", "shape") or not (breach.excused or breach.clause == "requires_grad")
