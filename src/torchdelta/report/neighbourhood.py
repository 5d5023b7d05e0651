"""The culprit among its neighbours, as a small graph in text: what it reads above, what reads it below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from torchdelta.records.location import Location, NodeRecord, Row
from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict
from torchdelta.report import rows
from torchdelta.report.marks import MARK, STYLE, number

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
        return self.record.op != "get_attr" or rows.differs(self.row)


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
    around = _Around.of(location, culprit)
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
    verdict = rows.own_verdict(node.row) if node.row else Verdict.EQUIVALENT
    verdict = Verdict.DIVERGED if node is home else verdict
    yield Text(MARK[verdict] if verdict is not Verdict.EQUIVALENT else "", style=STYLE[verdict])
    yield Text.assemble((line.stem, "dim"), (node.record.name, "bold" if node is home else ""))
    if has_op:
        yield Text(node.record.op)
    if node.error:
        yield Text(node.error)
    elif node.row is None:
        yield Text("unmatched" if node.is_unmatched else rows.NOT_JUDGED, style="dim")
    else:
        yield Text(rows.by_itself(node.row))
    if node.row is not None and has_inherited:
        yield Text(rows.inherited(node.row))


@dataclass(frozen=True)
class _Around:
    home: _Node
    place: int
    """Where in the order of all nodes the culprit is."""
    nodes: Sequence[_Node]

    @classmethod
    def of(cls, location: Location, culprit: Culprit) -> _Around:
        nodes = [_Node(row.reference, row) for row in location.table]
        nodes += [_Node(record, is_unmatched=True) for record in location.unmatched_reference]
        named = [place for place, node in enumerate(nodes) if node.record.name == culprit.node]
        # forward and backward graphs have names in common: of one that is named twice, the wrong one is meant
        wrong = [place for place in named if (row := nodes[place].row) and rows.own_verdict(row).is_failure]
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
