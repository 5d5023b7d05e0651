"""Real calls of a graph: which of them can be checked, and as what.

A check runs copies of what a call is about to be given. It must change nothing that the call sees, and say the same
whatever the call is part of: a training step, inference mode, a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch import tensors
from torchdelta._torch.compile import dynamo
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import every_node, has_inductor_randoms, may_write, needs_other_processes, op_name

Run = Callable[..., Any]
TALKS = "it talks to other processes, and all of them would have to check it at the same time"
EFFECTS = ("with_effects", "print", "call_torchbind")
"""Operators that do something besides computing: what is run again does it again."""


class UncheckedCall(Exception):
    """Why a call is not checked."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A graph as it was handed over. It is no module: hooks on modules are the user's, and not for a check."""

    graph: GraphModule

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        return self.graph.forward(*args)


def have_values(args: Sequence[Any]) -> bool:
    """Tell whether there are numbers behind all tensors."""
    return all(tensors.has_values(arg) for arg in args if isinstance(arg, torch.Tensor))


def require_checkable(graph_module: GraphModule, args: Sequence[Any]) -> None:
    """Raise UncheckedCall with why a call of a graph cannot be checked."""
    if not have_values(args):
        raise UncheckedCall("it was called with tensors that have no values")
    if needs_other_processes(graph_module):
        raise UncheckedCall(TALKS)
    if has_inductor_randoms(graph_module):
        raise UncheckedCall("it draws random numbers in the compiler's own way: a guard of dynamo's graphs checks it")
    if any(op_name(node) in EFFECTS for node in every_node(graph_module)):
        raise UncheckedCall("it does something besides computing, and a check would do it again")
    # a graph that was inlined has neither
    is_trained = any(parameter.requires_grad for parameter in graph_module.parameters())
    if is_trained or any(node.op == "get_attr" for node in _written(graph_module)):
        raise UncheckedCall("it holds state of its own, which a check would change")


def inputs_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments as leaves that share their memory: without hooks, gradients and where they come from."""

    def leaf(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return dynamo.hint_of(arg)
        alias = arg.detach()
        return alias.requires_grad_() if arg.requires_grad and not alias.is_inference() else alias

    return tuple(map(leaf, args))


def written_midway(graph_module: GraphModule, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of what the graph writes to in the middle of a differentiated computation: no leaf is that."""
    if not torch.is_grad_enabled():
        return ()
    places = {node: place for place, node in enumerate(_placeholders(graph_module))}
    written = sorted(places[node] for node in _written(graph_module) if node in places)
    tensors_at = ((place, args[place]) for place in written if isinstance(args[place], torch.Tensor))
    return tuple(place for place, arg in tensors_at if arg.requires_grad and not arg.is_leaf)


def called_alike(run: Run, graph_module: GraphModule, level: str, midway: Sequence[int]) -> Run:
    """Return what was made of a graph, called as the graph is in a check.

    It returns what the graph does in the same container, and besides what is written midway. A backward may use the
    memory of what was saved for it, so it gets copies of what the graph itself does not write to.
    """
    kind = list if isinstance(graph_module.graph.output_node().args[0], list) and not midway else tuple
    written = _written(graph_module)
    places = [place for place, node in enumerate(_placeholders(graph_module)) if node not in written]
    spared = {*(places if level == "backward" else ()), *midway}

    def call(*args: Any) -> Any:
        given = [arg.clone() if place in spared and _is_tensor(arg) else arg for place, arg in enumerate(args)]
        values = run(*given)
        if not isinstance(values, (tuple, list)):
            if not midway:
                return values
            values = [values]
        return kind([*values, *(given[place] for place in midway)])

    return call


def as_checked(graph_module: GraphModule, midway: Sequence[int]) -> GraphModule:
    """Return the graph that is held against what was made of it."""
    return graphs.return_inputs(graph_module, midway) if midway else graph_module


def _written(graph_module: GraphModule) -> set[Any]:
    return {source for node in graph_module.graph.nodes for source in may_write(node)}


def _placeholders(graph_module: GraphModule) -> list[Any]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
