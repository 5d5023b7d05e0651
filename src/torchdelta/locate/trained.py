"""Which nodes of a graph are on the way of a gradient: those that something trained leads to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch import graphs


def trained_nodes(graph_module: GraphModule, inputs: Sequence[Any]) -> set[Node]:
    """Return the nodes whose values depend on a parameter or an input that requires grad."""
    found = {node for node, value in starts_of(graph_module, inputs) if _is_trained(value)}
    is_recording = True
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            is_recording = bool(node.args[0])
        elif is_recording and not found.isdisjoint(node.all_input_nodes) and not _ends_here(node, graph_module):
            found.add(node)
    return found


def trained_leaves(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the leaves that a backward leaves gradients in, by the node that stands for each."""
    starts = starts_of(graph_module, inputs)
    return {node.name: value for node, value in starts if _is_trained(value) and value.is_leaf}


def starts_of(graph_module: GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[Node, Any]]:
    """Yield what a graph starts from, inputs and attributes, with their values."""
    feed = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            yield node, next(feed, None)
        elif node.op == "get_attr":
            yield node, graphs.attribute(graph_module, str(node.target))


def _ends_here(node: Node, graph_module: GraphModule) -> bool:
    """Tell whether no gradient goes through a node: it detaches, or what it returns is no float."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    value = graphs.known_value(node, graph_module)
    is_counted = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return is_counted or name.partition(".")[0].strip("_") == "detach"


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
