"""Who stands in whose place: two calls are the same but for one node, which was put between a value and its reader."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from torchdelta._torch.provenance import handles_of


def is_same_call(ours: Node, theirs: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether both call the same with the same: then neither their values nor their gradients can differ."""
    if ours.op != theirs.op or ours.target != theirs.target or ours.op == "call_module":
        return False
    return bool(_line([ours.args, ours.kwargs], {}) == _line([theirs.args, theirs.kwargs], partners))


def is_same_output(ours: Node, theirs: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell a match from a guess: which of several nodes is one of an operator's outputs, handles do not say."""
    if ours.target is not operator.getitem:
        return True
    source, index = theirs.args[:2] if theirs.target is operator.getitem else (None, None)
    return isinstance(source, Node) and partners.get(source) is ours.args[0] and index == ours.args[1]


def inserted(partners: Mapping[Node, Node]) -> dict[Node, Node]:
    """Return the candidate's unmatched nodes that were put behind a matched one, and the reference's node for that.

    A reader that is the same call but for them says so: it reads there what the reference reads from that node. What
    was put there must be that value again, whatever its reader makes of it.
    """
    found: dict[Node, Node] = {}
    for theirs, ours in partners.items():
        mine, other = ours.all_input_nodes, theirs.all_input_nodes
        if len(mine) != len(other):
            continue
        between = {
            node: place
            for place, node in zip(mine, other, strict=True)
            if node not in partners
            and _is_behind(node, place, partners)
            and not handles_of(node) & handles_of(ours)  # that is its reader's own work
        }
        if between and is_same_call(ours, theirs, {**partners, **between}):
            found.update(between)
    return found


def _is_behind(node: Node, place: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether an unmatched node is computed from the place's own partner, through unmatched ones only."""
    waiting, met = [node], {node}
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if partners.get(source) is place:
                return True
            if source not in partners and source not in met:
                met.add(source)
                waiting.append(source)
    return False


def _line(value: Any, partners: Mapping[Node, Node]) -> Any:
    if isinstance(value, Node):
        return partners.get(value, value)
    if isinstance(value, (list, tuple)):
        return [_line(item, partners) for item in value]
    if isinstance(value, dict):
        return {key: _line(item, partners) for key, item in value.items()}
    return repr(value)
