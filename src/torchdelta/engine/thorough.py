"""The local question, asked with a check: each node by itself, so that nothing hides in what accumulates around it."""

from __future__ import annotations

from dataclasses import replace

from torchdelta._torch import runtime
from torchdelta.engine.check import Check
from torchdelta.engine.locate import Locating
from torchdelta.locate.found import Found
from torchdelta.records.report import ASKED, Report, Stage
from torchdelta.records.verdict import worst_of

LOCAL = "local"
"""The stage of what nodes do by themselves."""


def ask_locally(check: Check, report: Report) -> Report:
    """Return the report of a check with what its nodes say; one that is wrong by itself makes it diverge."""
    if report.failure is not None:
        return replace(report, questions=replace(report.questions, local="not asked: the candidate failed"))
    with runtime.preserved():
        found = Locating(check=check).look_at_nodes(report)
    coverage = found.coverage
    if coverage is None or not coverage.matched:
        why = "; ".join(found.notes) or "there is no graph whose nodes could be looked at"
        return replace(report, questions=replace(report.questions, local=f"not asked: {why}"))
    comparisons = tuple(seen for row in found.rows for seen in (*row.local, *row.local_gradients))
    stages = report.stages
    if comparisons:
        stages = (*stages, Stage.of(LOCAL, comparisons))
    return replace(
        report,
        verdict=worst_of(stage.verdict for stage in stages),
        stages=stages,
        questions=replace(report.questions, local=ASKED),
        culprits=found.culprits,
        coverage=coverage,
        notes=tuple(dict.fromkeys((*report.notes, *found.notes, _said(found)))),
    )


def _said(found: Found) -> str:
    differing = sum(bool(row.local or row.local_gradients) for row in found.rows)
    return f"local: {len(found.rows)} nodes were looked at by themselves, and {differing} are not the same to the bit"
