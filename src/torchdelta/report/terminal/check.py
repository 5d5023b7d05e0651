"""The report of a check on a terminal.

The verdict comes first, then a line for each stage, the worst leaves with their numbers, the reasons, and notes:

    diverged  model under inductor
      forward    diverged      3 leaves, 1 diverged
    ≠  outputs.loss  error 0.3  allowed 1e-06 …
    why   forward outputs.loss: …

Start with `print_report`; each function below it builds one of these parts.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.case import VALUES
from torchdelta.records.comparison import Comparison, Worst
from torchdelta.records.printable import printable
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
    marked_lines,
    number,
    plain_table,
    remark_table,
)

_ROWS_WHEN_EQUIVALENT = 4
_ROWS_OTHERWISE = 12
_REASONS = 5
_NOTES = 6


def print_report(report: Report, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the report; `verbose` shows every leaf, reason and note, the traceback and the cost.

    Without a console it is printed on stdout.
    """
    console = console or console_for_stdout()
    report = printable(report)
    parts = [headline(report), *_stage_lines(report), *_comparison_parts(report, width=console.width, verbose=verbose)]
    remarks = [
        *culprit_remarks(report.culprits, show_all=verbose),
        *_reduction_remarks(report),
        *_reason_remarks(report, verbose=verbose),
        *_note_remarks(report, verbose=verbose),
    ]
    if remarks:
        parts += [Text(), remark_table(remarks)]
    if verbose:
        parts += _appendix(report)
    console.print(Group(*parts), highlight=False)


def _stage_lines(report: Report) -> Iterator[Text]:
    """Yield a line for each stage: its verdict and a summary, or that it did not run.

    Stages that the case asks for and that did not run come last.
    """
    for stage in report.stages:
        yield Text.assemble(
            f"  {stage.name:<9}  ", (f"{stage.verdict.value:<12}", STYLE[stage.verdict]), f"  {_stage_summary(stage)}"
        )
    ran = {stage.name for stage in report.stages}
    for name in report.case.stages:
        if name not in ran:
            yield Text(f"  {name:<9}  not run", style="dim")


def _stage_summary(stage: Stage) -> str:
    """Return a text: how many leaves were compared, and how many of them have which verdict other than equivalent.

    If all are equivalent, it says instead how many are bitwise identical, and the resolution. Leaves without a
    measurement count as identical. Without comparisons the text is "nothing compared".
    """
    if not stage.comparisons:
        return "nothing compared"
    total = len(stage.comparisons)
    leaves = count(total, "leaf", "leaves")
    counts = Counter(comparison.verdict for comparison in stage.comparisons)
    worst_first = sorted(counts, key=lambda verdict: verdict.severity, reverse=True)
    if problems := [
        f"{counts[verdict]} {verdict.value}" for verdict in worst_first if verdict is not Verdict.EQUIVALENT
    ]:
        return f"{leaves}, {', '.join(problems)}"
    changed_count = sum(
        comparison.measurement is not None and comparison.measurement.mismatches > 0 for comparison in stage.comparisons
    )
    return f"{leaves}, {total - changed_count if changed_count else 'all'} bitwise identical{_resolution_text(stage)}"


def _resolution_text(stage: Stage) -> str:
    """Return a text with the smallest relative error that would have been seen, as the median of the measured leaves.

    The text is empty if no leaf has one.
    """
    resolutions = [
        comparison.resolution for comparison in stage.comparisons if comparison.measurement and comparison.resolution
    ]
    return f"; sees {statistics.median(resolutions):.1g}" if resolutions else ""


def _worst_first(report: Report) -> list[tuple[str, Comparison]]:
    """Return all comparisons with the names of their stages, the worst first."""
    rows = [(stage.name, comparison) for stage in report.stages for comparison in stage.comparisons]
    return sorted(rows, key=lambda row: row[1].rank, reverse=True)


def _comparison_parts(report: Report, *, width: int, verbose: bool) -> Iterator[RenderableType]:
    """Yield the worst comparisons of all stages, as a table or on lines of their own, and how many were cut off.

    The table needs a `width` of at least TABLE_COLUMNS. Without `verbose`, comparisons without a measurement are left
    out and not counted, and only the first few others are shown: `_ROWS_WHEN_EQUIVALENT` if the report is equivalent,
    otherwise `_ROWS_OTHERWISE`. Yield nothing if no comparison is left.
    """
    rows = [comparison for _, comparison in _worst_first(report) if verbose or comparison.measurement is not None]
    limit = _ROWS_WHEN_EQUIVALENT if report.verdict is Verdict.EQUIVALENT else _ROWS_OTHERWISE
    shown = rows if verbose else rows[:limit]
    if shown:
        yield Text()
        yield _table(shown) if width >= TABLE_COLUMNS else Group(*map(_comparison_lines, shown))
    if len(rows) > len(shown):
        yield Text(f"   and {len(rows) - len(shown)} more (--verbose)", style="dim")


def _table(rows: list[Comparison]) -> Table:
    """Return a table with a row for each comparison: error, allowed error, and the worst element with its values.

    The values are those of reference, candidate and truth; the cells are empty if there is no worst element.
    """
    table = plain_table()
    table.add_column("")
    table.add_column("leaf", overflow="fold")
    for name in ("error", "allowed", "at", "reference", "candidate", "truth"):
        table.add_column(name, justify="right", no_wrap=True)
    for comparison in rows:
        worst = comparison.worst
        table.add_row(
            _mark(comparison),
            # as Text: a key such as torch.float32 in brackets would be taken for markup
            Text(comparison.path),
            number(comparison.error),
            number(comparison.allowed),
            _index(worst) if worst else "",
            *(_three_values(worst) if worst else ()),
        )
    return table


