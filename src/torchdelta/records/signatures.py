"""The signatures of the failures that a report shows.

A crash has one signature. A report that diverged may have several: leaves with the same stage, the same broken clauses
and an error of the same order of magnitude share one. Start reading at `signatures_of`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torchdelta.records.comparison import LESS_ACCURATE, Comparison
from torchdelta.records.failure import Signature
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict

MOST = 3
"""The largest order of magnitude in a signature: beyond it, errors are all alike."""


def signatures_of(report: Report) -> tuple[Signature, ...]:
    """Return each signature of a report once: the earliest stage first, and in a stage the worst leaf's first.

    A report with a failure has only that of the failure. A stage that diverged without a leaf that did has one of the
    type `structure`, behind all others. A report without a divergence has none.
    """
    if report.failure is not None:
        return (report.failure.signature,)
    signatures = dict.fromkeys(signature for signature, _ in diverged_leaves(report))
    for stage in report.stages:
        if stage.verdict is Verdict.DIVERGED and not any(signature.stage == stage.name for signature in signatures):
            signatures[Signature(kind="divergence", stage=stage.name, type="structure", message="")] = None
    return tuple(signatures)


def diverged_leaves(report: Report) -> tuple[tuple[Signature, str], ...]:
    """Return (signature, path) of each leaf that diverged: by stage, the earliest first, then the worst leaf first."""
    return tuple(
        (_describe(comparison, stage.name), comparison.path)
        for stage in report.stages
        for comparison in sorted(stage.comparisons, key=lambda comparison: comparison.rank, reverse=True)
        if comparison.verdict is Verdict.DIVERGED
    )


def keep_only(report: Report, wanted: Signature) -> Report:
    """Return a copy of the report without the leaves that diverged otherwise than `wanted` (`Signature.is_same_as`).

    Leaves that did not diverge stay, and so do the verdicts of report and stages. A report with a failure is returned
    unchanged.
    """
    if report.failure is not None:
        return report
    stages = tuple(
        replace(
            stage,
            comparisons=tuple(
                comparison
                for comparison in stage.comparisons
                if comparison.verdict is not Verdict.DIVERGED or wanted.is_same_as(_describe(comparison, stage.name))
            ),
        )
        for stage in report.stages
    )
    return replace(report, stages=stages)


def _describe(comparison: Comparison, stage: str) -> Signature:
    """Return the signature of a leaf that diverged; `stage` is the name of its stage.

    Its type are the broken clauses that are not excused, with commas between them. If there are none, the type is `not
    finite` (a NaN or Inf is misplaced), `accuracy` (the same function, less accurate) or `values`, and the signature
    has a magnitude (`_magnitude`).
    """
    clauses = sorted({breach.clause for breach in comparison.contract if not breach.excused})
    if clauses:
        return Signature(kind="divergence", stage=stage, type=",".join(clauses), message="")
    is_misplaced = comparison.measurement is not None and comparison.measurement.misplaced > 0
    of_values = "accuracy" if comparison.kind == LESS_ACCURATE else "values"
    return Signature(
        kind="divergence",
        stage=stage,
        type="not finite" if is_misplaced else of_values,
        message="",
        magnitude=_magnitude(comparison),
    )


def _magnitude(comparison: Comparison) -> int:
    """Return the order of magnitude of error over allowed error, from 0 to MOST.

    It is MOST too if the ratio is 0, because then nothing was measured.
    """
    ratio = comparison.ratio
    if ratio == 0.0 or math.isinf(ratio):  # an exact comparison knows only equal and different
        return MOST
    return max(0, min(MOST, math.floor(math.log10(ratio)))) if ratio > 0 else 0
