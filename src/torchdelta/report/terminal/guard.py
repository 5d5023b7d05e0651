"""The summary of a guarded run (`torchdelta run`) on one screen.

It has the worst verdict, how many graphs and passes were checked, each finding with its culprit, and notes. Start with
`print_guard_summary`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchdelta.records.guard import GuardedGraphRecord, GuardSummary
from torchdelta.records.passes import PassFinding, PassSummary
from torchdelta.records.printable import printable
from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import (
    MARK,
    STYLE,
    Remark,
    console_for,
    count,
    culprit_remarks,
    relative_path,
    remark_table,
)

_MOST_COLUMNS = 80
_MOST_FINDINGS = 4
_MOST_REMARKS = 5
"""At most so many remarks of one kind, so that the summary fits on a screen."""


def print_guard_summary(
    summary: GuardSummary, watched: PassSummary | None = None, console: Console | None = None
) -> None:
    """Print the summary of a run; by default on stderr, because stdout belongs to the user's script.

    `watched` is the summary of inductor's passes, if they were watched. Of many findings or remarks only the first few
    are printed.
    """
    # the script may have replaced sys.stderr
    console = console or console_for_summary(sys.__stderr__)
    summary, watched = printable(summary), printable(watched)
    parts: list[RenderableType] = [_headline(summary, watched), _indent(_count_remarks(summary, watched))]
    parts += _first_findings([_finding_part(graph) for graph in summary.findings], _index_path(summary))
    if watched is not None:
        parts += _first_findings([_pass_part(finding) for finding in watched.findings], "")
    if remarks := [*_closing_remarks(summary, watched)]:
        parts += [Text(), _indent(remarks)]
    console.print(Group(*parts), highlight=False)


def console_for_summary(stream: TextIO | None) -> Console:
    """Return a console on a stream, `_MOST_COLUMNS` wide, or as wide as the terminal if that is narrower."""
    width = console_for(stream).width if stream is not None and stream.isatty() else _MOST_COLUMNS
    return console_for(stream, width=min(_MOST_COLUMNS, width))


def _headline(summary: GuardSummary, watched: PassSummary | None) -> Text:
    """Return a line with the worst verdict of all graphs and passes; a pass with a finding counts as diverged.

    Without any verdict, the line says that no pass changes what is computed, if passes were checked, or that nothing
    was checked.
    """
    passes = [Verdict.DIVERGED for _ in watched.findings] if watched is not None else []
    verdicts = [*map(Verdict, summary.verdicts), *passes]
    worst = max(verdicts, key=lambda verdict: verdict.severity, default=None)
    if worst is None and watched is not None and watched.checked:
        return Text.assemble(("torchdelta run", "bold"), "  no pass changes what is computed")
    if worst is None:
        return Text.assemble(("torchdelta run  nothing was checked", "bold yellow"))
    return Text.assemble(("torchdelta run  ", "bold"), (worst.value, f"bold {STYLE[worst]}"))


def _count_remarks(summary: GuardSummary, watched: PassSummary | None) -> Iterator[Remark]:
    """Yield how many graphs were checked with which verdicts, why others were not, and how many passes were watched.

    Of the reasons only the most frequent few are shown. Without graphs there is a remark that nothing was compiled,
    unless passes were watched.
    """
    if summary.graphs or watched is None:
        verdicts = ", ".join(f"{number} {name}" for name, number in summary.verdicts.items())
        checked = f", {summary.checked} checked{f': {verdicts}' if verdicts else ''}" if summary.graphs else ""
        yield "graphs", f"{summary.graphs} seen{checked}" if summary.graphs else "none: nothing in it was compiled"
    reasons = sorted(summary.unchecked.items(), key=lambda item: -item[1])
    yield from _limit_remarks(
        [("not checked" if place == 0 else "", f"{number}: {reason}") for place, (reason, number) in enumerate(reasons)]
    )
    if watched is not None:
        yield "passes", _passes_text(watched)


def _passes_text(watched: PassSummary) -> str:
    """Return a text: how many passes ran over how many graphs, and how many change results; or that no pass ran."""
    if not watched.passes:
        return "none: inductor ran no pass"
    finding_count = len(watched.findings)
    graph_text = f"{count(watched.graphs, 'graph')} ({watched.changed} changed, {watched.checked} checked)"
    result = (
        f"{count(finding_count, 'pass changes', 'passes change')} what is computed"
        if finding_count
        else "none changes what is computed"
    )
    return f"{watched.passes} over {graph_text}: {result}"


def _finding_part(graph: GuardedGraphRecord) -> RenderableType:
    """Return a checked graph's verdict, its culprit or else its origin and reason, and where its report and repro are.

    The verdict, which must not be None, comes with the call that it is about. Other parts that the graph does not have
    are left out.
    """
    assert graph.verdict is not None
    when = (
        "when it was compiled"
        if graph.call == 0
        else "on its first call"
        if graph.call == 1
        else f"on call {graph.call}"
    )
    subject = f"  graph {graph.number} {when}: {graph.backend}, {graph.level}, {count(graph.nodes, 'node')}"
    remarks: list[Remark] = []
    if graph.culprit is None:
        remarks += [("from", relative_path(graph.name))] if graph.name else []
    remarks += _reason_remarks(graph.culprit, graph.reason)
    if graph.directory is not None:
        remarks.append(("report", relative_path(graph.directory)))
    if graph.repro is not None:
        remarks.append(("repro", relative_path(graph.repro)))
    return Group(_verdict_line(graph.verdict, subject), _indent(remarks))


def _pass_part(finding: PassFinding) -> RenderableType:
    """Return a pass that changes what is computed: a line with the pass, and its culprit or else its reason."""
    subject = f"  pass {finding.name}, {finding.phase}, of {finding.graph}"
    return Group(_verdict_line(Verdict.DIVERGED, subject), _indent(_reason_remarks(finding.culprit, finding.reason)))


def _verdict_line(verdict: Verdict, subject: str) -> Text:
    """Return a line with the mark and the name of a verdict in its colour, and then the subject."""
    return Text.assemble((f"{MARK[verdict]} {verdict.value}", STYLE[verdict]), subject)


def _reason_remarks(culprit: Culprit | None, reason: str) -> list[Remark]:
    """Return the remarks on the culprit; without one, a remark with the reason, or nothing if that is empty."""
    if culprit is None:
        return [("why", reason)] if reason else []
    return [*culprit_remarks([culprit], show_all=True)]


def _closing_remarks(summary: GuardSummary, watched: PassSummary | None) -> Iterator[Remark]:
    """Yield the first few notes on graphs and passes, the path of the index of findings, and the time of the checks.

    Of further notes only the number is shown. The path and the time are left out if there are none.
    """
    notes = [*summary.notes, *(watched.notes if watched is not None else ())]
    yield from _limit_remarks([("note", note) for note in notes])
    if summary.out is not None:
        yield "all of it", _index_path(summary)
    if summary.seconds:
        yield "cost", f"checks took {summary.seconds:.1f} s"


def _index_path(summary: GuardSummary) -> str:
    """Return the path of the index of findings, relative to the working directory if below it; empty without `out`."""
    return relative_path(os.path.join(summary.out, "index.jsonl")) if summary.out is not None else ""


def _limit_remarks(remarks: Sequence[Remark]) -> Iterator[Remark]:
    """Yield the first `_MOST_REMARKS` remarks, and one that says how many more there are, if there are."""
    yield from remarks[:_MOST_REMARKS]
    if len(remarks) > _MOST_REMARKS:
        yield "", f"and {len(remarks) - _MOST_REMARKS} more"


def _first_findings(findings: Sequence[RenderableType], where: str) -> Iterator[RenderableType]:
    """Yield the first `_MOST_FINDINGS` findings, each after an empty line, and how many more there are.

    `where` is the path at which the others are, or empty.
    """
    for finding in findings[:_MOST_FINDINGS]:
        yield Text()
        yield finding
    if len(findings) > _MOST_FINDINGS:
        yield Text(f"and {len(findings) - _MOST_FINDINGS} more{f': {where}' if where else ''}", style="dim")


def _indent(remarks: Iterator[Remark] | Sequence[Remark]) -> RenderableType:
    """Return the remarks as a table, moved two columns to the right."""
    return Padding(remark_table(remarks), (0, 0, 0, 2), expand=False)
