"""A report on a terminal: the verdict first, then the worst tensors with their evidence, on one screen."""

from __future__ import annotations

import sys

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchdelta.records.comparison import Comparison, Scalar
from torchdelta.records.report import Report, Stage
from torchdelta.records.verdict import Verdict

_STYLE = {
    Verdict.EQUIVALENT: "green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.DIVERGED: "red",
    Verdict.TIMED_OUT: "magenta",
    Verdict.CRASHED: "magenta",
}
_MARK = {
    Verdict.EQUIVALENT: "=",
    Verdict.INCONCLUSIVE: "?",
    Verdict.DIVERGED: "≠",
    Verdict.TIMED_OUT: "!",
    Verdict.CRASHED: "!",
}
_ROWS_WHEN_EQUIVALENT = 5
_ROWS_OTHERWISE = 12
_NOTES = 6


def print_report(report: Report, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the report; `verbose` shows every tensor, every note, the traceback and what it cost."""
    # a pipe or a log file has no width to fold at
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console.print(Group(*_parts(report, verbose=verbose)), highlight=False)


def _parts(report: Report, *, verbose: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_headline(report), *(_stage_line(stage) for stage in report.stages)]
    if report.failure and verbose:
        parts.append(Padding(Text(report.failure.traceback.rstrip(), style="dim"), (1, 0, 0, 2)))
    rows = _worst_first(report)
    limit = _ROWS_WHEN_EQUIVALENT if report.verdict is Verdict.EQUIVALENT else _ROWS_OTHERWISE
    shown = rows if verbose else [row for row in rows if _is_worth_a_row(row[1])][:limit]
    if shown:
        parts.append(Padding(_table(shown), (1, 0, 0, 0)))
    guilty = [(stage, seen) for stage, seen in shown if seen.verdict is not Verdict.EQUIVALENT]
    for stage, seen in guilty if verbose else guilty[:3]:
        parts.append(Text.assemble(("why  ", "bold"), f"{stage} {seen.path}: {seen.reason}"))
    parts += _notes(report, verbose=verbose)
    if verbose:
        parts += _cost(report)
    return parts


def _headline(report: Report) -> Text:
    case = report.case
    return Text.assemble(
        (report.verdict.value, f"bold {_STYLE[report.verdict]}"),
        f"  {case.program} under {case.transform}",
        (f"  policy {case.policy}, seed {case.seed}, torch {report.environment.torch}", "dim"),
    )


def _stage_line(stage: Stage) -> Text:
    differing = sum(seen.verdict is not Verdict.EQUIVALENT for seen in stage.comparisons)
    changed = sum(bool(seen.measurement and seen.measurement.mismatches) for seen in stage.comparisons)
    total = len(stage.comparisons)
    if differing:
        said = f"{differing} of {_count(total, 'leaf', 'leaves')}"
    elif total:
        said = f"{_count(total, 'leaf', 'leaves')}, {total - changed} bitwise identical"
    else:
        said = "nothing compared"
    reason = f": {stage.reason.splitlines()[0]}" if stage.reason else ""
    return Text.assemble(f"  {stage.name:<10}", (stage.verdict.value, _STYLE[stage.verdict]), f"  {said}{reason}")


def _worst_first(report: Report) -> list[tuple[str, Comparison]]:
    rows = [(stage.name, seen) for stage in report.stages for seen in stage.comparisons]
    return sorted(rows, key=lambda row: (-row[1].verdict.severity, -row[1].ratio))


def _is_worth_a_row(seen: Comparison) -> bool:
    return seen.verdict is not Verdict.EQUIVALENT or seen.measurement is not None


def _table(rows: list[tuple[str, Comparison]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("leaf", overflow="fold", min_width=16)
    for name in ("error", "allowed", "at", "reference", "candidate", "truth"):
        table.add_column(name, justify="right", overflow="fold")
    for _, seen in rows:
        worst = seen.worst
        table.add_row(
            Text(_MARK[seen.verdict], style=_STYLE[seen.verdict]),
            seen.path,
            _number(seen.error),
            _number(seen.allowed),
            ",".join(map(str, worst.index)) if worst else "",
            _number(worst.reference) if worst else "",
            _number(worst.candidate) if worst else "",
            _number(worst.truth) if worst else "",
        )
    return table


def _notes(report: Report, *, verbose: bool) -> list[Text]:
    notes = list(report.notes)
    excused = sorted({breach.clause for seen in report.comparisons for breach in seen.contract if breach.excused})
    if excused:
        notes.append(f"differs in {', '.join(excused)}, which does not count here (--verbose shows where)")
    if report.graphs is not None:
        graphs = report.graphs
        captured, calls = _count(graphs.captured, "graph"), _count(graphs.transformed_calls, "transformed call")
        notes.append(f"{captured} captured, {calls}")
    left_out = 0 if verbose else max(len(notes) - _NOTES, 0)
    shown = notes[: len(notes) - left_out]
    lines = [Text.assemble(("note ", "bold"), note) for note in shown]
    if left_out:
        lines.append(Text(f"     and {left_out} more notes (--verbose)", style="dim"))
    return lines


def _cost(report: Report) -> list[Text]:
    lines = [
        Text(f"  {seen.path}: {breach}", style="dim")
        for seen in report.comparisons
        for breach in seen.contract
        if breach.excused
    ]
    if report.cost is not None:
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in report.cost.seconds.items())
        lines.append(Text(f"cost {parts}; peak memory {report.cost.peak_bytes / 2**20:.0f} MiB", style="dim"))
    return lines


def _number(value: Scalar | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
