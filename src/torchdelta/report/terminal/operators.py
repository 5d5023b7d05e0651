"""Operators on a terminal: what each probe of one found, and how many of a sweep ended how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.operators import OpReport, Probe, Sweep, SweepRow
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import MARK, STYLE, console_for_stdout, count, labelled

_WORST_FIRST = sorted(Verdict, key=lambda verdict: verdict.severity, reverse=True)
_REASONS = 8
_REASON_LETTERS = 160


def print_operator(report: OpReport, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print what was found out about an operator; `verbose` shows what was not asked, and why."""
    console = console or console_for_stdout()
    console.print(Group(*_operator(report, verbose=verbose)), highlight=False)


def print_sweep(sweep: Sweep, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print how a sweep ended; `verbose` lists what is inconclusive."""
    console = console or console_for_stdout()
    console.print(Group(*_sweep(sweep, verbose=verbose)), highlight=False)


def _operator(report: OpReport, *, verbose: bool) -> Iterator[RenderableType]:
    verdict = (report.verdict.value, f"bold {STYLE[report.verdict]}")
    yield Text.assemble(verdict, f"  {report.op}({', '.join(report.arguments)})")
    yield Text(f"  torch {report.environment.torch}, {report.seconds:.1f} s", style="dim")
    width = max((len(probe.name) for probe in report.probes), default=0)
    for probe in report.probes:
        yield from _probe(probe, width, verbose=verbose)
    if verbose and report.unasked:
        yield Text()
        yield labelled(("not asked", f"{name}: {why}") for name, why in report.unasked.items())
    elif report.unasked:
        yield Text(f"  {count(len(report.unasked), 'probe')} not asked (--verbose)", style="dim")
    if report.notes:
        yield Text()
        yield labelled(("note", note) for note in report.notes)


def _probe(probe: Probe, width: int, *, verbose: bool) -> Iterator[Text]:
    reason = probe.reason if verbose else _opening(probe.reason)
    mark = (MARK[probe.verdict], STYLE[probe.verdict])
    style = "dim" if probe.verdict is Verdict.EQUIVALENT else ""
    yield Text.assemble("  ", mark, f" {probe.name:<{width}}", (f"  {reason}" if reason else "", style))
    for line in probe.remedy.splitlines():
        yield Text(f"    {' ' * width}  → {line}", style="cyan")


def _sweep(sweep: Sweep, *, verbose: bool) -> Iterator[RenderableType]:
    operators = len({each.op for each in sweep.swept})
    yield Text.assemble(
        (sweep.verdict.value, f"bold {STYLE[sweep.verdict]}"),
        f"  {count(operators, 'operator')} of torch's database, {_of(sweep)} with a dtype",
    )
    asked = ", ".join(f"{name} {value}" for name, value in sweep.words.items() if value and name != "dtypes")
    yield Text(f"  {asked}, torch {sweep.environment.torch}, {sweep.seconds:.0f} s", style="dim")
    if sweep.swept:
        yield Text()
        yield _table("dtype", _by_dtype(sweep))
        yield Text()
        yield _table("probe", _by_probe(sweep))
    yield from _failures(sweep.swept)
    yield from _undecided(sweep.swept, verbose=verbose)
    if remarks := [("note", note) for note in (*_left_out(sweep.swept), *sweep.notes)]:
        yield Text()
        yield labelled(remarks)


def _of(sweep: Sweep) -> str:
    done = len(sweep.swept)
    return f"{done}" if done == sweep.total else f"{done} of {sweep.total}"


def _by_dtype(sweep: Sweep) -> Iterator[tuple[str, Counter[Verdict]]]:
    for dtype in dict.fromkeys(each.dtype for each in sweep.swept):
        yield dtype, sweep.by_verdict(dtype)
    yield "all", sweep.by_verdict()


def _by_probe(sweep: Sweep) -> Iterator[tuple[str, Counter[Verdict]]]:
    seen: dict[str, Counter[Verdict]] = {}
    for each in sweep.swept:
        for probe, verdict in each.probes.items():
            seen.setdefault(probe, Counter())[verdict] += 1
    yield from seen.items()


def _table(what: str, rows: Iterable[tuple[str, Mapping[Verdict, int]]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(what, overflow="fold")
    for name in ("total", *(verdict.value.replace("_", " ") for verdict in Verdict)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, counts in rows:
        numbers = [(counts.get(verdict, 0), STYLE[verdict]) for verdict in Verdict]
        cells = [Text(str(many), style=style if many else "dim") for many, style in numbers]
        table.add_row(Text(name), Text(str(sum(counts.values()))), *cells)
    return table


def _failures(swept: Sequence[SweepRow]) -> Iterator[RenderableType]:
    for verdict in _WORST_FIRST:
        guilty = [each for each in swept if each.verdict is verdict]
        if verdict.is_failure and guilty:
            yield Text()
            yield from map(_line, guilty)


def _undecided(swept: Sequence[SweepRow], *, verbose: bool) -> Iterator[RenderableType]:
    undecided = [each for each in swept if each.verdict is Verdict.INCONCLUSIVE]
    if not undecided:
        return
    yield Text()
    if verbose:
        yield from map(_line, undecided)
        return
    reasons = Counter(f"{each.probe or 'samples'}: {_opening(each.reason)}" for each in undecided)
    shown = reasons.most_common(_REASONS)
    yield labelled((f"{many}×", Text(reason)) for reason, many in shown)
    hidden = len(undecided) - sum(many for _, many in shown)
    more = f"and {hidden} others are inconclusive; " if hidden else ""
    yield Text(f"{more}--verbose shows which", style="dim")


def _line(each: SweepRow) -> Text:
    where = f" on {each.sample}" if each.sample else ""
    return Text.assemble(
        (f"{MARK[each.verdict]} ", STYLE[each.verdict]),
        (f"{each.op} {each.dtype}", "bold"),
        f"  {each.probe or 'its samples'}{where}: {_opening(each.reason)}",
    )


def _left_out(swept: Sequence[SweepRow]) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    for each in swept:
        reasons.update(each.left_out)
    for why, many in reasons.items():
        yield f"{count(many, 'sample')} left out: {why}"
    if rejected := sum(each.unasked for each in swept):
        yield f"{count(rejected, 'sample')} not asked, because eager itself rejects them"


def _opening(reason: str) -> str:
    """Return the first line of a reason, and of a long one its beginning."""
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "")
    return first if len(first) <= _REASON_LETTERS else f"{first[:_REASON_LETTERS]}…"
