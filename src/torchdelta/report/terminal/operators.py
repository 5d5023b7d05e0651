"""Results about operators on a terminal: the probes of one operator, or the verdicts of a whole sweep.

Start with `print_operator` for one operator and `print_sweep` for torch's database of operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.operators import OpReport, Probe, Sweep, SweepRow
from torchdelta.records.printable import printable
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import MARK, STYLE, console_for_stdout, count, plain_table, remark_table

_WORST_FIRST = sorted(Verdict, key=lambda verdict: verdict.severity, reverse=True)
_MOST_REASONS = 8
_LONGEST_REASON = 160


def print_operator(report: OpReport, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the result of each probe of an operator; `verbose` lists the probes that were not asked, and why."""
    console = console or console_for_stdout()
    console.print(Group(*_operator_parts(printable(report), verbose=verbose)), highlight=False)


def print_sweep(sweep: Sweep, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the verdicts of a sweep over operators; `verbose` lists those that are inconclusive."""
    console = console or console_for_stdout()
    console.print(Group(*_sweep_parts(printable(sweep), verbose=verbose)), highlight=False)


def _operator_parts(report: OpReport, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield the parts in order: verdict and call, torch's version and the seconds taken, and the lines of each probe.

    A probe has a line, and one more for each line of its remedy. Then come the probes that were not asked, and notes.
    `verbose` lists the probes that were not asked, and why, and shows reasons in full; otherwise only the number of
    those probes and the first line of each reason are shown.
    """
    verdict = (report.verdict.value, f"bold {STYLE[report.verdict]}")
    yield Text.assemble(verdict, f"  {report.op}({', '.join(report.arguments)})")
    yield Text(f"  torch {report.environment.torch}, {report.seconds:.1f} s", style="dim")
    width = max((len(probe.name) for probe in report.probes), default=0)
    for probe in report.probes:
        yield from _probe_lines(probe, width, verbose=verbose)
    if verbose and report.unasked:
        yield Text()
        yield remark_table(("not asked", f"{name}: {why}") for name, why in report.unasked.items())
    elif report.unasked:
        yield Text(f"  {count(len(report.unasked), 'probe')} not asked (--verbose)", style="dim")
    if report.notes:
        yield Text()
        yield remark_table(("note", note) for note in report.notes)


def _probe_lines(probe: Probe, width: int, *, verbose: bool) -> Iterator[Text]:
    """Yield a line with the verdict's mark, the name and the reason of a probe, and a line for each line of its remedy.

    The name is padded to `width`. Without `verbose` only the first line of the reason is shown, cut off if it is long.
    """
    reason = probe.reason if verbose else _first_line(probe.reason)
    mark = (MARK[probe.verdict], STYLE[probe.verdict])
    style = "dim" if probe.verdict is Verdict.EQUIVALENT else ""
    yield Text.assemble("  ", mark, f" {probe.name:<{width}}", (f"  {reason}" if reason else "", style))
    for line in probe.remedy.splitlines():
        yield Text(f"    {' ' * width}  → {line}", style="cyan")


def _sweep_parts(sweep: Sweep, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield the parts in order: verdict, settings, tables by dtype and by probe, failures, inconclusive ones, notes.

    The notes begin with the samples that were left out. `verbose` lists inconclusive operators one by one.
    """
    operators = len({each.op for each in sweep.swept})
    yield Text.assemble(
        (sweep.verdict.value, f"bold {STYLE[sweep.verdict]}"),
        f"  {count(operators, 'operator')} of torch's database, {_swept_count(sweep)} with a dtype",
    )
    settings = ", ".join(f"{name} {value}" for name, value in sweep.words.items() if value and name != "dtypes")
    yield Text(f"  {settings}, torch {sweep.environment.torch}, {sweep.seconds:.0f} s", style="dim")
    if sweep.swept:
        yield Text()
        yield _table("dtype", _verdicts_by_dtype(sweep))
        yield Text()
        yield _table("probe", _verdicts_by_probe(sweep))
    yield from _failure_lines(sweep.swept)
    yield from _undecided_parts(sweep.swept, verbose=verbose)
    if remarks := [("note", note) for note in (*_skipped_samples(sweep.swept), *sweep.notes)]:
        yield Text()
        yield remark_table(remarks)


def _swept_count(sweep: Sweep) -> str:
    """Return how many rows a sweep has, as text; if it ended early, also out of how many."""
    done = len(sweep.swept)
    return f"{done}" if done == sweep.total else f"{done} of {sweep.total}"


def _verdicts_by_dtype(sweep: Sweep) -> Iterator[tuple[str, Counter[Verdict]]]:
    """Yield (dtype, counts) for each dtype: how many rows of a sweep have each verdict; then ("all", counts)."""
    for dtype in dict.fromkeys(each.dtype for each in sweep.swept):
        yield dtype, sweep.by_verdict(dtype)
    yield "all", sweep.by_verdict()


def _verdicts_by_probe(sweep: Sweep) -> Iterator[tuple[str, Counter[Verdict]]]:
    """Yield (probe, counts) for each probe: how many rows (an operator in a dtype) have each verdict for it."""
    counts: dict[str, Counter[Verdict]] = {}
    for each in sweep.swept:
        for probe, verdict in each.probes.items():
            counts.setdefault(probe, Counter())[verdict] += 1
    yield from counts.items()


def _table(label: str, rows: Iterable[tuple[str, Mapping[Verdict, int]]]) -> Table:
    """Return a table with a row for each (name, verdict counts): the total, and the number of each verdict.

    `label` is the heading of the column of names.
    """
    table = plain_table()
    table.add_column(label, overflow="fold")
    for name in ("total", *(verdict.value.replace("_", " ") for verdict in Verdict)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, counts in rows:
        numbers = [(counts.get(verdict, 0), STYLE[verdict]) for verdict in Verdict]
        cells = [Text(str(number), style=style if number else "dim") for number, style in numbers]
        table.add_row(Text(name), Text(str(sum(counts.values()))), *cells)
    return table


def _failure_lines(swept: Sequence[SweepRow]) -> Iterator[RenderableType]:
    """Yield a line per operator and dtype that failed, the worst verdict first, each verdict after an empty line."""
    for verdict in _WORST_FIRST:
        failures = [each for each in swept if each.verdict is verdict]
        if verdict.is_failure and failures:
            yield Text()
            yield from map(_sweep_line, failures)


def _undecided_parts(swept: Sequence[SweepRow], *, verbose: bool) -> Iterator[RenderableType]:
    """Yield the inconclusive operators one by one if `verbose`, otherwise the most frequent reasons with their numbers.

    The reasons are followed by the number of other operators, and a hint at `--verbose`. Yield nothing if none is
    inconclusive.
    """
    undecided = [each for each in swept if each.verdict is Verdict.INCONCLUSIVE]
    if not undecided:
        return
    yield Text()
    if verbose:
        yield from map(_sweep_line, undecided)
        return
    reasons = Counter(f"{each.probe or 'samples'}: {_first_line(each.reason)}" for each in undecided)
    shown = reasons.most_common(_MOST_REASONS)
    yield remark_table((f"{number}×", Text(reason)) for reason, number in shown)
    hidden = len(undecided) - sum(number for _, number in shown)
    more = f"and {hidden} others are inconclusive; " if hidden else ""
    yield Text(f"{more}--verbose shows which", style="dim")


def _sweep_line(each: SweepRow) -> Text:
    """Return one line: the verdict's mark, the operator, its dtype, the probe, the sample and the reason.

    Only the first line of the reason is shown; without a probe the line says "its samples".
    """
    where = f" on {each.sample}" if each.sample else ""
    return Text.assemble(
        (f"{MARK[each.verdict]} ", STYLE[each.verdict]),
        (f"{each.op} {each.dtype}", "bold"),
        f"  {each.probe or 'its samples'}{where}: {_first_line(each.reason)}",
    )


def _skipped_samples(swept: Sequence[SweepRow]) -> Iterator[str]:
    """Yield a text for each reason to leave out samples, with their number, and one on samples that eager rejects."""
    reasons: Counter[str] = Counter()
    for each in swept:
        reasons.update(each.left_out)
    for why, number in reasons.items():
        yield f"{count(number, 'sample')} left out: {why}"
    if rejected := sum(each.unasked for each in swept):
        yield f"{count(rejected, 'sample')} not asked, because eager itself rejects them"


def _first_line(reason: str) -> str:
    """Return the first line of a reason that is not empty, cut off if it is long."""
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "")
    return first if len(first) <= _LONGEST_REASON else f"{first[:_LONGEST_REASON]}…"
