"""The local question, asked with a check: each node by itself, so that nothing hides in what accumulates around it."""

from __future__ import annotations

from dataclasses import replace

from torchdelta._torch import runtime
from torchdelta.engine.check import Check
from torchdelta.engine.locate import Locating
from torchdelta.locate.found import Found
from torchdelta.records.report import ASKED, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of

LOCAL = "local"
"""The stage of what nodes do by themselves."""


def ask_locally(check: Check, report: Report) -> Report:
    """Return the report of a check with what its nodes say; one that is wrong by itself makes it diverge."""
    if report.failure is not None:
        return replace(report, questions=replace(report.questions, local="not asked: the candidate failed"))
    with runtime.preserved():
        locating = Locating(check=check)
        found = locating.look_at_nodes(report)
    found = replace(found, notes=(*locating.notes, *found.notes))
    coverage = found.coverage
    if coverage is None or not coverage.matched:
        why = "; ".join(found.notes) or "there is no graph whose nodes could be looked at"
        return replace(report, questions=replace(report.questions, local=f"not asked: {why}"))
    comparisons = tuple(
        seen
        for row in found.rows
        for seen in (*row.local, *row.local_gradients)
        # what differs and is nobody's fault was excused by who looked at it
        if found.culprits or seen.verdict is not Verdict.DIVERGED
    )
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
    differing = sum(any(seen.error for seen in (*row.local, *row.local_gradients)) for row in found.rows)
    return f"local: {len(found.rows)} nodes were looked at by themselves, and {differing} are not the same to the bit"
