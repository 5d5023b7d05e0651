"""One matched pair of nodes in words and numbers, and which of many pairs are the worst.

The culprit among its neighbours, as a small graph in text: what it reads above, what reads it below.

A location on a terminal: the verdict, the culprits and what is around the first, the worst nodes, and notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.case import VALUES
from torchdelta.records.comparison import Breach, Comparison, Measurement
from torchdelta.records.location import Location, NodeRecord, Row
from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.report.terminal.style import (
    MARK,
    STYLE,
    TABLE_COLUMNS,
    Remark,
    console_for_stdout,
    count,
    culprit_remarks,
    headline,
    labelled,
    number,
)

IDENTICAL = "identical"
NOT_JUDGED = "not judged"


def own(row: Row) -> tuple[Comparison, ...]:
    """Return what was seen of a node by itself; gradients of what is wrong already in its values tell nothing more."""
    is_wrong = any(seen.verdict.is_failure for seen in row.local)
    return row.local if is_wrong else (*row.local, *row.local_gradients)


def own_verdict(row: Row) -> Verdict:
    """Return whether a node is right by itself; inconclusive where that could not be judged."""
    if not own(row):
        return Verdict.INCONCLUSIVE if row.reason else Verdict.EQUIVALENT
    return worst_of(seen.verdict for seen in own(row))


def differs(row: Row) -> bool:
    """Tell whether there is anything to say of a pair besides that both sides are the same to the bit."""
    return bool(row.reason) or any(not _is_identical(seen) for seen in (*own(row), *row.inherited))


def by_itself(row: Row) -> str:
    """Write the error of a node that was fed the reference's values, in multiples of its noise."""
    worst = worst_seen(own(row))
    if worst is None:
        return NOT_JUDGED if row.reason else IDENTICAL
    stage = "" if worst in row.local else " (gradients)"
    return _by_itself(worst) + stage


def _by_itself(seen: Comparison) -> str:
    if broken := [breach.clause for breach in seen.contract if not breach.excused]:
        return f"other {' and '.join(broken)}"
    if _is_identical(seen):
        return IDENTICAL
    if seen.error is None:
        return seen.verdict.value
    if seen.noise:
        return f"{seen.error / seen.noise:.3g} × noise"
    return f"error {number(seen.error)}"


def inherited(row: Row) -> str:
    """Write how far the candidate's own value is from the reference's, what it was given included."""
    worst = worst_seen(row.inherited)
    if worst is None or _is_identical(worst):
        return IDENTICAL
    seen = worst.measurement
    if seen is None:
        return worst.verdict.value
    if seen.misplaced:
        return "NaN or Inf"
    return f"{seen.sqnr_db:.1f} dB" if math.isfinite(seen.sqnr_db) else f"max abs {number(seen.max_abs)}"


def measured(comparisons: Iterable[Comparison]) -> Measurement | None:
    """Return the numbers of the worst comparison; None where nothing differs or nothing was measured."""
    worst = worst_seen(comparisons)
    return None if worst is None or _is_identical(worst) else worst.measurement


def oddities(row: Row) -> str:
    """Write what no error tells: values that are not finite, and what else than values changed."""
    return ", ".join(dict.fromkeys(odd for seen in (*own(row), *row.inherited) for odd in _oddities(seen)))


def _oddities(seen: Comparison) -> Iterator[str]:
    if numbers := seen.measurement:
        if numbers.nan_reference != numbers.nan_candidate:
            yield f"NaN {numbers.nan_reference} → {numbers.nan_candidate}"
        if numbers.inf_reference != numbers.inf_candidate:
            yield f"Inf {numbers.inf_reference} → {numbers.inf_candidate}"
    for breach in seen.contract:
        if _tells(breach):
            yield f"{breach.clause} {breach.reference} → {breach.candidate}"
    if seen.measurement is None and not seen.contract and seen.verdict is not Verdict.EQUIVALENT:
        yield seen.reason


