"""Faults in training: values are right at first, and wrong for gradients, later steps or later readers."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import Fault, aten, attribute_of, is_call, is_sum_of_two, result_fault


def _is_trained(node: Node) -> bool:
    """Tell whether the node reads a parameter that requires grad."""
    if node.op != "get_attr":
        return False
    parameter = attribute_of(node)
    return isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


def _freeze(node: Node) -> None:
    """Let all readers of the node of a parameter read a detached copy of the parameter's current value instead.

    The copy is added to the graph module as a buffer `stale_NAME`, after the node's name.
    """
    module = node.graph.owning_module
    assert module is not None
    name = f"stale_{node.name}"
    module.register_buffer(name, attribute_of(node).detach().clone())
    with node.graph.inserting_after(node):
        stale = node.graph.get_attr(name)
    node.replace_all_uses_with(stale)


def _is_inactive(node: Node) -> bool:
    """Tell whether the node is a dropout that does nothing: it is not training, or drops with probability 0."""
    if not is_call(node, aten.dropout.default):
        return False
    values = arguments(node)
    return not (values["train"] and values["p"])


def _activate(node: Node) -> None:
    """Let a dropout in the graph drop elements as in training, with its own probability, or 0.1 if that is 0."""
    set_argument(node, "train", True)
    set_argument(node, "p", arguments(node)["p"] or 0.1)


def _later_readers(node: Node) -> list[Node]:
    """Return the nodes that read the first operand of a node after that node ran."""
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    return [reader for reader in node.all_input_nodes[0].users if order[reader] > order[node]]


def _overwrite(node: Node) -> None:
    """Let later readers of the first operand read the sum, as if the sum had been written over it."""
    for reader in _later_readers(node):
        reader.replace_input_with(node.all_input_nodes[0], node)


FAULTS = (
    result_fault("gradient_detached", "no gradient flows back through a result", (aten.detach.default,)),
    Fault(
        name="parameter_stale",
        summary="a parameter is read once and for all: it has no gradient, and its changes are not seen",
        needs="a trained parameter",
        is_eligible=_is_trained,
        plant=_freeze,
    ),
    Fault(
        name="dropout_active",
        summary="a dropout that is off is on",
        needs="a dropout that does nothing",
        is_eligible=_is_inactive,
        plant=_activate,
    ),
    Fault(
        name="operand_overwritten",
        summary="a sum overwrites its first operand, which others read later",
        needs="an addition of two tensors of one shape, the first of which is read again",
        is_eligible=lambda node: is_sum_of_two(node) and bool(_later_readers(node)),
        plant=_overwrite,
    ),
)
