"""A location on a terminal: the verdict, the culprits and what is around the first, the worst nodes, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.case import VALUES
from torchdelta.records.location import Location, NodeRecord, Row
from torchdelta.records.verdict import Verdict
from torchdelta.report import rows
from torchdelta.report.culprits import culprit_remarks
from torchdelta.report.marks import (
    MARK,
    STYLE,
    TABLE_COLUMNS,
    Remark,
    console_for_stdout,
    count,
    headline,
    labelled,
    number,
)
from torchdelta.report.neighbourhood import neighbourhood

_ROWS = 10
_NAMES = 4
_NOTES = 6
_MORE = "(--all)"


def print_location(location: Location, console: Console | None = None, *, show_all: bool = False) -> None:
    """Print the location; `show_all` shows every node, culprit, name and note."""
    console = console or console_for_stdout()
    parts = [headline(location), Text(), labelled(_findings(location, show_all=show_all))]
    if (drawn := neighbourhood(location, width=console.width)) is not None:
        parts += [Text(), drawn]
    parts += [*_worst_nodes(location, width=console.width, show_all=show_all)]
    if remarks := [*_remarks(location, show_all=show_all)]:
        parts += [Text(), labelled(remarks)]
    parts.append(Text(_cost(location), style="dim"))
    console.print(Group(*parts), highlight=False)


def _findings(location: Location, *, show_all: bool) -> Iterator[Remark]:
    if location.rungs:
        yield "ladder", _ladder(location)
    if location.reason:
        yield "check", location.reason
    yield from culprit_remarks(location.culprits, show_all=show_all)
    if not location.culprits:
        yield "culprit", "none was found"
        yield from (("", Text(line)) for line in _without_culprit(location))


def _ladder(location: Location) -> Text:
    line = Text("eager")
    has_failed = False
    for rung in location.rungs:
        line.append(f" → {rung.name} ").append(MARK[rung.verdict], style=STYLE[rung.verdict])
        if rung.verdict.is_failure and not has_failed:
            has_failed = True
            line.append(f" {rung.verdict.value} here first", style=f"bold {STYLE[rung.verdict]}")
    return line


def _without_culprit(location: Location) -> Iterator[str]:
    """Say what was looked at, what that means and what to try."""
    nodes = _noun(location)
    if location.case.stages == (VALUES,):
        yield f"captures tell what both sides computed, and not what a {nodes.removesuffix('s')} does by itself"
        return
    if not location.table:
        yield f"no {nodes} were held against each other"
        if location.verdict in (Verdict.CRASHED, Verdict.TIMED_OUT):
            yield "the candidate did not get far enough: torchdelta check --verbose shows what it raised"
        elif location.verdict is Verdict.DIVERGED:
            yield "torchdelta check --verbose shows which values differ; --cause looks for a setting behind it"
        return
    unsure = sum(rows.own_verdict(row) is Verdict.INCONCLUSIVE for row in location.table)
    judged = f"of {count(len(location.table), 'pair')} of {nodes}, each fed the same values, none is wrong by itself"
    yield judged + (f"; {unsure} could not be decided" if unsure else "")
    if location.verdict is Verdict.EQUIVALENT:
        yield "the check found both sides equivalent: there is nothing to locate"
    elif location.verdict is Verdict.INCONCLUSIVE:
        yield "the check itself is inconclusive: torchdelta check says why"
    else:
        yield (
            f"yet the whole diverged: it comes from {nodes} that were not compared, from what lies between them, or "
            "from roundings that add up"
        )
        yield from _to_try(location)


def _to_try(location: Location) -> Iterator[str]:
    is_alone = bool(location.unmatched_reference or location.unmatched_candidate)
    if any(rung.name == "backend" for rung in location.rungs):
        yield "--cause looks for a setting of the compiler that it vanishes with"
    if is_alone and _noun(location) == "nodes":
        yield "--mapping tells which nodes stand for those that are alone below"
    elif is_alone:
        yield "look at the modules that are alone below, which nothing was held against"
    else:
        yield "torchdelta check --verbose shows which values differ"


def _worst_nodes(location: Location, *, width: int, show_all: bool) -> Iterator[RenderableType]:
    nodes = _noun(location)
    candidates = location.table if show_all else [row for row in location.table if rows.differs(row)]
    shown = rows.ranked(candidates)[: None if show_all else _ROWS]
    if not shown:
        return
    has_inherited = any(row.inherited for row in location.table)
    what = "as each runs in the candidate" if has_inherited else "as each does by itself"
    yield Text(f"\nthe worst {nodes} first; SQNR, cosine and max abs {what}", style="dim")
    yield _table(shown, location) if width >= TABLE_COLUMNS else Group(*(_entry(row, location) for row in shown))
    left = len(candidates) - len(shown), len(location.table) - len(candidates)
    said = [f"{many} {what}" for many, what in zip(left, ("more that differ", rows.IDENTICAL), strict=True) if many]
    if said:
        yield Text(f"   and {' and '.join(said)} {_MORE}", style="dim")


def _table(shown: Sequence[Row], location: Location) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("node", "op", "module"):
        table.add_column(name, overflow="fold")
    table.add_column("match", no_wrap=True)
    for name in ("by itself", "SQNR dB", "cosine", "max abs"):
        table.add_column(name, justify="right", no_wrap=True)
    has_oddities = any(rows.oddities(row) for row in shown)
    if has_oddities:
        table.add_column("else", overflow="fold")
    for row in shown:
        record = row.reference
        texts = (_name(row), record.op, record.module_path, row.how, rows.by_itself(row), *_metrics(row, location))
        # as Text: a name in brackets would be taken for markup
        table.add_row(_mark(row), *map(Text, texts), *([Text(rows.oddities(row))] if has_oddities else ()))
    return table


def _entry(row: Row, location: Location) -> RenderableType:
    """Return one pair on lines of its own, for a terminal too narrow for the table."""
    record = row.reference
    module = f" of {record.module_path}" if record.module_path not in ("", record.name) else ""
    lines = [Text.assemble(_name(row), (f": {record.op}{module}, matched by {row.how}", "dim"))]
    sqnr, cosine, largest = _metrics(row, location)
    measures = f", SQNR {sqnr} dB, cosine {cosine}, max abs {largest}" if sqnr else ""
    odd = f", {rows.oddities(row)}" if rows.oddities(row) else ""
    lines.append(Text(f"by itself {rows.by_itself(row)}{measures}{odd}", style="dim"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    grid.add_row(_mark(row), Group(*lines))
    return grid


def _mark(row: Row) -> Text:
    verdict = rows.own_verdict(row)
    return Text(MARK[verdict], style=STYLE[verdict])


def _name(row: Row) -> str:
    same = row.reference.name == row.candidate.name
    return row.reference.name if same else f"{row.reference.name} → {row.candidate.name}"


def _metrics(row: Row, location: Location) -> tuple[str, str, str]:
    has_inherited = any(each.inherited for each in location.table)
    seen = rows.measured(row.inherited if has_inherited else rows.own(row))
    if seen is None:
        return "", "", ""
    return f"{seen.sqnr_db:.1f}", f"{seen.cosine:.8f}", number(seen.max_abs)


def _remarks(location: Location, *, show_all: bool) -> Iterator[Remark]:
    nodes = _noun(location)
    if coverage := location.coverage:
        how = ", ".join(f"{times} by {name}" for name, times in coverage.how.items())
        yield "matched", f"{coverage.matched} of {count(coverage.total, nodes.removesuffix('s'))}{how and f' ({how})'}"
    sides = (("reference", location.unmatched_reference), ("candidate", location.unmatched_candidate))
    for side, records in sides:
        if records:
            yield "alone", f"{len(records)} in the {side}: {_names(records, show_all=show_all)}"
    if undecided := [row for row in location.table if row.reason]:
        reasons = dict.fromkeys(f"{row.reference.name}: {row.reason}" for row in undecided)
        shown = list(reasons)[: None if show_all else _NAMES]
        yield from (("open", reason) for reason in shown)
        if len(reasons) > len(shown):
            yield "", f"and {len(reasons) - len(shown)} more {_MORE}"
    notes = location.notes if show_all else location.notes[:_NOTES]
    yield from (("note", note) for note in notes)
    if len(location.notes) > len(notes):
        yield "", f"and {len(location.notes) - len(notes)} more {_MORE}"


def _names(records: Sequence[NodeRecord], *, show_all: bool) -> str:
    shown = records if show_all else records[:_NAMES]
    names = ", ".join(f"{record.name} ({record.op})" for record in shown)
    return names + (f" and {len(records) - len(shown)} more {_MORE}" if len(records) > len(shown) else "")


def _cost(location: Location) -> str:
    spent = count(location.compiles, "compile")
    if location.cost is None:
        return spent
    peak = f"peak memory {location.cost.peak_bytes / 2**20:.0f} MiB"
    return f"{spent}, {sum(location.cost.seconds.values()):.1f} s, {peak}"


def _noun(location: Location) -> str:
    """Return what the rows are: nodes of graphs, or calls of modules, which are named after their paths."""
    are_modules = all(
        row.reference.name.partition(" (call ")[0] == (row.reference.module_path or row.reference.op)
        for row in location.table
    )
    return "modules" if location.table and are_modules else "nodes"
