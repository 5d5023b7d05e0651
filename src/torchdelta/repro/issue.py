"""The text of an issue: what is wrong, where it was seen, the evidence, and the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict
from torchdelta.repro.asked import Asked
from torchdelta.repro.finding import Finding
from torchdelta.repro.summary import EXITS, details, headline

SHOWN = 5
"""Leaves that a table of evidence holds."""


def issue_text(finding: Finding, path: Path, *, data: bool = True) -> str:
    """Return text for a bug tracker about a script that was written to `path`, with the user's values or without."""
    path = Path(path)
    asked = Asked(finding, path, data=data)
    environment = finding.report.environment
    parts = [
        f"# {headline(asked.finding, asked.applied, asked.divergence)}",
        details(asked),
        "## Evidence",
        "\n".join(_evidence(finding, has_values=not asked.is_replaced)),
        "## Reproduce",
        f"{EXITS}{_beside(path)}",
        f"```python\n{path.read_text(encoding='utf-8').rstrip()}\n```",
        "## Versions",
        f"- torch {environment.torch}\n- Python {environment.python}\n- {environment.platform}",
    ]
    return "\n\n".join(parts) + "\n"


def _evidence(finding: Finding, *, has_values: bool) -> Iterator[str]:
    report = finding.report
    if report.failure is not None:
        said = report.failure.message.rstrip()[-2000:]
        yield f"```\n{report.failure.type or report.failure.kind}: {said}\n```"
        return
    wrong = [seen for seen in report.comparisons if seen.verdict is Verdict.DIVERGED]
    yield "| where | eager | candidate | float64 | error | noise | why |"
    yield "|---|---|---|---|---|---|---|"
    for seen in sorted(wrong, key=lambda seen: seen.rank, reverse=True)[:SHOWN]:
        yield _row(seen if has_values else replace(seen, worst=None))
    if len(wrong) > SHOWN:
        yield f"\nand {len(wrong) - SHOWN} more."


def _row(seen: Comparison) -> str:
    worst = seen.worst
    where = f"`{seen.path}{list(worst.index) if worst else ''}`"
    values = (worst.reference, worst.candidate, worst.truth) if worst else (None, None, None)
    numbers = ("" if number is None else f"{number:.3g}" for number in (seen.error, seen.noise))
    cells = (
        where,
        *("" if value is None else str(value) for value in values),
        *numbers,
        seen.reason.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _beside(path: Path) -> str:
    tensors = path.with_suffix(".pt")
    return f" Its tensors are in {tensors.name}, which belongs beside it." if tensors.exists() else ""
