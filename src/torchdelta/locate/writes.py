"""What nodes write: whoever reads a value after a write reads the writer, and what is left in inputs is part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node

from torchdelta._torch import graphs
from torchdelta._torch.nodes import is_setting, may_share, returns_what_it_writes, writes_to, writes_to_first
from torchdelta.locate.regions import is_identical


def has_writers(module: GraphModule) -> bool:
    """Tell whether a node of the graph may write to what it reads."""
    return any(writes_to(node) for node in module.graph.nodes)


def reading_writers(module: GraphModule) -> GraphModule:
    """Return a copy in which who reads a value after a write to it reads what the writer returns, which is the same.

    Then a write that is left out is an edge to another node, as everything else is that a candidate loses.
    """
    if not any(returns_what_it_writes(node) for node in module.graph.nodes):
        return module
    made = graphs.sharing_parameters(module)
    read_writers(made)
    return made


def read_writers(module: GraphModule) -> None:
    """Let who reads a value after a write to it read what the writer returns."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for writer in list(module.graph.nodes):
        if returns_what_it_writes(writer):
            written = writer.args[0]
            assert isinstance(written, Node)
            for user in [user for user in written.users if order[user] > order[writer]]:
                user.replace_input_with(written, writer)
    module.recompile()


def stale_edges(module: GraphModule) -> set[tuple[Node, Node]]:
    """Return from whom to whom something is read that was written to since it was computed, through another node."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    found: set[tuple[Node, Node]] = set()
    shares: dict[Node, set[Node]] = {}
    for node in module.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        group = shares[source] if source is not None and may_share(node) else set()
        if is_setting(node) or writes_to_first(node):
            # a norm and a called module write to what they hold, which nobody else reads in between
            found |= {(other, user) for other in group for user in other.users if order[user] > order[node]}
        group.add(node)
        shares[node] = group
    return found


def written_directly(module: GraphModule) -> frozenset[Node]:
    """Return the nodes that nobody reads any more once they are written to."""
    return frozenset(
        node.args[0] for node in module.graph.nodes if returns_what_it_writes(node) and isinstance(node.args[0], Node)
    )


def changed(before: Mapping[Node, Any], after: Mapping[Node, Any]) -> dict[Node, Any]:
    """Return what is not the same any more, as it is now."""
    return {node: after[node] for node, value in before.items() if not is_identical(value, after[node])}
