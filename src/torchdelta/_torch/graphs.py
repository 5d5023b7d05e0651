"""FX graphs as passes hand them over: sorted before they run, called by whichever convention they have."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

aten = torch.ops.aten

Pass = Callable[[GraphModule, Sequence[Any]], Any]


def runnable(result: Any, graph_module: GraphModule) -> Callable[..., Any]:
    """Return what a pass gave back, ready to be called: a pass that returns nothing changed its graph in place."""
    made = graph_module if result is None else result
    if isinstance(made, GraphModule):
        sort_topologically(made)
        made.recompile()
    elif not callable(made):
        raise TypeError(
            f"a pass must return a callable or change its graph in place, and returned {type(made).__name__}"
        )
    return _unboxed(made) if _is_boxed(made) else made


def _is_boxed(function: Any) -> bool:
    # AOTAutograd marks what it returns to dynamo as boxed although it takes its arguments one by one
    code = getattr(function, "__code__", None)
    takes_any_number = code is not None and bool(code.co_flags & inspect.CO_VARARGS)
    return bool(getattr(function, "_boxed_call", False)) and not takes_any_number


def _unboxed(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    return lambda *args: function(list(args))


def sort_topologically(graph_module: GraphModule) -> None:
    """Put every node behind its inputs; of those that could go next, the one that stood first does."""
    nodes = list(graph_module.graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    if all(order[source] < order[node] for node in nodes for source in node.all_input_nodes):
        return
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [order[node] for node in nodes if not missing[node]]
    heapq.heapify(ready)
    last: Node | None = None
    placed = 0
    while ready:
        node = nodes[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last, placed = node, placed + 1
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, order[user])
    if placed < len(nodes):
        stuck = next(node for node in nodes if missing[node])
        raise ValueError(f"the graph has a cycle through {stuck.name}")


def aten_backend(transform: Pass) -> Callable[..., Any]:
    """Return a torch.compile backend that hands the pass the functionalised forward and backward graphs."""

    def compiler(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(runnable(transform(graph_module, example_inputs), graph_module))  # type: ignore[no-any-return]

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def read_before_update(graph_module: GraphModule) -> None:
    """Let every reader of a buffer that the graph updates at its end read a copy of it.

    Autograd saves what an operation read, and refuses a backward once that was written to: a functionalised graph
    that writes its buffers back could be run but not trained.
    """
    graph = graph_module.graph
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        writers = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
        if not writers:
            continue
        with graph.inserting_after(node):
            snapshot = graph.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(snapshot, lambda user, kept=(*writers, snapshot): user not in kept)
    graph_module.recompile()
