"""A fault: a mistake that a compiler or a pass could make, at one node of an exported graph.

The graph is that of `torch.export`, before any decomposition. A `Fault` tells which nodes are eligible and changes the
graph at one of them. `transform.Planted` chooses the node and runs the result. Start with `Fault`.

The rest is for the families of faults. `is_call` and `is_arithmetic` tell which nodes are eligible; `replace_call`,
`add_after` and `add_before` plant the fault. `result_fault` and `call_fault` make the two most common kinds of fault
as a whole:

    result_fault("scale_by_1_001", "a result is too large by a thousandth", (aten.mul.Tensor, 1.001))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node

from torchdelta._torch.graphs.nodes import module_path, op_name, source_line
from torchdelta.errors import UsageError
from torchdelta.records.audit import Place

aten = torch.ops.aten

# operators that only pass values on or make constants, so that a fault in arithmetic does not fit there
_WITHOUT_ARITHMETIC = (
    *(aten.alias, aten.clone, aten.contiguous, aten.copy_, aten.detach, aten.expand, aten.expand_as, aten.flatten),
    *(aten.narrow, aten.permute, aten.reshape, aten.select, aten.slice, aten.squeeze, aten.t, aten.to, aten.transpose),
    *(aten.unflatten, aten.unsqueeze, aten.view, aten.view_as, aten.where),
    *(aten.arange, aten.empty, aten.empty_like, aten.full, aten.full_like, aten.ones, aten.ones_like, aten.zeros),
    *(aten.zeros_like, aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, aten.scalar_tensor),
)


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
    """Return every place in an exported program at which the fault can be planted; empty if there is none."""
    return tuple(place_of(fault, node) for node in eligible_nodes(fault, graph_module.graph))


def eligible_nodes(fault: Fault, graph: Graph) -> list[Node]:
    """Return the eligible nodes that an output or a change of state depends on, in the order of the graph."""
    live = _live_nodes(graph)
    return [node for node in graph.nodes if node in live and fault.is_eligible(node)]


def _live_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that an output or a change of state depends on, the output node and those changes included.

    Drawing random numbers alone is not a change of state. An input belongs to them only if one of them reads it.
    """
    waiting = [node for node in graph.nodes if node.op != "placeholder" and node.is_impure(impure_random=False)]
    live: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += node.all_input_nodes
    return live


def place_of(fault: Fault, node: Node, names: Mapping[str, str] | None = None) -> Place:
    """Return the place of a node as a record: kind of fault, node, operation, module and source line.

    `names` maps names of state in the graph module to those in the program, so that the module's path is the program's;
    without it, the path is the graph's.
    """
    return Place(
        kind=fault.name,
        node=node.name,
        op=op_name(node),
        module_path=_path_in_program(module_path(node), names or {}),
        source_line=source_line(node),
    )


def _path_in_program(path: str, names: Mapping[str, str]) -> str:
    """Return the path of a module in the program, given its path in the exported graph.

    Export may have wrapped the program, which adds a first name to the path; it is replaced by the program's own name
    for that module, or dropped. `names` maps names of state in the graph to those in the program; the first key that
    begins with the path's first name decides. The path is returned unchanged if there is no such key.
    """
    head, _, rest = path.partition(".")
    for own, original in names.items():
        if head and own.startswith(f"{head}."):
            renamed = original.removesuffix(own.removeprefix(f"{head}.")).rstrip(".")
            return ".".join(part for part in (renamed, rest) if part)
    return path


# Tests on a node


def is_call(value: object, *operators: Any) -> TypeGuard[Node]:
    """Tell whether the value is a node that calls one of the operators."""
    return isinstance(value, Node) and value.op == "call_function" and value.target in operators


def tensor_of(value: object) -> torch.Tensor | None:
    """Return the tensor that a node computes, often a fake one, from its metadata or the attribute that it reads.

    Return None if the value is not a node, or if no tensor is known for it.
    """
    if not isinstance(value, Node):
        return None
    known = value.meta.get("val")
    if known is None and value.op == "get_attr":
        known = attribute_of(value)
    return known if isinstance(known, torch.Tensor) else None


def attribute_of(node: Node) -> Any:
    """Return the attribute that a `get_attr` node reads."""
    return functools.reduce(getattr, str(node.target).split("."), node.graph.owning_module)


