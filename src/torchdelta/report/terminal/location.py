"""The location of a failure on a terminal: the culprits, the graph around the first one, and the worst nodes.

The verdict comes first, then the culprits, then the first culprit among its neighbours as a small graph in text (the
nodes that it reads above, the nodes that read it below), then a table of the worst nodes, and notes:

    culprit  aten.gelu.default  gelu of block.act, in forward

       node         op                    by itself
       ┌╴linear     aten.linear.default   identical
    ≠  gelu         aten.gelu.default     8.1e+03 × noise
       └╴linear_1   aten.linear.default   identical

Start with `print_location`. `draw_neighbourhood` draws the graph. The functions at the end describe one matched pair of
nodes in words and numbers, and serve both the graph and the table.
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
from torchdelta.records.printable import printable
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
    marked_lines,
    number,
    plain_table,
    remark_table,
)

IDENTICAL = "identical"
NOT_JUDGED = "not judged"
_MORE = "(--all)"
_MOST_ROWS = 10
_MOST_NAMES = 4
_MOST_NOTES = 6
_MOST_LINES = 5
"""At most so many lines above the culprit, and below it."""
_WIDE_COLUMNS = 72
"""Columns that leave room for the operation beside the drawing."""


def print_location(location: Location, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the location, by default on stdout; `verbose` shows every node, culprit, name and note."""
    console = console or console_for_stdout()
    location = printable(location)
    parts = [headline(location), Text(), remark_table(_finding_remarks(location, show_all=verbose))]
    if (drawing := draw_neighbourhood(location, width=console.width)) is not None:
        parts += [Text(), drawing]
    parts += [*_worst_node_parts(location, width=console.width, show_all=verbose)]
    if remarks := [*_closing_remarks(location, show_all=verbose)]:
        parts += [Text(), remark_table(remarks)]
    parts.append(Text(_cost_text(location), style="dim"))
    console.print(Group(*parts), highlight=False)


def _finding_remarks(location: Location, *, show_all: bool) -> Iterator[Remark]:
    """Yield remarks: the ladder of rungs, the reason of the check, and the culprits, or that none was found and why.

    `show_all` shows every culprit, not only the first few.
    """
    if location.rungs:
        yield "ladder", _ladder_text(location)
    if location.reason:
        yield "check", location.reason
    yield from culprit_remarks(location.culprits, show_all=show_all)
    if not location.culprits:
        yield "culprit", "none was found"
        yield from (("", Text(line)) for line in _explain_missing_culprit(location))


def _ladder_text(location: Location) -> Text:
    """Return one line: "eager", then each rung with the mark of its verdict.

    Behind the first rung that failed, the line says so in words.
    """
    line = Text("eager")
    has_failed = False
    for rung in location.rungs:
        line.append(f" → {rung.name} ").append(MARK[rung.verdict], style=STYLE[rung.verdict])
        if rung.verdict.is_failure and not has_failed:
            has_failed = True
            line.append(f" {rung.verdict.value} here first", style=f"bold {STYLE[rung.verdict]}")
    return line


def _explain_missing_culprit(location: Location) -> Iterator[str]:
    """Yield sentences on what was compared without finding a culprit, and what to try next.

    They depend on whether captures were compared, whether any pair was compared, and the verdict.
    """
    nodes = _noun(location)
    if location.case.stages == (VALUES,):
        yield f"captures show what both sides computed, and not what a {nodes.removesuffix('s')} does by itself"
        return
    if not location.table:
        yield f"no {nodes} were compared"
        if location.verdict in (Verdict.CRASHED, Verdict.TIMED_OUT):
            yield "the candidate did not get far enough: torchdelta check --verbose shows what it raised"
        elif location.verdict is Verdict.DIVERGED:
            yield "torchdelta check --verbose shows which values differ; --cause looks for a setting behind it"
        return
    undecided = sum(own_verdict(row) is Verdict.INCONCLUSIVE for row in location.table)
    summary = f"of {count(len(location.table), 'pair')} of {nodes}, each fed the same values, none is wrong by itself"
    yield summary + (f"; {undecided} could not be decided" if undecided else "")
    if location.verdict is Verdict.EQUIVALENT:
        yield "the check found both sides equivalent: there is nothing to locate"
    elif location.verdict is Verdict.INCONCLUSIVE:
        yield "the check itself is inconclusive: torchdelta check says why"
    else:
        yield (
            f"yet the whole program diverged: because of {nodes} that were not compared, of operations between them, "
            "or of roundings that add up"
        )
        yield from _suggestions(location)


