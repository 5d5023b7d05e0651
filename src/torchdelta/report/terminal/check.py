"""A report on a terminal: the verdict first, then its stages, the worst leaves with their evidence, why, and notes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.case import VALUES
from torchdelta.records.comparison import Comparison, Worst
from torchdelta.records.report import Report, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import (
    MARK,
    STYLE,
    TABLE_COLUMNS,
    console_for_stdout,
    count,
    culprit_remarks,
    headline,
    labelled,
    number,
)

_ROWS_WHEN_EQUIVALENT = 4
_ROWS_OTHERWISE = 12
_REASONS = 5
_NOTES = 6


def print_report(report: Report, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the report; `verbose` shows every leaf, reason and note, the traceback and what it cost."""
    console = console or console_for_stdout()
    parts = [headline(report), *_stage_lines(report), *_evidence(report, width=console.width, verbose=verbose)]
    remarks = [
        *culprit_remarks(report.culprits, show_all=verbose),
        *_reduced(report),
        *_reasons(report, verbose=verbose),
        *_notes(report, verbose=verbose),
    ]
    if remarks:
        parts += [Text(), labelled(remarks)]
    if verbose:
        parts += _appendix(report)
    console.print(Group(*parts), highlight=False)


def _stage_lines(report: Report) -> Iterator[Text]:
    for stage in report.stages:
        yield Text.assemble(
            f"  {stage.name:<9}  ", (f"{stage.verdict.value:<12}", STYLE[stage.verdict]), f"  {_summary(stage)}"
        )
    ran = {stage.name for stage in report.stages}
    for name in report.case.stages:
        if name not in ran:
            yield Text(f"  {name:<9}  not run", style="dim")


def _summary(stage: Stage) -> str:
    if not stage.comparisons:
        return "nothing compared"
    total = len(stage.comparisons)
    leaves = count(total, "leaf", "leaves")
    counts = Counter(seen.verdict for seen in stage.comparisons)
    worst_first = sorted(counts, key=lambda verdict: verdict.severity, reverse=True)
    if guilty := [f"{counts[verdict]} {verdict.value}" for verdict in worst_first if verdict is not Verdict.EQUIVALENT]:
        return f"{leaves}, {', '.join(guilty)}"
    changed = sum(seen.measurement is not None and seen.measurement.mismatches > 0 for seen in stage.comparisons)
    return f"{leaves}, {total - changed if changed else 'all'} bitwise identical{_sight(stage)}"


def _sight(stage: Stage) -> str:
    """Say how small a relative error is seen, in the middle one of the leaves that were measured."""
    resolutions = [seen.resolution for seen in stage.comparisons if seen.measurement and seen.resolution]
    return f"; sees {statistics.median(resolutions):.1g}" if resolutions else ""


def _ranked(report: Report) -> list[tuple[str, Comparison]]:
    rows = [(stage.name, seen) for stage in report.stages for seen in stage.comparisons]
    return sorted(rows, key=lambda row: row[1].rank, reverse=True)


def _evidence(report: Report, *, width: int, verbose: bool) -> Iterator[RenderableType]:
    rows = [seen for _, seen in _ranked(report) if verbose or seen.measurement is not None]
    limit = _ROWS_WHEN_EQUIVALENT if report.verdict is Verdict.EQUIVALENT else _ROWS_OTHERWISE
    shown = rows if verbose else rows[:limit]
    if shown:
        yield Text()
        yield _table(shown) if width >= TABLE_COLUMNS else Group(*map(_entry, shown))
    if len(rows) > len(shown):
        yield Text(f"   and {len(rows) - len(shown)} more (--verbose)", style="dim")