def worst_seen(comparisons: Iterable[Comparison]) -> Comparison | None:
    """Return the worst of them."""
    return max(comparisons, key=lambda seen: seen.rank, default=None)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Return the worst first: what is wrong by itself, then what was given the worst."""
    return sorted(rows, key=_rank, reverse=True)


def _rank(row: Row) -> tuple[tuple[float, ...], float, float]:
    worst = worst_seen(own(row))
    guilt = worst.rank if worst is not None and worst.verdict is not Verdict.EQUIVALENT else ()
    return guilt, max(map(_loss, row.inherited), default=-math.inf), worst.ratio if worst is not None else 0.0


def _loss(seen: Comparison) -> float:
    """Return the signal that was lost, in dB; infinite where that cannot be told."""
    if seen.measurement is None or seen.measurement.misplaced:
        return -math.inf if seen.verdict is Verdict.EQUIVALENT else math.inf
    lost = -seen.measurement.sqnr_db
    return math.inf if math.isnan(lost) else lost


def _is_identical(seen: Comparison) -> bool:
    if any(map(_tells, seen.contract)):
        return False
    if seen.measurement is None:
        return seen.verdict is Verdict.EQUIVALENT
    return seen.measurement.mismatches == 0 and seen.verdict is Verdict.EQUIVALENT


def _tells(breach: Breach) -> bool:
    # whether a value in the middle of a graph requires grad depends on how it is run
    return breach.clause in ("dtype", "shape") or not (breach.excused or breach.clause == "requires_grad")


LINES = 5
"""At most so many above the culprit, and below it."""
_WIDE = 72
"""Columns that leave room for the operation beside the drawing."""


@dataclass(frozen=True)
class _Node:
    record: NodeRecord
    row: Row | None = None
    is_unmatched: bool = False
    error: str = ""
    """That of a culprit whose own row does not show it, because it was seen in what reads the node."""

    @property
    def is_telling(self) -> bool:
        """Whether it may say something of an error: inputs and weights are mostly the same on both sides."""
        if self.row is None:
            return self.is_unmatched
        return self.record.op != "get_attr" or differs(self.row)


@dataclass(frozen=True)
class _Line:
    """One line: the branches that lead to a node, and the node; or how many more there are."""

    stem: str
    node: _Node | None
    more: int = 0


def neighbourhood(location: Location, *, width: int) -> Table | None:
    """Draw what is around the first culprit; None where that is no node."""
    if not location.culprits or not location.culprits[0].node:
        return None
    culprit = location.culprits[0]
    around = _Surroundings.of(location, culprit)
    above, below = around.above(), around.below()
    has_inherited = any(row.inherited for row in location.table)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("node", overflow="fold")
    if width >= _WIDE:
        table.add_column("op", overflow="fold")
    table.add_column("by itself", overflow="fold")
    if has_inherited:
        table.add_column("as it runs", overflow="fold")
    for line in (*above, _Line("", around.home), *below):
        cells = _cells(line, around.home, has_op=width >= _WIDE, has_inherited=has_inherited)
        table.add_row(*cells)
    return table


def _cells(line: _Line, home: _Node, *, has_op: bool, has_inherited: bool) -> Iterator[Text]:
    node = line.node
    if node is None:
        yield from (Text(), Text(f"{line.stem}and {line.more} more", style="dim"))
        return
    verdict = own_verdict(node.row) if node.row else Verdict.EQUIVALENT
    verdict = Verdict.DIVERGED if node is home else verdict
    yield Text(MARK[verdict] if verdict is not Verdict.EQUIVALENT else "", style=STYLE[verdict])
    yield Text.assemble((line.stem, "dim"), (node.record.name, "bold" if node is home else ""))
    if has_op:
        yield Text(node.record.op)
    if node.error:
        yield Text(node.error)
    elif node.row is None:
        yield Text("unmatched" if node.is_unmatched else NOT_JUDGED, style="dim")
    else:
        yield Text(by_itself(node.row))
    if node.row is not None and has_inherited:
        yield Text(inherited(node.row))


@dataclass(frozen=True)
class _Surroundings:
    home: _Node
    place: int
    """Where in the order of all nodes the culprit is."""
    nodes: Sequence[_Node]

    @classmethod
    def of(cls, location: Location, culprit: Culprit) -> _Surroundings:
        nodes = [_Node(row.reference, row) for row in location.table]
        nodes += [_Node(record, is_unmatched=True) for record in location.unmatched_reference]
        named = [place for place, node in enumerate(nodes) if node.record.name == culprit.node]
        # forward and backward graphs have names in common: of one that is named twice, the wrong one is meant
        wrong = [place for place in named if (row := nodes[place].row) and own_verdict(row).is_failure]
        place = next(iter(wrong or named), None)
        if place is None:
            # it is no partner of a single node: what it reads is not known
            nodes.append(_Node(NodeRecord(name=culprit.node, op=culprit.op, module_path=culprit.module_path)))
            place = len(nodes) - 1
        if not wrong:
            nodes[place] = replace(nodes[place], error=_error(culprit))
        return cls(nodes[place], place, nodes)

    @property
    def has_edges(self) -> bool:
        return any(node.record.inputs for node in self.nodes)

    def above(self) -> list[_Line]:
        if not self.has_edges:
            return [_Line("", node) for node in self.nodes[max(0, self.place - 2) : self.place]]
        lines = _branches(self.home, self._producers)
        # the same tree upside down
        return [_Line(line.stem.replace("└", "┌"), line.node, line.more) for line in reversed(lines)]

    def below(self) -> list[_Line]:
        if not self.has_edges:
            return [_Line("", node) for node in self.nodes[self.place + 1 : self.place + 3]]
        return _branches(self.home, self._consumers)

    def _producers(self, node: _Node) -> list[_Node]:
        found = [self._nearest(name) or _Node(NodeRecord(name=name, op="")) for name in node.record.inputs]
        # what was judged tells more than an input or a weight
        return sorted(found, key=lambda each: each.row is None)

    def _consumers(self, node: _Node) -> list[_Node]:
        found = []
        start = 0 if node.row is None else self._place_of(node) + 1
        for other in self.nodes[start:]:
            if other.row and other.record.name == node.record.name and other.record != node.record:
                break  # another graph begins to use the names again
            if node.record.name in other.record.inputs:
                found.append(other)
        found += [other for other in self.nodes if other.is_unmatched and node.record.name in other.record.inputs]
        return found

    def _nearest(self, name: str) -> _Node | None:
        places = [place for place, node in enumerate(self.nodes) if node.record.name == name]
        # what is read comes before who reads it
        return self.nodes[min(places, key=lambda each: (each > self.place, abs(each - self.place)))] if places else None

    def _place_of(self, node: _Node) -> int:
        return next((place for place, other in enumerate(self.nodes) if other is node), -1)


def _error(culprit: Culprit) -> str:
    if not culprit.noise:
        return f"error {number(culprit.local_error)}"
    return f"{culprit.local_error / culprit.noise:.3g} × noise"


def _branches(home: _Node, neighbours_of: Callable[[_Node], list[_Node]]) -> list[_Line]:
    """Draw neighbours as a tree, and theirs where there is room."""
    taken = {home.record.name}
    first = _untaken(neighbours_of(home), taken)
    hidden = len(first) - LINES + 1 if len(first) > LINES else 0
    shown = first[: len(first) - hidden]
    room = LINES - len(shown) - bool(hidden)
    lines = []
    for place, node in enumerate(shown):
        is_last = place == len(shown) - 1 and not hidden
        lines.append(_Line("└╴" if is_last else "├╴", node))
        # what the culprit reads is shown whatever it is, and what that reads only where it tells something
        further = _untaken((each for each in neighbours_of(node) if each.is_telling), set(taken))
        if len(further) <= room:
            room -= len(further)
            taken |= {other.record.name for other in further}
            ends = ["├╴"] * (len(further) - 1) + ["└╴"]
            trunk = "   " if is_last else "│  "
            lines += [_Line(trunk + end, other) for end, other in zip(ends, further, strict=False)]
    return [*lines, _Line("└╴", None, hidden)] if hidden else lines


def _untaken(nodes: Iterable[_Node], taken: set[str]) -> list[_Node]:
    """Return the nodes that are not drawn yet, each once."""
    found = []
    for node in nodes:
        if node.record.name not in taken:
            taken.add(node.record.name)
            found.append(node)
    return found


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
    unsure = sum(own_verdict(row) is Verdict.INCONCLUSIVE for row in location.table)
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
    candidates = location.table if show_all else [row for row in location.table if differs(row)]
    shown = ranked(candidates)[: None if show_all else _ROWS]
    if not shown:
        return
    has_inherited = any(row.inherited for row in location.table)
    what = "as each runs in the candidate" if has_inherited else "as each does by itself"
    yield Text(f"\nthe worst {nodes} first; SQNR, cosine and max abs {what}", style="dim")
    yield _table(shown, location) if width >= TABLE_COLUMNS else Group(*(_entry(row, location) for row in shown))
    left = len(candidates) - len(shown), len(location.table) - len(candidates)
    said = [f"{many} {what}" for many, what in zip(left, ("more that differ", IDENTICAL), strict=True) if many]
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
    has_oddities = any(oddities(row) for row in shown)
    if has_oddities:
        table.add_column("else", overflow="fold")
    for row in shown:
        record = row.reference
        texts = (_name(row), record.op, record.module_path, row.how, by_itself(row), *_metrics(row, location))
        # as Text: a name in brackets would be taken for markup
        table.add_row(_mark(row), *map(Text, texts), *([Text(oddities(row))] if has_oddities else ()))
    return table


def _entry(row: Row, location: Location) -> RenderableType:
    """Return one pair on lines of its own, for a terminal too narrow for the table."""
    record = row.reference
    module = f" of {record.module_path}" if record.module_path not in ("", record.name) else ""
    lines = [Text.assemble(_name(row), (f": {record.op}{module}, matched by {row.how}", "dim"))]
    sqnr, cosine, largest = _metrics(row, location)
    measures = f", SQNR {sqnr} dB, cosine {cosine}, max abs {largest}" if sqnr else ""
    odd = f", {oddities(row)}" if oddities(row) else ""
    lines.append(Text(f"by itself {by_itself(row)}{measures}{odd}", style="dim"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    grid.add_row(_mark(row), Group(*lines))
    return grid


def _mark(row: Row) -> Text:
    verdict = own_verdict(row)
    return Text(MARK[verdict], style=STYLE[verdict])


def _name(row: Row) -> str:
    same = row.reference.name == row.candidate.name
    return row.reference.name if same else f"{row.reference.name} → {row.candidate.name}"


def _metrics(row: Row, location: Location) -> tuple[str, str, str]:
    has_inherited = any(each.inherited for each in location.table)
    seen = measured(row.inherited if has_inherited else own(row))
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
