"""Why a report says what it says."""

from __future__ import annotations

from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict


def reason_of(report: Report) -> str:
    """Return in one line what was raised, what a stage says of itself, or the reason of the worst comparison."""
    if report.failure is not None:
        return f"{report.failure.type}: {report.failure.message}".splitlines()[0]
    worst = max(report.comparisons, key=lambda seen: seen.rank, default=None)
    return next((stage.reason for stage in report.stages if stage.reason), worst.reason if worst else "")


def wrong_in(report: Report) -> list[Comparison]:
    """Return the comparisons that diverged."""
    return [seen for seen in report.comparisons if seen.verdict is Verdict.DIVERGED]
