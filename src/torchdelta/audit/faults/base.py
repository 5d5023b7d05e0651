"""What a fault is: a mistake that a compiler or a pass could make, at one node of an exported graph.

The graph is that of `torch.export`, before any decomposition. A fault says at which nodes it makes sense and changes
the graph there; choosing the node, and everything around it, is the work of `Planted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from torchdelta._torch.graphs.nodes import module_path, op_name, source_line
from torchdelta.errors import UsageError
from torchdelta.records.audit import Place


class NotPlantable(UsageError):
    """The program has no place for this kind of fault."""


class PlaceLost(NotPlantable):
    """The program in float64 has no such node as the one at which the fault was planted before."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of mistake."""

    name: str
    summary: str
    """What is computed instead, in one line."""
    needs: str
    """What a program must have for it, as in "it needs …"."""
    is_eligible: Callable[[Node], bool]
    plant: Callable[[Node], None]
    """Change the graph at an eligible node."""


def eligible_nodes(fault: Fault, graph: Graph) -> list[Node]:
    """Return the live nodes at which the fault can be planted, in the order of the graph."""
    live = _live(graph)
    return [node for node in graph.nodes if node in live and fault.is_eligible(node)]


def place_of(fault: Fault, node: Node, names: Mapping[str, str] | None = None) -> Place:
    """Say where a node is; `names` are the state's names in the graph module and in the program."""
    return Place(
        kind=fault.name,
        node=node.name,
        op=op_name(node),
        module_path=_renamed(module_path(node), names or {}),
        source_line=source_line(node),
    )


def _live(graph: Graph) -> set[Node]:
    """Return the nodes that an output or a change of state depends on."""
    waiting = [node for node in graph.nodes if node.op != "placeholder" and node.is_impure(impure_random=False)]
    live: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += node.all_input_nodes
    return live


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """Return a module's path in the program: what export takes is the program itself, or holds it under a name."""
    head, _, rest = path.partition(".")
    for own, original in names.items():
        if head and own.startswith(f"{head}."):
            renamed = original.removesuffix(own.removeprefix(f"{head}.")).rstrip(".")
            return ".".join(part for part in (renamed, rest) if part)
    return path


def eligible_places(fault: Fault, graph_module: GraphModule) -> tuple[Place, ...]:
    """Return every place in an exported program at which the fault can be planted."""
    return tuple(place_of(fault, node) for node in eligible_nodes(fault, graph_module.graph))