def is_floating(value: object) -> bool:
    """Tell whether the value is a node with a floating-point tensor."""
    tensor = tensor_of(value)
    return tensor is not None and tensor.is_floating_point()


def is_arithmetic(node: Node) -> bool:
    """Tell whether the node calls an operator that computes a floating-point tensor of at least two elements.

    Operators in `_WITHOUT_ARITHMETIC`, which only pass values on or make constants, do not count.
    """
    tensor = tensor_of(node)
    packet = getattr(node.target, "overloadpacket", None)
    is_computed = node.op == "call_function" and packet is not None and packet not in _WITHOUT_ARITHMETIC
    return is_computed and tensor is not None and tensor.is_floating_point() and tensor.numel() > 1


def is_sum_of_two(node: Node) -> bool:
    """Tell whether the node adds the floating-point tensors of two different nodes, as a residual connection does.

    They have the same shape, of two dimensions or more, and the same dtype. The sum may be in place, but has no keyword
    arguments such as `alpha`.
    """
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


# Changes of the graph


def replace_call(functions: Mapping[Any, Callable[..., Any]]) -> Callable[[Node], None]:
    """Return a function for `Fault.plant`, which lets a node call another function with the same arguments.

    `functions` maps operators to replacements; the node's operator has to be among them.
    """

    def plant(node: Node) -> None:
        node.target = functions[node.target]

    return plant


def add_after(node: Node, *calls: tuple[Any, ...]) -> None:
    """Add calls after a node, one after the other; all readers of the node read the last call instead.

    Each call is a tuple of an operator and its further arguments. Its first argument is not in the tuple: it is the
    node for the first call, and for every other the call before it.
    """
    readers = list(node.users)
    last = node
    for operator, *arguments in calls:
        with node.graph.inserting_after(last):
            last = _new_call(node, operator, last, *arguments)
    for reader in readers:
        reader.replace_input_with(node, last)


def add_before(node: Node, index: int, operator: Any, *arguments: Any) -> None:
    """Add a call before a node: its argument at `index` goes through the operator, with these further arguments."""
    with node.graph.inserting_before(node):
        node.update_arg(index, _new_call(node, operator, node.args[index], *arguments))


def _new_call(origin: Node, operator: Any, *arguments: Any) -> Node:
    """Return a new call at the graph's insertion point, with the origin's metadata except that of its value."""
    call = origin.graph.call_function(operator, arguments)
    # the metadata of the source stays true; that of the value does not
    call.meta = {key: value for key, value in origin.meta.items() if key not in ("val", "tensor_meta")}
    return call


# Common kinds of fault


def result_fault(name: str, summary: str, *calls: tuple[Any, ...], without: torch.dtype | None = None) -> Fault:
    """Return a fault that adds calls after an operation with a floating-point result of two elements or more.

    The calls are those of `add_after`. The eligible nodes are those of `has_result`, without results of the dtype
    `without`.
    """
    return Fault(
        name=name,
        summary=summary,
        needs=needs_result(without),
        is_eligible=has_result(without),
        plant=lambda node: add_after(node, *calls),
    )


def needs_result(without: torch.dtype | None = None) -> str:
    """Return the `Fault.needs` of a fault in any floating-point result, except of the dtype `without`."""
    exception = "" if without is None else f" in another dtype than {str(without).removeprefix('torch.')}"
    return f"an operation with a floating-point result{exception}"


def has_result(without: torch.dtype | None = None) -> Callable[[Node], bool]:
    """Return a function for `Fault.is_eligible`: whether a node `is_arithmetic` and its dtype is not `without`.

    So the node computes a floating-point tensor of two elements or more; with None for `without`, of any dtype.
    """

    def is_eligible(node: Node) -> bool:
        tensor = tensor_of(node)
        return is_arithmetic(node) and tensor is not None and tensor.dtype is not without

    return is_eligible


def call_fault(name: str, summary: str, needs: str, functions: Mapping[Any, Callable[..., Any]]) -> Fault:
    """Return a fault that replaces the operator of a call; `functions` maps eligible operators to replacements."""
    return Fault(
        name=name,
        summary=summary,
        needs=needs,
        is_eligible=lambda node: is_call(node, *functions),
        plant=replace_call(functions),
    )
