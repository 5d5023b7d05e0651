"""The failures that a report shows, by what makes them the same as others."""

from __future__ import annotations

import math
from dataclasses import replace

from torchdelta.records.comparison import Comparison
from torchdelta.records.failure import Signature
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict

MOST = 3
"""Orders of magnitude that are told apart."""


def signatures_of(report: Report) -> tuple[Signature, ...]:
    """Return each failure once, the earliest stage first, and in a stage the worst."""
    if report.failure is not None:
        return (report.failure.signature,)
    found = dict.fromkeys(signature for signature, _ in guilty_of(report))
    for stage in report.stages:
        if stage.verdict is Verdict.DIVERGED and not any(signature.stage == stage.name for signature in found):
            found[Signature(kind="divergence", stage=stage.name, type="structure", message="")] = None
    return tuple(found)


def guilty_of(report: Report) -> tuple[tuple[Signature, str], ...]:
    """Return the leaves that differ, each with its failure: the earliest stage first, and in a stage the worst."""
    return tuple(
        (_of(seen, stage.name), seen.path)
        for stage in report.stages
        for seen in sorted(stage.comparisons, key=lambda seen: seen.rank, reverse=True)
        if seen.verdict is Verdict.DIVERGED
    )


def showing_only(report: Report, wanted: Signature) -> Report:
    """Return the report without what differs in another way."""
    if report.failure is not None:
        return report
    stages = tuple(
        replace(
            stage,
            comparisons=tuple(
                seen
                for seen in stage.comparisons
                if seen.verdict is not Verdict.DIVERGED or wanted.is_same_as(_of(seen, stage.name))
            ),
        )
        for stage in report.stages
    )
    return replace(report, stages=stages)


def _of(seen: Comparison, stage: str) -> Signature:
    clauses = sorted({breach.clause for breach in seen.contract if not breach.excused})
    if clauses:
        return Signature(kind="divergence", stage=stage, type=",".join(clauses), message="")
    is_misplaced = seen.measurement is not None and seen.measurement.misplaced > 0
    return Signature(
        kind="divergence",
        stage=stage,
        type="not finite" if is_misplaced else "values",
        message="",
        magnitude=_magnitude(seen),
    )


def _magnitude(seen: Comparison) -> int:
    ratio = seen.ratio
    if ratio == 0.0 or math.isinf(ratio):  # exact: there is no more or less of it
        return MOST
    return max(0, min(MOST, math.floor(math.log10(ratio)))) if ratio > 0 else 0
