"""Nodes of an exported graph: an operator's arguments by name, and the assertions that export leaves behind."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator's call by the names of its schema, defaults included."""
    return {name: value for name, (value, _) in _bound(node).items()}


def set_argument(node: Node, name: str, value: Any) -> None:
    """Change one argument of an operator's call, wherever it stands."""
    bound = {**_bound(node)}
    bound[name] = (value, bound[name][1])
    node.args = tuple(value for value, is_keyword in bound.values() if not is_keyword)
    node.kwargs = {name: value for name, (value, is_keyword) in bound.items() if is_keyword}


def _bound(node: Node) -> dict[str, tuple[Any, bool]]:
    """Return each argument's value, and whether it can only be given by keyword."""
    assert isinstance(node.target, OpOverload)
    declared = node.target._schema.arguments
    # by keyword come those that have no place; by place there may be fewer than declared
    given = {**dict(zip((argument.name for argument in declared), node.args, strict=False)), **node.kwargs}
    return {
        argument.name: (given.get(argument.name, argument.default_value), argument.kwarg_only) for argument in declared
    }


def drop_metadata_assertions(graph_module: GraphModule) -> None:
    """Remove the assertions about dtypes and devices: a changed graph may break them, and they compute nothing."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    module.graph.erase_node(node)
            module.recompile()
