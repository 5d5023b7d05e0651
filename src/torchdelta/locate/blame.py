"""Who in a region is to blame: the last node, or one whose value it read and should not have.

A region that is wrong may end in a node that does its work and was only given something else: a residual that is left
out, a factor that was put in between. So each value that is read in the candidate's region is replaced by one that the
reference has there; if that mends the region, what the reference computes at this place is what the candidate lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.nodes import returns_what_it_writes
from torchdelta._torch.provenance import handles_of
from torchdelta.locate.regions import Region

TRIALS = 64

Edges = Mapping[tuple[Node, Node], Node]
"""Which node of the reference is read instead, by who is read and who reads."""


def blame(
    reference: Region,
    candidate: Region,
    values: Mapping[Node, Any],
    partners: Mapping[Node, Node],
    is_mended: Callable[[Edges], bool],
) -> Node:
    """Return the node of the reference whose work is not done; `values` has those of the reference's nodes."""
    for edge, instead in _replacements(reference, candidate, values, partners)[:TRIALS]:
        if is_mended({edge: instead}):
            return reference.result if _is_readers_work(edge[0], instead, reference, candidate, partners) else instead
    return reference.result


def _is_readers_work(
    wrong: Node, right: Node, reference: Region, candidate: Region, partners: Mapping[Node, Node]
) -> bool:
    """Tell whether what was read wrongly belongs to the reader.

    By its handle, because an input does no work, or because it was read after it was overwritten and not before.
    """
    if returns_what_it_writes(wrong) and isinstance(wrong.args[0], Node) and partners.get(wrong.args[0]) is right:
        return True
    if handles_of(wrong) & handles_of(reference.result):
        return True
    is_altered = right in [partners.get(node) for node in candidate.reads]
    return is_altered and right.op in ("placeholder", "get_attr")


def _replacements(
    reference: Region, candidate: Region, values: Mapping[Node, Any], partners: Mapping[Node, Node]
) -> list[tuple[tuple[Node, Node], Node]]:
    there = [
        node
        for node in (*reference.nodes[:-1], *reference.reads)
        if isinstance(values.get(node), (torch.Tensor, tuple, list))
    ]
    edges = [(source, node) for node in candidate.nodes for source in node.all_input_nodes]
    # what nobody matched, or what the reference does not read there, is more likely to be wrong
    edges.sort(key=lambda edge: partners.get(edge[0]) in reference.reads)
    return [(edge, instead) for edge in edges for instead in there if partners.get(edge[0]) is not instead]
