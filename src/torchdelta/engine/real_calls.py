"""Real calls of a graph: which of them can be checked, and as what.

A check runs copies of what a call is about to be given. It must change nothing that the call sees, and say the same
whatever the call is part of: a training step, inference mode, a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch import dynamo, tensors
from torchdelta._torch.nodes import may_write, op_name
from torchdelta.engine.ledger import Unchecked

Run = Callable[..., Any]
OWN_DRAWS = ("prims.inductor_random", "prims.inductor_randint", "prims.inductor_seed")
"""What inductor has for random numbers behind AOTAutograd, before it is asked to compile anything."""


def require_checkable(graph_module: GraphModule, args: Sequence[Any]) -> None:
    """Raise Unchecked with why a call of a graph cannot be checked."""
    if not have_values(args):
        raise Unchecked("it was called with tensors that have no values")
    if _talks_to_others(graph_module):
        raise Unchecked("it talks to other processes, and all of them would have to check it at the same time")
    if any(op_name(node).startswith(OWN_DRAWS) for node in graph_module.graph.nodes):
        raise Unchecked("it draws random numbers in the compiler's own way: a guard of dynamo's graphs checks it")
    if _would_change(graph_module):
        raise Unchecked("it holds state of its own, which a check would change")


def have_values(args: Sequence[Any]) -> bool:
    """Tell whether there are numbers behind all tensors."""
    return all(tensors.has_values(arg) for arg in args if isinstance(arg, torch.Tensor))


def inputs_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments as leaves that share their memory: without hooks, gradients and where they come from."""

    def leaf(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return dynamo.hint_of(arg)
        alias = arg.detach()
        return alias.requires_grad_() if arg.requires_grad and not alias.is_inference() else alias

    return tuple(map(leaf, args))


def _talks_to_others(graph_module: GraphModule) -> bool:
    together = torch.distributed
    if not (together.is_available() and together.is_initialized() and together.get_world_size() > 1):
        return False
    return any("c10d" in op_name(node) for node in graph_module.graph.nodes)


def _would_change(graph_module: GraphModule) -> bool:
    """Tell whether running what was made of the graph changes tensors that are not among its arguments."""
    if any(parameter.requires_grad for parameter in graph_module.parameters()):
        return True
    written = {source for node in graph_module.graph.nodes for source in may_write(node)}
    return any(node.op == "get_attr" for node in written)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, in which tensors of a check would not be like others; nothing is recorded either way."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def sparing(run: Run, graph_module: GraphModule, level: str) -> Run:
    """Return what runs without changing what it may: a backward may use the memory of what was saved for it."""
    if level != "backward":
        return run
    nodes = graph_module.graph.nodes
    written = {source for node in nodes for source in may_write(node)}
    is_kept = [node in written for node in nodes if node.op == "placeholder"]

    def spare(*args: Any) -> Any:
        pairs = zip(args, is_kept, strict=True)
        return run(*(arg if kept or not isinstance(arg, torch.Tensor) else arg.clone() for arg, kept in pairs))

    return spare
