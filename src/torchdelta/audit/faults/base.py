"""A fault: a mistake that a compiler or a pass could make, at one node of an exported graph.

The graph is that of `torch.export`, before any decomposition. A `Fault` tells which nodes are eligible and changes the
graph at one of them. `transform.Planted` chooses the node and runs the result. Start with `Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from torchdelta._torch.graphs.nodes import module_path, op_name, source_line
from torchdelta.errors import UsageError
from torchdelta.records.audit import Place


class NotPlantable(UsageError):
    """The program has no node that is eligible for this kind of fault."""


class PlaceLost(NotPlantable):
    """The program in float64 does not have the node at which the fault was planted natively."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of mistake, with the nodes where it can be made."""

    name: str
    summary: str
    """One line on what the faulty node computes."""
    needs: str
    """What the program must contain, as the end of a sentence that starts with "it needs"."""
    is_eligible: Callable[[Node], bool]
    plant: Callable[[Node], None]
    """Changes the graph at an eligible node."""


def eligible_places(fault: Fault, graph_module: GraphModule) -> tuple[Place, ...]:
    """Return every place in an exported program at which the fault can be planted."""
    return tuple(place_of(fault, node) for node in eligible_nodes(fault, graph_module.graph))


def eligible_nodes(fault: Fault, graph: Graph) -> list[Node]:
    """Return the eligible nodes that an output or a change of state depends on, in the order of the graph."""
    live = _live_nodes(graph)
    return [node for node in graph.nodes if node in live and fault.is_eligible(node)]


def _live_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that an output or a change of state depends on."""
    waiting = [node for node in graph.nodes if node.op != "placeholder" and node.is_impure(impure_random=False)]
    live: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += node.all_input_nodes
    return live


def place_of(fault: Fault, node: Node, names: Mapping[str, str] | None = None) -> Place:
    """Return the place of a node: its operation, module and source line.

    `names` maps names of state in the graph module to those in the program, so that the module's path is the program's.
    """
    return Place(
        kind=fault.name,
        node=node.name,
        op=op_name(node),
        module_path=_path_in_program(module_path(node), names or {}),
        source_line=source_line(node),
    )


def _path_in_program(path: str, names: Mapping[str, str]) -> str:
    """Return the path of a module in the program; export may have wrapped the program, which adds a first name."""
    head, _, rest = path.partition(".")
    for own, original in names.items():
        if head and own.startswith(f"{head}."):
            renamed = original.removesuffix(own.removeprefix(f"{head}.")).rstrip(".")
            return ".".join(part for part in (renamed, rest) if part)
    return path
