"""FX graphs as passes hand them over: sorted before they run, called by whichever convention they have."""

from __future__ import annotations

import copy
import functools
import heapq
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.utils._pytree import tree_leaves, tree_unflatten

from torchdelta._torch.modes.outside import outside_modes

aten = torch.ops.aten

Pass = Callable[[GraphModule, Sequence[Any]], Any]


def as_callable(result: Any, graph_module: GraphModule) -> Callable[..., Any]:
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


def after_aot(compiler: Callable[[GraphModule, Sequence[Any], str], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a torch.compile backend whose compiler gets each functionalised graph, and which of them it is."""

    def named(level: str) -> Callable[..., Any]:
        return lambda graph_module, inputs: make_boxed_func(compiler(graph_module, inputs, level))

    return aot_autograd(
        fw_compiler=named("forward"), bw_compiler=named("backward"), inference_compiler=named("inference")
    )


def read_before_update(graph_module: GraphModule) -> None:
    """Let every reader of a buffer or input that the graph updates at its end read a copy of it.

    Autograd saves what an operation read, and refuses a backward once that was written to: a functionalised graph
    that writes them back could be run but not trained.
    """
    graph = graph_module.graph
    for node in [node for node in graph.nodes if node.op in ("get_attr", "placeholder")]:
        writers = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
        if not writers:
            continue
        # behind the last placeholder: they come before everything else
        with graph.inserting_after(node if node.op == "get_attr" else _last_placeholder(graph)):
            snapshot = graph.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(snapshot, lambda user, kept=(*writers, snapshot): user not in kept)
    graph_module.recompile()


def _last_placeholder(graph: Graph) -> Node:
    found: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return found[-1]


def flatten_signature(graph_module: GraphModule) -> GraphModule:
    """Let a graph take and return its values one by one, although its caller gives and takes structures."""
    graph_module.graph.set_codegen(CodeGen())
    graph_module.recompile()
    return graph_module


def flat_inputs(graph_module: GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """Return what the placeholders of a graph are given when it is called so."""
    codegen = graph_module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        return tree_leaves((tuple(args), dict(kwargs or {})))
    return list(args)


def output_builder(graph_module: GraphModule) -> Callable[[Sequence[Any]], Any]:
    """Return what makes of a graph's values what it returned to its caller."""
    codegen = graph_module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen) and codegen.pytree_info.out_spec is not None:
        spec = codegen.pytree_info.out_spec
        return lambda values: tree_unflatten(list(values), spec)
    returned = graph_module.graph.output_node().args[0]
    return (lambda values: tuple(values)) if isinstance(returned, (list, tuple)) else (lambda values: values[0])


def bytes_of(node: Node) -> int:
    """Return how much memory a node's value takes, as far as the graph says."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(int(size) for size in value.shape) * value.itemsize


def attribute(graph_module: GraphModule, target: str) -> Any:
    """Return what a `get_attr` node of that target reads."""
    return functools.reduce(getattr, target.split("."), graph_module)


def known_value(node: Node, graph_module: GraphModule) -> Any:
    """Return the value that a node stands for, real or fake; None where nobody said."""
    if node.op == "get_attr":
        return attribute(graph_module, str(node.target))
    return node.meta.get("val", node.meta.get("example_value"))


def has_fixed_float(node: Node, graph_module: GraphModule) -> bool:
    """Tell whether a node stands for a float tensor whose size is a number."""
    value = known_value(node, graph_module)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and all(isinstance(size, int) for size in value.shape)


def copy_sharing_parameters(graph_module: GraphModule) -> GraphModule:
    """Return a copy that has the same parameters, which running it does not change, and everything else of its own."""
    made = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for module in made.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.clone()
    return made


def copy_nodes(graph_module: GraphModule) -> GraphModule:
    """Return a copy over the same attributes: what a compiler does to the nodes of one, the other does not see."""
    with outside_modes():
        made = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for node in made.graph.nodes:
        inner = attribute(made, str(node.target)) if node.op in ("get_attr", "call_module") else None
        if isinstance(inner, GraphModule):
            made.set_submodule(str(node.target), copy_nodes(inner))
    # one that is written when it is first called calls itself as a module then, and hooks of the user's with it
    _LazyGraphModule.force_recompile(made)
    return made


def return_inputs(graph_module: GraphModule, places: Sequence[int]) -> GraphModule:
    """Return the graph with copies in the place of these inputs, which it returns as well: what it writes is there.

    Autograd lets nobody write to a leaf that requires grad, and whatever is handed over by itself is one.
    """
    made = copy_nodes(graph_module)
    given = [node for node in made.graph.nodes if node.op == "placeholder"]
    copies = []
    for place in places:
        with made.graph.inserting_after(given[-1]):
            copies.append(made.graph.call_function(torch.clone, (given[place],)))
        given[place].replace_all_uses_with(copies[-1], lambda user, copied=copies[-1]: user is not copied)
    ending = made.graph.output_node()
    returned = ending.args[0]
    ending.args = ((*(returned if isinstance(returned, (tuple, list)) else (returned,)), *copies),)
    made.recompile()
    return made


def copy_graph(graph_module: GraphModule) -> GraphModule:
    """Return a copy that shares nothing, although AOTAutograd hands graphs over while new tensors are fake ones."""
    with outside_modes():
        return copy.deepcopy(graph_module)