def _comparison_lines(comparison: Comparison) -> RenderableType:
    """Return one comparison on lines of its own, for a terminal that is too narrow for the table.

    The first line has path, error and allowed error, and the second the worst element with its values, if there is one.
    """
    lines = [
        Text.assemble(
            comparison.path, (f": error {number(comparison.error)}, allowed {number(comparison.allowed)}", "dim")
        )
    ]
    if comparison.worst is not None:
        reference, candidate, truth = _three_values(comparison.worst)
        place = f"at [{_index(comparison.worst)}] " if comparison.worst.index else ""
        values = f"reference {reference}, candidate {candidate}, truth {truth}"
        lines.append(Text(place + values, style="dim"))
    return marked_lines(_mark(comparison), lines)


def _index(worst: Worst) -> str:
    """Return the index of the worst element as text, such as `1,2`."""
    return ",".join(map(str, worst.index))


def _mark(comparison: Comparison) -> Text:
    """Return the mark of a comparison's verdict, in the verdict's colour."""
    return Text(MARK[comparison.verdict], style=STYLE[comparison.verdict])


def _reduction_remarks(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (label, text) on how far the program was reduced, and on whether the repro failed again.

    Yield nothing for a result that the report does not have.
    """
    if (reduction := report.reduction) is not None:
        cost = f"{count(reduction.queries, 'query', 'queries')}, {reduction.seconds:.1f} s"
        doubt = "" if reduction.is_minimal else "; it may not be the smallest"
        yield "reduced", f"from {reduction.nodes_before} nodes to {reduction.nodes_after} in {cost}{doubt}"
    if report.repro is not None:
        outcome = "failed again in a clean process" if report.repro.confirmed else "did NOT fail in a clean process"
        yield "repro", outcome


def _reason_remarks(report: Report, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield the reasons of stages, then those of the leaves that are not equivalent, the worst first, as (label, text).

    Of a stage's reason only the first statement is shown (`_first_statement`), and stages with the same one share a
    remark. Without `verbose` there are at most `_REASONS` leaves, with the number of those left out, and a hint if
    there is a traceback.
    """
    stages_of: dict[str, list[str]] = {}
    for stage in report.stages:
        if stage.reason:
            stages_of.setdefault(_first_statement(stage.reason), []).append(stage.name)
    for reason, names in stages_of.items():
        yield "why", f"{' and '.join(names)}: {reason}"
    if report.failure and report.failure.traceback and not verbose:
        yield "", "--verbose shows the traceback"
    problems = [
        (stage, comparison)
        for stage, comparison in _worst_first(report)
        if comparison.verdict is not Verdict.EQUIVALENT
    ]
    shown = problems if verbose else problems[:_REASONS]
    for stage_name, comparison in shown:
        yield "why", f"{stage_name} {comparison.path}: {comparison.reason}"
    if len(problems) > len(shown):
        yield "", f"and {len(problems) - len(shown)} more (--verbose)"


def _note_remarks(report: Report, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield the notes of the report, and notes on excused clauses, the semantic question and captured graphs.

    Each is (label, text). The semantic question has a note only if a check that wanted it says why it has no answer,
    and the candidate did not fail. Without `verbose` only the first `_NOTES` are shown, with the number of the others.
    """
    notes = list(report.notes)
    excused_clauses = sorted(
        {breach.clause for comparison in report.comparisons for breach in comparison.contract if breach.excused}
    )
    if excused_clauses:
        where = "" if verbose else " (--verbose shows where)"
        notes.append(f"differs in {' and '.join(excused_clauses)}, which does not count here{where}")
    answer, _, why = report.questions.semantic.partition(": ")
    if why and report.case.semantic and report.case.stages != (VALUES,) and report.failure is None:
        notes.append(f"float64 was {answer} whether it is the same function: {why}")
    if graphs := report.graphs:
        captured, calls = count(graphs.captured, "graph"), count(graphs.transformed_calls, "transformed call")
        untransformed = f", {graphs.untransformed_calls} untransformed" if graphs.untransformed_calls else ""
        notes.append(f"{captured} captured, {calls}{untransformed}")
    shown = notes if verbose else notes[:_NOTES]
    yield from (("note", note) for note in shown)
    if len(notes) > len(shown):
        yield "", f"and {len(notes) - len(shown)} more (--verbose)"


def _appendix(report: Report) -> Iterator[Text]:
    """Yield the parts that only `verbose` shows: excused breaches, the traceback and the cost, if there are any."""
    for comparison in report.comparisons:
        for breach in comparison.contract:
            if breach.excused:
                yield Text(f"  {comparison.path}: {breach}", style="dim")
    if report.failure and report.failure.traceback:
        yield Text("\n" + report.failure.traceback.rstrip() + "\n", style="dim")
    if report.cost is not None:
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in report.cost.seconds.items())
        yield Text(f"cost  {parts}; peak memory {report.cost.peak_bytes / 2**20:.0f} MiB", style="dim")


def _first_statement(text: str) -> str:
    """Return the first line of a text that is not blank; if it ends in a colon, together with the next such line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _three_values(worst: Worst) -> list[str]:
    """Return reference, candidate and truth as text, with just enough digits to tell the first two apart.

    These are 4 to 17 digits; they are 4 if no number of digits is enough.
    """
    sufficient = (digits for digits in range(4, 18) if not _is_same_text(worst, digits))
    digits = next(sufficient, 4)
    return [number(value, digits) for value in (worst.reference, worst.candidate, worst.truth)]


def _is_same_text(worst: Worst, digits: int) -> bool:
    """Tell whether reference and candidate look the same with that many digits."""
    return number(worst.reference, digits) == number(worst.candidate, digits)