def _suggestions(location: Location) -> Iterator[str]:
    """Yield sentences on options and commands that may lead further if all compared pairs are right by themselves.

    They depend on whether the ladder reached a backend, and on whether nodes or modules are unmatched.
    """
    has_unmatched = bool(location.unmatched_reference or location.unmatched_candidate)
    if any(rung.name == "backend" for rung in location.rungs):
        yield "--cause looks for a setting of the compiler that makes the failure vanish"
    if has_unmatched and _noun(location) == "nodes":
        yield "--mapping can match the unmatched nodes listed below"
    elif has_unmatched:
        yield "look at the unmatched modules listed below, which were not compared"
    else:
        yield "torchdelta check --verbose shows which values differ"


def _worst_node_parts(location: Location, *, width: int, show_all: bool) -> Iterator[RenderableType]:
    """Yield the worst nodes, as a table or on lines of their own, and how many are not shown.

    The table needs a `width` of at least TABLE_COLUMNS. Without `show_all`, pairs without a difference
    (`has_difference`) are left out, and at most `_MOST_ROWS` are shown. Yield nothing if no pair is left.
    """
    nodes = _noun(location)
    candidates = location.table if show_all else [row for row in location.table if has_difference(row)]
    shown = sort_worst_first(candidates)[: None if show_all else _MOST_ROWS]
    if not shown:
        return
    has_inherited = any(row.inherited for row in location.table)
    how = "as each runs in the candidate" if has_inherited else "as each does by itself"
    yield Text(f"\nthe worst {nodes} first; SQNR, cosine and max abs {how}", style="dim")
    yield _table(shown, location) if width >= TABLE_COLUMNS else Group(*(_row_lines(row, location) for row in shown))
    hidden = len(candidates) - len(shown), len(location.table) - len(candidates)
    counts = [f"{rows} {kind}" for rows, kind in zip(hidden, ("more that differ", IDENTICAL), strict=True) if rows]
    if counts:
        yield Text(f"   and {' and '.join(counts)} {_MORE}", style="dim")


def _table(shown: Sequence[Row], location: Location) -> Table:
    """Return a table with a row for each pair of nodes: how it was matched, its own error, and its metrics.

    A last column has other differences (`other_differences`), if any of the rows has some.
    """
    table = plain_table()
    table.add_column("")
    for name in ("node", "op", "module"):
        table.add_column(name, overflow="fold")
    table.add_column("match", no_wrap=True)
    for name in ("by itself", "SQNR dB", "cosine", "max abs"):
        table.add_column(name, justify="right", no_wrap=True)
    has_others = any(other_differences(row) for row in shown)
    if has_others:
        table.add_column("else", overflow="fold")
    for row in shown:
        record = row.reference
        texts = (_name(row), record.op, record.module_path, row.how, own_error(row), *_metrics(row, location))
        # as Text: a name in brackets would be taken for markup
        table.add_row(_mark(row), *map(Text, texts), *([Text(other_differences(row))] if has_others else ()))
    return table


def _row_lines(row: Row, location: Location) -> RenderableType:
    """Return one pair on two lines, for a terminal that is too narrow for the table.

    The first has its names, operation, module and how it was matched; the second its own error, and its metrics and
    other differences if it has them.
    """
    record = row.reference
    module = f" of {record.module_path}" if record.module_path not in ("", record.name) else ""
    lines = [Text.assemble(_name(row), (f": {record.op}{module}, matched by {row.how}", "dim"))]
    sqnr, cosine, largest = _metrics(row, location)
    metrics = f", SQNR {sqnr} dB, cosine {cosine}, max abs {largest}" if sqnr else ""
    others = f", {other_differences(row)}" if other_differences(row) else ""
    lines.append(Text(f"by itself {own_error(row)}{metrics}{others}", style="dim"))
    return marked_lines(_mark(row), lines)


