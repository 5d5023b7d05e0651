"""Handles: ids on the nodes of a graph that survive copies and rewrites, so that two graphs can be matched.

Torch carries them through export, re-export, decomposition and `node_copy`; pickling a graph loses them, so a graph is
saved here with a list of them beside it.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch import provenance
from torchdelta._torch.provenance import handles_of, merge_handles
from torchdelta.errors import UsageError

__all__ = ["assign_handles", "handles_of", "load_graph", "merge_handles", "save_graph"]

_FORMAT = "torchdelta graph 1"


def assign_handles(program: GraphModule | torch.export.ExportedProgram) -> None:
    """Give every node but placeholders and outputs, nested graphs included, an id; those that have one keep it."""
    if not isinstance(program, (GraphModule, torch.export.ExportedProgram)):
        raise UsageError(
            f"handles are for the nodes of a graph module or an exported program, and {type(program).__name__} has "
            "none: trace or export it first"
        )
    provenance.assign_handles(program)


def save_graph(graph_module: GraphModule, path: str | Path) -> None:
    """Write a traced graph with its handles to a file."""
    kept = {place: sorted(handles_of(node)) for place, node in _places(graph_module)}
    try:
        torch.save({"format": _FORMAT, "graph": graph_module, "handles": kept}, path)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UsageError(
            f"{type(graph_module).__name__} cannot be pickled ({error}); an exported program is saved, with its "
            "handles, by torch.export.save"
        ) from error


def load_graph(path: str | Path) -> GraphModule:
    """Read a graph that `save_graph` wrote; like every pickle, it can run code of whoever wrote it."""
    found: Any = torch.load(path, weights_only=False)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UsageError(f"{path} is no graph that save_graph wrote")
    graph_module: GraphModule = found["graph"]
    nodes = dict(_places(graph_module))
    if nodes.keys() != found["handles"].keys():
        strays = ", ".join(
            f"{target} of {graph or 'the graph'}" for graph, _, target, _ in nodes.keys() ^ found["handles"]
        )
        raise UsageError(
            f"{path}: the graph was read back with other nodes than were written ({strays}): trace it anew"
        )
    for place, handles in found["handles"].items():
        if handles:
            provenance.write_handles(nodes[place], handles)
    return graph_module


def _places(graph_module: GraphModule) -> Iterator[tuple[tuple[str, str, str, int], Node]]:
    """Yield each node with what a pickled graph keeps of it: its graph, what it calls, and the how-manieth such call.

    Names and the order of constants may change, because reading a pickled graph traces its code again.
    """
    met: Counter[tuple[str, str, str]] = Counter()
    for path, nested in provenance.graphs_in(graph_module):
        for node in nested.graph.nodes:
            place = (path, node.op, str(node.target))
            if node.op not in ("placeholder", "output"):
                yield (*place, met[place]), node
                met[place] += 1
