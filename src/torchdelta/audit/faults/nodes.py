"""What faults ask of a node, and how they change what its readers get."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch.fx import Node

aten = torch.ops.aten

# they hand values on or make up constants: a fault in arithmetic has nothing to do there
_NO_ARITHMETIC = (
    *(aten.alias, aten.clone, aten.contiguous, aten.copy_, aten.detach, aten.expand, aten.expand_as, aten.flatten),
    *(aten.narrow, aten.permute, aten.reshape, aten.select, aten.slice, aten.squeeze, aten.t, aten.to, aten.transpose),
    *(aten.unflatten, aten.unsqueeze, aten.view, aten.view_as, aten.where),
    *(aten.arange, aten.empty, aten.empty_like, aten.full, aten.full_like, aten.ones, aten.ones_like, aten.zeros),
    *(aten.zeros_like, aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, aten.scalar_tensor),
)


def is_call(value: object, *operators: Any) -> TypeGuard[Node]:
    """Tell whether this is a call of one of the operators."""
    return isinstance(value, Node) and value.op == "call_function" and value.target in operators


def tensor_of(value: object) -> torch.Tensor | None:
    """Return the tensor that a node stands for, real or fake; None where it stands for none."""
    if not isinstance(value, Node):
        return None
    known = value.meta.get("val")
    if known is None and value.op == "get_attr":
        known = attribute_of(value)
    return known if isinstance(known, torch.Tensor) else None


def attribute_of(node: Node) -> Any:
    """Return what a `get_attr` node reads."""
    return functools.reduce(getattr, str(node.target).split("."), node.graph.owning_module)


def is_floating(value: object) -> bool:
    """Tell whether this is a node that stands for a floating-point tensor."""
    tensor = tensor_of(value)
    return tensor is not None and tensor.is_floating_point()


def is_arithmetic(node: Node) -> bool:
    """Tell whether the node computes floating-point numbers, at least two of them."""
    tensor = tensor_of(node)
    packet = getattr(node.target, "overloadpacket", None)
    is_computed = node.op == "call_function" and packet is not None and packet not in _NO_ARITHMETIC
    return is_computed and tensor is not None and tensor.is_floating_point() and tensor.numel() > 1


def is_sum_of_two(node: Node) -> bool:
    """Tell whether the node adds two floating-point tensors of one shape, as a residual connection does."""
    if not is_call(node, aten.add.Tensor, aten.add_.Tensor) or node.kwargs:
        return False
    first, second = map(tensor_of, node.args[:2])
    return (
        first is not None
        and second is not None
        and first.is_floating_point()
        and (first.shape, first.dtype) == (second.shape, second.dtype)
        and first.dim() >= 2
        and node.args[0] is not node.args[1]
    )


def call_instead(functions: Mapping[Any, Callable[..., Any]]) -> Callable[[Node], None]:
    """Return what makes a node call another function with its arguments; the functions are by what they replace."""

    def plant(node: Node) -> None:
        node.target = functions[node.target]

    return plant


def follow(node: Node, *calls: tuple[Any, ...]) -> None:
    """Let every reader of the node read it through these calls, each an operator and its arguments after the first."""
    readers = list(node.users)
    last = node
    for operator, *arguments in calls:
        with node.graph.inserting_after(last):
            last = _made(node, operator, last, *arguments)
    for reader in readers:
        reader.replace_input_with(node, last)


def precede(node: Node, index: int, operator: Any, *arguments: Any) -> None:
    """Let the node read one of its arguments through a call."""
    with node.graph.inserting_before(node):
        node.update_arg(index, _made(node, operator, node.args[index], *arguments))


def _made(origin: Node, operator: Any, *arguments: Any) -> Node:
    made = origin.graph.call_function(operator, arguments)
    # where it comes from is still true of it; what it is known to compute is not
    made.meta = {key: value for key, value in origin.meta.items() if key not in ("val", "tensor_meta")}
    return made