def _mark(row: Row) -> Text:
    """Return the mark of a pair's own verdict, in the verdict's colour."""
    verdict = own_verdict(row)
    return Text(MARK[verdict], style=STYLE[verdict])


def _name(row: Row) -> str:
    """Return the name of a pair: that of both nodes if it is the same, otherwise `REFERENCE → CANDIDATE`."""
    same = row.reference.name == row.candidate.name
    return row.reference.name if same else f"{row.reference.name} → {row.candidate.name}"


def _metrics(row: Row, location: Location) -> tuple[str, str, str]:
    """Return (SQNR, cosine, largest absolute error) of a row as text.

    They are those of the worst inherited comparison if any row of the location has inherited ones, else of the worst
    own. The texts are empty if that comparison is identical, was not measured or does not exist.
    """
    has_inherited = any(each.inherited for each in location.table)
    measurement = worst_measurement(row.inherited if has_inherited else own_comparisons(row))
    if measurement is None:
        return "", "", ""
    return f"{measurement.sqnr_db:.1f}", f"{measurement.cosine:.8f}", number(measurement.max_abs)


def _closing_remarks(location: Location, *, show_all: bool) -> Iterator[Remark]:
    """Yield how many nodes were matched, which were not, which could not be judged and why, and notes.

    Without `show_all` only the first few names, reasons and notes are shown, with the number of those left out.
    """
    nodes = _noun(location)
    if coverage := location.coverage:
        how = ", ".join(f"{times} by {name}" for name, times in coverage.how.items())
        yield "matched", f"{coverage.matched} of {count(coverage.total, nodes.removesuffix('s'))}{how and f' ({how})'}"
    sides = (("reference", location.unmatched_reference), ("candidate", location.unmatched_candidate))
    for side, records in sides:
        if records:
            yield "unmatched", f"{len(records)} in the {side}: {_names(records, show_all=show_all)}"
    if undecided := [row for row in location.table if row.reason]:
        reasons = dict.fromkeys(f"{row.reference.name}: {row.reason}" for row in undecided)
        shown = list(reasons)[: None if show_all else _MOST_NAMES]
        yield from (("undecided", reason) for reason in shown)
        if len(reasons) > len(shown):
            yield "", f"and {len(reasons) - len(shown)} more {_MORE}"
    notes = location.notes if show_all else location.notes[:_MOST_NOTES]
    yield from (("note", note) for note in notes)
    if len(location.notes) > len(notes):
        yield "", f"and {len(location.notes) - len(notes)} more {_MORE}"


def _names(records: Sequence[NodeRecord], *, show_all: bool) -> str:
    """Return names and operations of nodes as text; without `show_all` of the first few, and how many are left out."""
    shown = records if show_all else records[:_MOST_NAMES]
    names = ", ".join(f"{record.name} ({record.op})" for record in shown)
    return names + (f" and {len(records) - len(shown)} more {_MORE}" if len(records) > len(shown) else "")


def _cost_text(location: Location) -> str:
    """Return the number of compiles, as text, and if the cost is known, the seconds and the peak of memory."""
    compiles = count(location.compiles, "compile")
    if location.cost is None:
        return compiles
    peak = f"peak memory {location.cost.peak_bytes / 2**20:.0f} MiB"
    return f"{compiles}, {sum(location.cost.seconds.values()):.1f} s, {peak}"


def _noun(location: Location) -> str:
    """Return "modules" if all rows are calls of modules, which are named after their paths, otherwise "nodes".

    A location without rows has "nodes".
    """
    are_modules = all(
        row.reference.name.partition(" (call ")[0] == (row.reference.module_path or row.reference.op)
        for row in location.table
    )
    return "modules" if location.table and are_modules else "nodes"


