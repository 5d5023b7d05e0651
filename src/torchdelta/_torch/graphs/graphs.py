"""Whole FX graphs: make the result of a pass callable, copy a graph, and convert between its calling conventions.

A pass may leave nodes out of order, return a function that takes its arguments as one list ("boxed"), or change the
graph in place: `as_callable` handles all of these. Single nodes are in `nodes.py`.
"""

from __future__ import annotations

import copy
import functools
import heapq
import inspect
import linecache
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.fx.graph_module import _loader
from torch.utils._pytree import tree_leaves, tree_unflatten

from torchdelta._torch.modes.outside import outside_modes

aten = torch.ops.aten


def as_callable(result: Any, graph_module: GraphModule) -> Callable[..., Any]:
    """Return the result of a pass as a callable that takes its arguments one by one.

    A result of None stands for `graph_module`, which the pass changed in place. A graph module gets its nodes sorted
    and is recompiled, in place; raise ValueError if it has a cycle. A function that takes its arguments as one list is
    wrapped. Raise TypeError if the result is neither None nor callable.
    """
    function = graph_module if result is None else result
    if isinstance(function, GraphModule):
        sort_topologically(function)
        function.recompile()
    elif not callable(function):
        raise TypeError(
            f"a pass must return a callable or change its graph in place, and returned {type(function).__name__}"
        )
    return _unbox(function) if _is_boxed(function) else function


def _is_boxed(function: Any) -> bool:
    """Tell whether a function is marked as one that takes its arguments as one list.

    False for one with `*args`: AOTAutograd marks such functions too.
    """
    # AOTAutograd also marks the function that it returns to dynamo, which takes its arguments one by one
    code = getattr(function, "__code__", None)
    takes_any_number = code is not None and bool(code.co_flags & inspect.CO_VARARGS)
    return bool(getattr(function, "_boxed_call", False)) and not takes_any_number


