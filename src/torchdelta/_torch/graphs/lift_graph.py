"""Lift a captured graph by rewriting it: what `lift.Lift` does to operations, done to the code.

A compiler does not compile under a dispatch mode, so a graph that goes to one must ask for float64 itself. Its inputs
are in float64 already; what is left are the casts and constants that name a lower dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from torchdelta._torch.modes.lift import computes, is_narrow, widened

_METHODS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble", "chalf": "cdouble"}


# operations that make floats of integers when nobody names a dtype
_ON_NUMBERS = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "deg2rad", "div", "erf", "exp",
        "exp2", "expm1", "itruediv", "lgamma", "log", "log10", "log1p", "log2", "rad2deg", "reciprocal", "rsqrt",
        "rtruediv", "sigmoid", "sin", "sinc", "sinh", "sqrt", "tan", "tanh", "truediv", "true_divide",
    }
)  # fmt: skip


def lift_graph(graph_module: GraphModule) -> GraphModule:
    """Rewrite the graph, and those of its control flow, so that nothing in it rounds below float64; return it."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.op in ("call_function", "call_method"):
                    _lift_node(node)
            module.recompile()
    return graph_module


def _lift_node(node: Node) -> None:
    if node.target is torch.amp.autocast_mode._enter_autocast:
        device, dtype, _, cache = node.args
        node.args = (device, dtype, False, cache)
        return
    sources = [_value_of(source) for source in node.all_input_nodes]
    tensors = [value for value in sources if isinstance(value, torch.Tensor)]
    made = _value_of(node)
    if not tensors:
        # a constant is made as the program made it and widened then: 0.1 in float32 is the program's 0.1
        if isinstance(made, torch.Tensor) and is_narrow(made.dtype):
            if computes(getattr(node.target, "__name__", "")):
                node.kwargs = {**node.kwargs, "dtype": widened(made.dtype)}
            else:
                _widen_after(node, made)
        return
    if node.op == "call_method":
        node.target = _METHODS.get(str(node.target), node.target)
        if node.target == "type" and isinstance(node.args[-1], str):  # torch.BFloat16Tensor and its like
            node.args = (*node.args[:-1], widened(made.dtype))
    node.args = map_aggregate(node.args, _widened)
    node.kwargs = map_aggregate(node.kwargs, _widened)
    is_counted = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    if (
        is_counted
        and _is_elementwise(node)
        and isinstance(made, torch.Tensor)
        and is_narrow(made.dtype)
        and not _names_dtype(node)
    ):
        _widen_before(node, made.dtype)


def _widen_after(node: Node, made: torch.Tensor) -> None:
    with node.graph.inserting_after(node):
        wide = node.graph.call_method("to", (node, widened(made.dtype)))
    wide.meta["example_value"] = made
    node.replace_all_uses_with(wide, lambda user: user is not wide)


def _widen_before(node: Node, dtype: torch.dtype) -> None:
    """Let an operation that makes floats of integers make wide ones."""
    for source in node.all_input_nodes:
        with node.graph.inserting_before(node):
            wide = node.graph.call_method("to", (source, widened(dtype)))
        node.replace_input_with(source, wide)


def _is_elementwise(node: Node) -> bool:
    # an index or a mask must stay what it is; arithmetic on numbers may be done on wide ones
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.strip("_") in _ON_NUMBERS


def _names_dtype(node: Node) -> bool:
    found = []
    map_aggregate((node.args, node.kwargs), lambda value: found.append(isinstance(value, torch.dtype)))
    return any(found) or (node.op == "call_method" and node.target in _METHODS.values())


def _widened(value: Any) -> Any:
    return widened(value) if isinstance(value, torch.dtype) else value


def _value_of(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))