def draw_neighbourhood(location: Location, *, width: int) -> Table | None:
    """Return a drawing of the nodes around the first culprit, or None if there is no culprit or its node is unknown.

    The nodes that it reads are above it, and those that read it below, at most `_MOST_LINES` each, with their errors.
    If no node has known inputs, as with modules, they are the two rows before it and the two after it. A column for
    operations needs a `width` of `_WIDE_COLUMNS`; a column for inherited errors appears if any were measured.
    """
    if not location.culprits or not location.culprits[0].node:
        return None
    culprit = location.culprits[0]
    neighbours = _Neighbourhood.of(location, culprit)
    above, below = neighbours.above(), neighbours.below()
    has_inherited = any(row.inherited for row in location.table)
    table = plain_table()
    table.add_column("")
    table.add_column("node", overflow="fold")
    if width >= _WIDE_COLUMNS:
        table.add_column("op", overflow="fold")
    table.add_column("by itself", overflow="fold")
    if has_inherited:
        table.add_column("as it runs", overflow="fold")
    for line in (*above, _DrawnLine("", neighbours.centre), *below):
        cells = _cells(line, neighbours.centre, has_op=width >= _WIDE_COLUMNS, has_inherited=has_inherited)
        table.add_row(*cells)
    return table


@dataclass(frozen=True)
class _DrawnNode:
    """A node in the drawing, with its row of the table if it was judged."""

    record: NodeRecord
    row: Row | None = None
    is_unmatched: bool = False
    error: str = ""
    """The error of a culprit whose own row does not show it, because it was measured at a node that reads it."""

    @property
    def is_informative(self) -> bool:
        """Whether the node may help to understand an error: an unmatched one, or a judged one.

        Of judged `get_attr` nodes, such as weights, only those with a difference count.
        """
        if self.row is None:
            return self.is_unmatched
        return self.record.op != "get_attr" or has_difference(self.row)


@dataclass(frozen=True)
class _DrawnLine:
    """One line of the drawing: the branches that lead to a node, and the node; or how many more nodes there are."""

    stem: str
    node: _DrawnNode | None
    more: int = 0


def _cells(line: _DrawnLine, centre: _DrawnNode, *, has_op: bool, has_inherited: bool) -> Iterator[Text]:
    """Yield the cells of one line: mark, node, operation (with `has_op`), its own error, and its inherited error.

    The culprit, `centre`, is marked as diverged; equivalent nodes have no mark. The inherited error needs
    `has_inherited` and a judged node. A line without a node only says how many more nodes there are.
    """
    node = line.node
    if node is None:
        yield from (Text(), Text(f"{line.stem}and {line.more} more", style="dim"))
        return
    verdict = own_verdict(node.row) if node.row else Verdict.EQUIVALENT
    verdict = Verdict.DIVERGED if node is centre else verdict
    yield Text(MARK[verdict] if verdict is not Verdict.EQUIVALENT else "", style=STYLE[verdict])
    yield Text.assemble((line.stem, "dim"), (node.record.name, "bold" if node is centre else ""))
    if has_op:
        yield Text(node.record.op)
    if node.error:
        yield Text(node.error)
    elif node.row is None:
        yield Text("unmatched" if node.is_unmatched else NOT_JUDGED, style="dim")
    else:
        yield Text(own_error(node.row))
    if node.row is not None and has_inherited:
        yield Text(inherited_error(node.row))


