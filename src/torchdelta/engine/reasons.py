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


def telling(report: Report) -> str:
    """Return in one line why a report is not equivalent: where, why, and the values there."""
    if report.failure is not None:
        return reason_of(report)
    worst = max(report.stages, key=lambda stage: stage.verdict.severity)
    guilty = [seen for seen in worst.comparisons if seen.verdict is worst.verdict]
    if not guilty:
        return f"{worst.name}: {worst.reason}"
    return f"{worst.name} {_line(max(guilty, key=lambda seen: seen.rank))}"


def evidence_of(report: Report) -> str:
    """Return what an exception says: the verdict, the worst comparisons with their values, the notes."""
    lines = [f"{report.case.program} under {report.case.transform}: {report.verdict.value}"]
    for stage in report.stages:
        if stage.reason:
            lines.append(f"  {stage.name}: {stage.reason}")
        guilty = [seen for seen in stage.comparisons if seen.verdict is not Verdict.EQUIVALENT]
        lines += [
            f"  {stage.name} {_line(seen)}" for seen in sorted(guilty, key=lambda seen: seen.rank, reverse=True)[:5]
        ]
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def _line(seen: Comparison) -> str:
    if seen.worst is None:
        return f"{seen.path}: {seen.reason}"
    worst = seen.worst
    values = f"reference {worst.reference}, candidate {worst.candidate}, truth {worst.truth}"
    return f"{seen.path}: {seen.reason}; worst at {list(worst.index)}: {values}"