def _unbox(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Return a function that takes its arguments one by one, and passes them to the given one as a list."""
    return lambda *args: function(list(args))


def sort_topologically(graph_module: GraphModule) -> None:
    """Reorder the nodes of a graph in place so that each comes after its inputs.

    Of the nodes whose inputs are placed, the one that came first before is next; a sorted graph stays as it is. The
    module is not recompiled. Raise ValueError if the graph has a cycle; some nodes may have been moved by then.
    """
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
    """Return a torch.compile backend that calls `compiler` with each functionalised graph, its inputs and its kind.

    The kind is the text `forward`, `backward` or `inference`. `compiler` has to return the function that is run in
    place of the graph, and that takes the inputs one by one.
    """

    def compile_as(level: str) -> Callable[..., Any]:
        return lambda graph_module, inputs: make_boxed_func(compiler(graph_module, inputs, level))

    return aot_autograd(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
    )


def read_before_update(graph_module: GraphModule) -> None:
    """Change a functionalised graph in place so that other nodes read a copy of each buffer or input that it updates.

    An update is a `copy_` to the buffer or input itself, and stays. Without the copy autograd would refuse a backward,
    because a tensor that it saved was overwritten. The graph is recompiled.
    """
    graph = graph_module.graph
    for node in [node for node in graph.nodes if node.op in ("get_attr", "placeholder")]:
        writers = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
        if not writers:
            continue
        # after the last placeholder, because placeholders come before all other nodes
        with graph.inserting_after(node if node.op == "get_attr" else _last_placeholder(graph)):
            snapshot = graph.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(snapshot, lambda user, exempt=(*writers, snapshot): user not in exempt)
    graph_module.recompile()


def _last_placeholder(graph: Graph) -> Node:
    placeholders: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders[-1]


def flatten_signature(graph_module: GraphModule) -> GraphModule:
    """Make a graph take and return flat values instead of its caller's structures, in place, and return it."""
    graph_module.graph.set_codegen(CodeGen())
    graph_module.recompile()
    return graph_module


def flat_inputs(graph_module: GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the value of each placeholder for a call with these arguments.

    If the graph takes pytrees, these are all leaves of the arguments, in the order in which they are given. Otherwise
    they are `args`, and with `kwargs` also one value for each further placeholder: that of its name, or else its
    default or None. Without `kwargs`, defaults are not filled in.
    """
    if isinstance(graph_module.graph._codegen, _PyTreeCodeGen):
        return tree_leaves((tuple(args), dict(kwargs or {})))
    if not kwargs:
        return list(args)
    named = [node for node in graph_module.graph.nodes if node.op == "placeholder"][len(args) :]
    return [*args, *(kwargs[node.target] if node.target in kwargs else next(iter(node.args), None) for node in named)]


def output_builder(graph_module: GraphModule) -> Callable[[Sequence[Any]], Any]:
    """Return a function that turns a sequence of a graph's flat output values into the structure that its caller gets.

    That is the graph's own structure if it returns pytrees, a tuple if it returns a list or tuple, or else the first
    value alone.
    """
    codegen = graph_module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen) and codegen.pytree_info.out_spec is not None:
        spec = codegen.pytree_info.out_spec
        return lambda values: tree_unflatten(list(values), spec)
    returned = graph_module.graph.output_node().args[0]
    return (lambda values: tuple(values)) if isinstance(returned, (list, tuple)) else (lambda values: values[0])


def bytes_of(node: Node) -> int:
    """Return the bytes of a node's value by the graph's metadata, or 0 if that is not a tensor.

    A symbolic size counts with its hint, and is fixed to it by a guard; one without a hint makes torch raise.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(int(size) for size in value.shape) * value.itemsize


def attribute(graph_module: GraphModule, target: str) -> Any:
    """Return the attribute of a graph module at a dotted path; AttributeError if there is none."""
    return functools.reduce(getattr, target.split("."), graph_module)


def known_value(node: Node, graph_module: GraphModule) -> Any:
    """Return the attribute that a `get_attr` node reads; of any other node the value in its metadata, or None.

    A tensor in the metadata is fake.
    """
    if node.op == "get_attr":
        return attribute(graph_module, str(node.target))
    return node.meta.get("val", node.meta.get("example_value"))


def has_fixed_float(node: Node, graph_module: GraphModule) -> bool:
    """Tell whether `known_value` of a node is a float tensor without symbolic sizes."""
    value = known_value(node, graph_module)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and all(isinstance(size, int) for size in value.shape)


def copy_sharing_parameters(graph_module: GraphModule) -> GraphModule:
    """Return a copy with nodes of its own, the same parameters, and clones of the buffers.

    A module or inner graph that the graph calls is the same object in both, so there the original gets the clones too.
    """
    duplicate = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for module in duplicate.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.clone()
    return duplicate


def copy_nodes(graph_module: GraphModule) -> GraphModule:
    """Return a copy with nodes of its own, inner graphs included, and the same parameters, buffers and modules."""
    with outside_modes():
        duplicate = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for node in duplicate.graph.nodes:
        inner = attribute(duplicate, str(node.target)) if node.op in ("get_attr", "call_module") else None
        if isinstance(inner, GraphModule):
            duplicate.set_submodule(str(node.target), copy_nodes(inner))
    # a lazy graph module generates its code at its first call, which would run the user's module hooks
    _LazyGraphModule.force_recompile(duplicate)
    return duplicate


def return_inputs(graph_module: GraphModule, places: Sequence[int]) -> GraphModule:
    """Return a copy of the graph that uses copies of the inputs at `places`, and returns these after its own outputs.

    `places` are positions among the placeholders, from 0. Writes of the graph to these inputs show in the returned
    copies only. The new graph returns a tuple: the outputs, then the copies in the order of `places`. Parameters and
    buffers are shared with the original.
    """
    duplicate = copy_nodes(graph_module)
    placeholders = [node for node in duplicate.graph.nodes if node.op == "placeholder"]
    copies = []
    for place in places:
        with duplicate.graph.inserting_after(placeholders[-1]):
            copies.append(duplicate.graph.call_function(torch.clone, (placeholders[place],)))
        placeholders[place].replace_all_uses_with(copies[-1], lambda user, clone=copies[-1]: user is not clone)
    output = duplicate.graph.output_node()
    values = output.args[0]
    output.args = ((*(values if isinstance(values, (tuple, list)) else (values,)), *copies),)
    duplicate.recompile()
    return duplicate


def copy_graph(graph_module: GraphModule) -> GraphModule:
    """Return a deep copy of a graph, made outside of AOTAutograd's modes, in which new tensors would be fake."""
    with outside_modes():
        return copy.deepcopy(graph_module)


def under_autocast(graph_module: GraphModule, device: str, dtype: str) -> GraphModule:
    """Return a copy of a graph that enters autocast of this device and dtype before its first operation, and leaves it.

    The dtype is named as in "bfloat16".
    """
    duplicate = copy_graph(graph_module)
    first = next(node for node in duplicate.graph.nodes if node.op != "placeholder")
    with duplicate.graph.inserting_before(first):
        entered = duplicate.graph.call_function(_enter_autocast, (device, getattr(torch, dtype), True, None))
    with duplicate.graph.inserting_before(duplicate.graph.output_node()):
        duplicate.graph.call_function(_exit_autocast, (entered,))
    duplicate.recompile()
    return duplicate


@contextmanager
def forgetting_sources() -> Iterator[None]:
    """Run the block, and drop the texts of the functions that fx generated meanwhile, for this or another thread.

    Fx keeps them for ever, for tracebacks. A graph that outlives the block still runs, but a traceback through it does
    not show its lines.
    """
    known = set(_loader.eval_cache)
    try:
        yield
    finally:
        for name in _loader.eval_cache.keys() - known:
            _loader.eval_cache.pop(name, None)
            linecache.cache.pop(name, None)