@dataclass(frozen=True)
class _Neighbourhood:
    """The culprit in the middle of the drawing, and all nodes among which its neighbours are found."""

    centre: _DrawnNode
    place: int
    """The position of the culprit among all nodes."""
    nodes: Sequence[_DrawnNode]

    @classmethod
    def of(cls, location: Location, culprit: Culprit) -> _Neighbourhood:
        """Return the neighbourhood of a culprit among all nodes of the reference, matched ones first.

        Its centre is the first node of the culprit's name that is wrong by itself, or else the first of that name. If
        no node has the name, one without inputs is added as the centre. Unless the centre's row is wrong by itself, the
        centre gets the culprit's error as text.
        """
        nodes = [_DrawnNode(row.reference, row) for row in location.table]
        nodes += [_DrawnNode(record, is_unmatched=True) for record in location.unmatched_reference]
        places = [place for place, node in enumerate(nodes) if node.record.name == culprit.node]
        # forward and backward graphs may have the same names; then the node that failed is the culprit
        wrong = [place for place in places if (row := nodes[place].row) and own_verdict(row).is_failure]
        place = next(iter(wrong or places), None)
        if place is None:
            # the culprit is not in the table, so its inputs are not known
            nodes.append(_DrawnNode(NodeRecord(name=culprit.node, op=culprit.op, module_path=culprit.module_path)))
            place = len(nodes) - 1
        if not wrong:
            nodes[place] = replace(nodes[place], error=_culprit_error(culprit))
        return cls(nodes[place], place, nodes)

    @property
    def has_edges(self) -> bool:
        """Whether the inputs of any node are known."""
        return any(node.record.inputs for node in self.nodes)

    def above(self) -> list[_DrawnLine]:
        """Return the lines for the nodes that the culprit reads, or for the two before it if no node has known inputs.

        They are in the order of the drawing, and the culprit itself is not among them. Where there is room, informative
        nodes that these read are shown too.
        """
        if not self.has_edges:
            return [_DrawnLine("", node) for node in self.nodes[max(0, self.place - 2) : self.place]]
        lines = _branches(self.centre, self._producers)
        # the same tree upside down
        return [_DrawnLine(line.stem.replace("└", "┌"), line.node, line.more) for line in reversed(lines)]

    def below(self) -> list[_DrawnLine]:
        """Return the lines for the nodes that read the culprit, or for the two after it if no node has known inputs.

        Where there is room, informative nodes that read these are shown too.
        """
        if not self.has_edges:
            return [_DrawnLine("", node) for node in self.nodes[self.place + 1 : self.place + 3]]
        return _branches(self.centre, self._consumers)

    def _producers(self, node: _DrawnNode) -> list[_DrawnNode]:
        """Return the nodes that a node reads, judged ones first; an unknown name becomes a node without operation."""
        producers = [
            self._nearest_node(name) or _DrawnNode(NodeRecord(name=name, op="")) for name in node.record.inputs
        ]
        # a judged node is more informative than an input or a weight
        return sorted(producers, key=lambda each: each.row is None)

    def _consumers(self, node: _DrawnNode) -> list[_DrawnNode]:
        """Return the nodes that read a node: those behind it in the same graph, and unmatched ones, maybe twice.

        The same graph ends where another judged node has the same name, because a backward graph follows its forward
        graph. The readers of a node that was not judged are looked for among all nodes.
        """
        consumers = []
        start = 0 if node.row is None else self._place_of(node) + 1
        for other in self.nodes[start:]:
            if other.row and other.record.name == node.record.name and other.record != node.record:
                break  # a second graph starts here, which uses the same names
            if node.record.name in other.record.inputs:
                consumers.append(other)
        consumers += [other for other in self.nodes if other.is_unmatched and node.record.name in other.record.inputs]
        return consumers

    def _nearest_node(self, name: str) -> _DrawnNode | None:
        """Return the node of a name before the culprit and nearest to it, or else after it; None if there is none."""
        places = [place for place, node in enumerate(self.nodes) if node.record.name == name]
        # a producer comes before its reader, so a node before the culprit is preferred
        return self.nodes[min(places, key=lambda each: (each > self.place, abs(each - self.place)))] if places else None

    def _place_of(self, node: _DrawnNode) -> int:
        """Return the position of a node among all nodes, or -1 if it is not there."""
        return next((place for place, other in enumerate(self.nodes) if other is node), -1)


def _culprit_error(culprit: Culprit) -> str:
    """Return the error of a culprit as text, in multiples of its noise if that is known."""
    if not culprit.noise:
        return f"error {number(culprit.local_error)}"
    return f"{culprit.local_error / culprit.noise:.3g} × noise"