def _table(rows: list[Comparison]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("leaf", overflow="fold")
    for name in ("error", "allowed", "at", "reference", "candidate", "truth"):
        table.add_column(name, justify="right", no_wrap=True)
    for seen in rows:
        worst = seen.worst
        table.add_row(
            _mark(seen),
            # as Text: a key such as torch.float32 in brackets would be taken for markup
            Text(seen.path),
            number(seen.error),
            number(seen.allowed),
            _index(worst) if worst else "",
            *(_values(worst) if worst else ()),
        )
    return table


def _entry(seen: Comparison) -> RenderableType:
    """Return one leaf on lines of its own, for a terminal too narrow for the table."""
    lines = [Text.assemble(seen.path, (f": error {number(seen.error)}, allowed {number(seen.allowed)}", "dim"))]
    if seen.worst is not None:
        reference, candidate, truth = _values(seen.worst)
        place = f"at [{_index(seen.worst)}] " if seen.worst.index else ""
        values = f"reference {reference}, candidate {candidate}, truth {truth}"
        lines.append(Text(place + values, style="dim"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    grid.add_row(_mark(seen), Group(*lines))
    return grid


def _index(worst: Worst) -> str:
    return ",".join(map(str, worst.index))


def _mark(seen: Comparison) -> Text:
    return Text(MARK[seen.verdict], style=STYLE[seen.verdict])


def _reduced(report: Report) -> Iterator[tuple[str, str]]:
    if (found := report.reduction) is not None:
        cost = f"{count(found.queries, 'query', 'queries')}, {found.seconds:.1f} s"
        doubt = "" if found.is_minimal else "; it may not be the smallest"
        yield "reduced", f"from {found.nodes_before} nodes to {found.nodes_after} in {cost}{doubt}"
    if report.repro is not None:
        shown = "failed again in a clean process" if report.repro.confirmed else "did NOT fail in a clean process"
        yield "repro", shown


def _reasons(report: Report, *, verbose: bool) -> Iterator[tuple[str, str]]:
    stages_of: dict[str, list[str]] = {}
    for stage in report.stages:
        if stage.reason:
            stages_of.setdefault(_opening(stage.reason), []).append(stage.name)
    for reason, names in stages_of.items():
        yield "why", f"{' and '.join(names)}: {reason}"
    if report.failure and report.failure.traceback and not verbose:
        yield "", "--verbose shows the traceback"
    guilty = [(stage, seen) for stage, seen in _ranked(report) if seen.verdict is not Verdict.EQUIVALENT]
    shown = guilty if verbose else guilty[:_REASONS]
    for stage_name, seen in shown:
        yield "why", f"{stage_name} {seen.path}: {seen.reason}"
    if len(guilty) > len(shown):
        yield "", f"and {len(guilty) - len(shown)} more (--verbose)"


def _notes(report: Report, *, verbose: bool) -> Iterator[tuple[str, str]]:
    notes = list(report.notes)
    excused = sorted({breach.clause for seen in report.comparisons for breach in seen.contract if breach.excused})
    if excused:
        where = "" if verbose else " (--verbose shows where)"
        notes.append(f"differs in {' and '.join(excused)}, which does not count here{where}")
    unasked, _, why = report.questions.semantic.partition(": ")
    if why and report.case.semantic and report.case.stages != (VALUES,) and report.failure is None:
        notes.append(f"float64 was {unasked} whether it is the same function: {why}")
    if graphs := report.graphs:
        captured, calls = count(graphs.captured, "graph"), count(graphs.transformed_calls, "transformed call")
        untransformed = f", {graphs.untransformed_calls} untransformed" if graphs.untransformed_calls else ""
        notes.append(f"{captured} captured, {calls}{untransformed}")
    shown = notes if verbose else notes[:_NOTES]
    yield from (("note", note) for note in shown)
    if len(notes) > len(shown):
        yield "", f"and {len(notes) - len(shown)} more (--verbose)"


def _appendix(report: Report) -> Iterator[Text]:
    for seen in report.comparisons:
        for breach in seen.contract:
            if breach.excused:
                yield Text(f"  {seen.path}: {breach}", style="dim")
    if report.failure and report.failure.traceback:
        yield Text("\n" + report.failure.traceback.rstrip() + "\n", style="dim")
    if report.cost is not None:
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in report.cost.seconds.items())
        yield Text(f"cost  {parts}; peak memory {report.cost.peak_bytes / 2**20:.0f} MiB", style="dim")


def _opening(text: str) -> str:
    """Return the first line, and the next where the first ends in a colon and so says nothing yet."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _values(worst: Worst) -> list[str]:
    """Return reference, candidate and truth with as many digits as it takes to tell the first two apart."""
    telling = (digits for digits in range(4, 18) if not _looks_same(worst, digits))
    digits = next(telling, 4)
    return [number(value, digits) for value in (worst.reference, worst.candidate, worst.truth)]


def _looks_same(worst: Worst, digits: int) -> bool:
    return number(worst.reference, digits) == number(worst.candidate, digits)
