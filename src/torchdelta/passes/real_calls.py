"""Real calls of a graph: which of them can be checked, and how a check calls the graph.

A check runs on copies of the inputs of a call that is about to run. It must change nothing that the call sees, and its
verdict must not depend on where the call is: in a training step, in inference mode or in a backward.

Start with `require_checkable` and `adapt_call`.
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
"""Operators with effects besides their results, which a second run would have again."""


class UncheckedCall(Exception):
    """Raised with the reason why a call is not checked."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A graph as it was handed over. It is not a module, so that the user's global module hooks do not run."""

    graph: GraphModule

    def __call__(self, *args: Any) -> Any:
        """Run the graph on these arguments, and return its outputs."""
        return self.graph.forward(*args)


def have_values(args: Sequence[Any]) -> bool:
    """Tell whether all tensors that are arguments themselves have values, which fake and meta tensors do not."""
    return all(tensors.has_values(arg) for arg in args if isinstance(arg, torch.Tensor))


def require_checkable(graph_module: GraphModule, args: Sequence[Any]) -> None:
    """Raise UncheckedCall with the reason if a call of a graph cannot be checked; otherwise do nothing.

    The first reason that applies is given: argument tensors without values (`have_values`), collectives with other
    processes, random numbers in inductor's own way, operators with effects (`EFFECTS`), parameters of the graph that
    require grad or attributes of it that a node may write to.
    """
    if not have_values(args):
        raise UncheckedCall("it was called with tensors that have no values")
    if needs_other_processes(graph_module):
        raise UncheckedCall(TALKS)
    if has_inductor_randoms(graph_module):
        raise UncheckedCall("it draws random numbers in the compiler's own way: a guard of dynamo's graphs checks it")
    if any(op_name(node) in EFFECTS for node in every_node(graph_module)):
        raise UncheckedCall("it does something besides computing, and a check would do it again")
    # a graph into which dynamo inlined the modules has neither
    is_trained = any(parameter.requires_grad for parameter in graph_module.parameters())
    if is_trained or any(node.op == "get_attr" for node in _written(graph_module)):
        raise UncheckedCall("it holds state of its own, which a check would change")


def detach_inputs(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments in a tuple: a detached alias for each tensor, the hint for each symbolic number.

    Any other argument is passed on as it is; containers are not searched. An alias shares the memory of its tensor and,
    except for inference tensors, keeps its `requires_grad`; it is a leaf. The hint is the number at capture, or None if
    it is unknown.
    """

    def detach(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return dynamo.hint_of(arg)
        alias = arg.detach()
        return alias.requires_grad_() if arg.requires_grad and not alias.is_inference() else alias

    return tuple(map(detach, args))


def written_nonleaves(graph_module: GraphModule, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of the input tensors that a node may write to, that require grad and are not leaves.

    Places count the placeholders from 0 and are ascending; there are none while gradients are disabled. `may_write`
    decides; a write to a view of an input is not seen. A check passes leaves, and a leaf that requires grad cannot be
    written to, so these inputs need clones.
    """
    if not torch.is_grad_enabled():
        return ()
    places = {node: place for place, node in enumerate(_placeholders(graph_module))}
    written = sorted(places[node] for node in _written(graph_module) if node in places)
    tensors_at = ((place, args[place]) for place in written if isinstance(args[place], torch.Tensor))
    return tuple(place for place, arg in tensors_at if arg.requires_grad and not arg.is_leaf)


def adapt_call(run: Run, graph_module: GraphModule, level: str, cloned: Sequence[int]) -> Run:
    """Return a function that runs the compiled graph `run`, and returns what the graph of `return_written` returns.

    The function clones the tensors at the places `cloned` before the run, and returns the clones after the outputs. At
    the `level` "backward" it also clones the tensors that `graph_module`, the original, only reads, because a compiled
    backward may reuse their memory; these clones are not returned. Several outputs come as a list if the original
    returns a list and `cloned` is empty, and else as a tuple.
    """
    kind = list if isinstance(graph_module.graph.output_node().args[0], list) and not cloned else tuple
    written = _written(graph_module)
    places = [place for place, node in enumerate(_placeholders(graph_module)) if node not in written]
    to_clone = {*(places if level == "backward" else ()), *cloned}

    def call(*args: Any) -> Any:
        """Run the compiled graph on these arguments, some of them cloned; return its outputs, then the clones."""
        inner = [arg.clone() if place in to_clone and _is_tensor(arg) else arg for place, arg in enumerate(args)]
        values = run(*inner)
        if not isinstance(values, (tuple, list)):
            if not cloned:
                return values
            values = [values]
        return kind([*values, *(inner[place] for place in cloned)])

    return call


def return_written(graph_module: GraphModule, cloned: Sequence[int]) -> GraphModule:
    """Return a copy of the graph that writes to clones of the inputs at these places, and returns the clones as well.

    `cloned` has these places. If it is empty, return the graph itself. `adapt_call` does the same for the compiled
    graph.
    """
    return graphs.return_inputs(graph_module, cloned) if cloned else graph_module


def _written(graph_module: GraphModule) -> set[Any]:
    """Return the nodes to whose values any node of the graph may write."""
    return {source for node in graph_module.graph.nodes for source in may_write(node)}


def _placeholders(graph_module: GraphModule) -> list[Any]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