def _branches(centre: _DrawnNode, neighbours_of: Callable[[_DrawnNode], list[_DrawnNode]]) -> list[_DrawnLine]:
    """Return the neighbours of the culprit as lines of a tree, at most `_MOST_LINES`; no name is drawn twice.

    `neighbours_of` returns the neighbours of a node, in one direction. If there are too many, the last line says how
    many are left out. A neighbour's own informative neighbours are drawn below it if all of them fit.
    """
    drawn_names = {centre.record.name}
    neighbours = _undrawn(neighbours_of(centre), drawn_names)
    hidden = len(neighbours) - _MOST_LINES + 1 if len(neighbours) > _MOST_LINES else 0
    shown = neighbours[: len(neighbours) - hidden]
    room = _MOST_LINES - len(shown) - bool(hidden)
    lines = []
    for place, node in enumerate(shown):
        is_last = place == len(shown) - 1 and not hidden
        lines.append(_DrawnLine("└╴" if is_last else "├╴", node))
        # the first neighbours are always shown, the second ones only if they are informative
        second_neighbours = _undrawn((each for each in neighbours_of(node) if each.is_informative), set(drawn_names))
        if len(second_neighbours) <= room:
            room -= len(second_neighbours)
            drawn_names |= {other.record.name for other in second_neighbours}
            ends = ["├╴"] * (len(second_neighbours) - 1) + ["└╴"]
            trunk = "   " if is_last else "│  "
            lines += [_DrawnLine(trunk + end, other) for end, other in zip(ends, second_neighbours, strict=False)]
    return [*lines, _DrawnLine("└╴", None, hidden)] if hidden else lines


def _undrawn(nodes: Iterable[_DrawnNode], drawn_names: set[str]) -> list[_DrawnNode]:
    """Return the nodes whose names are not in `drawn_names`, each name once, and add their names to `drawn_names`."""
    undrawn = []
    for node in nodes:
        if node.record.name not in drawn_names:
            drawn_names.add(node.record.name)
            undrawn.append(node)
    return undrawn


def own_comparisons(row: Row) -> tuple[Comparison, ...]:
    """Return a node's comparisons on the reference's inputs: of its values and, unless one of these failed, gradients.

    A comparison of values that is inconclusive has not failed.
    """
    is_wrong = any(comparison.verdict.is_failure for comparison in row.local)
    return row.local if is_wrong else (*row.local, *row.local_gradients)


def own_verdict(row: Row) -> Verdict:
    """Return the worst verdict of a node by itself: that of `own_comparisons`.

    Without any comparison it is inconclusive if the row has a reason why it could not be judged, otherwise equivalent.
    """
    if not own_comparisons(row):
        return Verdict.INCONCLUSIVE if row.reason else Verdict.EQUIVALENT
    return worst_of(comparison.verdict for comparison in own_comparisons(row))


def has_difference(row: Row) -> bool:
    """Tell whether a comparison of a pair, own or inherited, shows a difference, or the pair could not be judged."""
    return bool(row.reason) or any(
        not _is_identical(comparison) for comparison in (*own_comparisons(row), *row.inherited)
    )


def own_error(row: Row) -> str:
    """Return the error of a node on the reference's inputs as text (`_own_error_of` its worst comparison).

    "(gradients)" follows if that is one of a gradient. Without any comparison the text is "not judged" if the row has a
    reason for that, otherwise "identical".
    """
    worst = worst_comparison(own_comparisons(row))
    if worst is None:
        return NOT_JUDGED if row.reason else IDENTICAL
    stage = "" if worst in row.local else " (gradients)"
    return _own_error_of(worst) + stage


def _own_error_of(comparison: Comparison) -> str:
    """Return the error of one comparison as text.

    That is, the first that applies: "other" with the broken clauses that are not excused ("other dtype"); "identical";
    the verdict, if there is no error in numbers; the error in multiples of the noise, if that is known; the error
    itself.
    """
    if broken_clauses := [breach.clause for breach in comparison.contract if not breach.excused]:
        return f"other {' and '.join(broken_clauses)}"
    if _is_identical(comparison):
        return IDENTICAL
    if comparison.error is None:
        return comparison.verdict.value
    if comparison.noise:
        return f"{comparison.error / comparison.noise:.3g} × noise"
    return f"error {number(comparison.error)}"


def inherited_error(row: Row) -> str:
    """Return the difference between both sides' own values as text, which includes errors of the nodes before.

    The text is about the worst inherited comparison. It is, the first that applies: "identical", also without any
    comparison; the verdict, if nothing was measured; "NaN or Inf", if one is misplaced; the SQNR, if that is finite;
    the largest absolute error.
    """
    worst = worst_comparison(row.inherited)
    if worst is None or _is_identical(worst):
        return IDENTICAL
    measurement = worst.measurement
    if measurement is None:
        return worst.verdict.value
    if measurement.misplaced:
        return "NaN or Inf"
    return (
        f"{measurement.sqnr_db:.1f} dB"
        if math.isfinite(measurement.sqnr_db)
        else f"max abs {number(measurement.max_abs)}"
    )


def worst_measurement(comparisons: Iterable[Comparison]) -> Measurement | None:
    """Return the measurement of the worst comparison; None if that one is identical, was not measured or is missing."""
    worst = worst_comparison(comparisons)
    return None if worst is None or _is_identical(worst) else worst.measurement


def other_differences(row: Row) -> str:
    """Return the differences that an error does not show, as text: NaN, Inf, and contract clauses such as dtype.

    They come from the own and the inherited comparisons, each once; the text is empty if there are none.
    """
    return ", ".join(
        dict.fromkeys(
            text for comparison in (*own_comparisons(row), *row.inherited) for text in _other_differences_of(comparison)
        )
    )


def _other_differences_of(comparison: Comparison) -> Iterator[str]:
    """Yield a text for each difference in the counts of NaN and Inf, and for each broken clause that `_is_relevant`.

    If there is neither a measurement nor a broken clause, yield the comparison's reason, unless it is equivalent.
    """
    if numbers := comparison.measurement:
        if numbers.nan_reference != numbers.nan_candidate:
            yield f"NaN {numbers.nan_reference} → {numbers.nan_candidate}"
        if numbers.inf_reference != numbers.inf_candidate:
            yield f"Inf {numbers.inf_reference} → {numbers.inf_candidate}"
    for breach in comparison.contract:
        if _is_relevant(breach):
            yield f"{breach.clause} {breach.reference} → {breach.candidate}"
    if comparison.measurement is None and not comparison.contract and comparison.verdict is not Verdict.EQUIVALENT:
        yield comparison.reason


def worst_comparison(comparisons: Iterable[Comparison]) -> Comparison | None:
    """Return the comparison with the highest rank, or None if there are none."""
    return max(comparisons, key=lambda comparison: comparison.rank, default=None)


def sort_worst_first(rows: Iterable[Row]) -> list[Row]:
    """Return the rows sorted by `_rank`: those not equivalent by themselves first, the worst of them at the front.

    The others follow, those with the largest inherited error first.
    """
    return sorted(rows, key=_rank, reverse=True)


def _rank(row: Row) -> tuple[tuple[float, ...], float, float]:
    """Return the sort key of a row, higher for worse: own failure, inherited loss of signal, and own error ratio.

    The first is the rank of the worst own comparison, or empty if that is equivalent or missing. The second is in dB,
    and the third is error over allowed error.
    """
    worst = worst_comparison(own_comparisons(row))
    failure_rank = worst.rank if worst is not None and worst.verdict is not Verdict.EQUIVALENT else ()
    return (
        failure_rank,
        max(map(_signal_loss, row.inherited), default=-math.inf),
        worst.ratio if worst is not None else 0.0,
    )


def _signal_loss(comparison: Comparison) -> float:
    """Return the loss of signal in dB, which is minus the SQNR; infinity if the SQNR is NaN.

    A comparison without a measurement, or with a misplaced NaN or Inf, has minus infinity if it is equivalent,
    otherwise infinity.
    """
    if comparison.measurement is None or comparison.measurement.misplaced:
        return -math.inf if comparison.verdict is Verdict.EQUIVALENT else math.inf
    loss_db = -comparison.measurement.sqnr_db
    return math.inf if math.isnan(loss_db) else loss_db


def _is_identical(comparison: Comparison) -> bool:
    """Tell whether a comparison is equivalent without any different element, or any breach that `_is_relevant`.

    Without a measurement, no element counts as different.
    """
    if any(map(_is_relevant, comparison.contract)):
        return False
    if comparison.measurement is None:
        return comparison.verdict is Verdict.EQUIVALENT
    return comparison.measurement.mismatches == 0 and comparison.verdict is Verdict.EQUIVALENT


def _is_relevant(breach: Breach) -> bool:
    """Tell whether a breach is worth showing: one of dtype or shape always, any other unless it is excused.

    One of `requires_grad` never is, because that depends on how the graph is run.
    """
    return breach.clause in ("dtype", "shape") or not (breach.excused or breach.clause == "requires_grad")
