"""Lift a captured graph to float64 by rewriting its code, as the mode `lift.Lift` does to running operations.

A compiler does not compile under a dispatch mode, so a graph that goes to one must name float64 itself. Its inputs are
in float64 already; `lift_graph` rewrites the casts and constants that name a lower dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from torchdelta._torch.graphs.nodes import CASTS
from torchdelta._torch.modes.lift import is_computing_factory, is_drawing_factory, is_narrow, widened

_METHODS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble", "chalf": "cdouble"}


_AUTOCAST = frozenset(
    {
        "autocast_decrement_nesting", "autocast_increment_nesting", "clear_autocast_cache", "enter_autocast",
        "exit_autocast", "is_autocast_available", "set_autocast_cache_enabled", "set_autocast_dtype",
        "set_autocast_enabled",
    }
)  # fmt: skip
"""Functions of autocast; dynamo makes the lower ones of the others if it captures a graph again."""
_WITHOUT_FORM = _AUTOCAST.union(CASTS, {"assert_tensor_metadata"})
"""Calls that a program may have natively alone: they are about dtypes."""
_CONSTANTS = frozenset({"arange", "as_tensor", "full", "range", "scalar_tensor", "tensor"})
"""Functions that make a tensor of the numbers that they are given, in the dtype that they are told."""
_MOST_CONSTANT = 2**14
"""A constant of more numbers is not written into the graph: its code would become too long."""
_FORM = "form before it was lifted"
"""Where the metadata of a node keep its text in `form_of`."""
# operations that return floats for integers if no dtype is named: some always, others beside a number such as 0.1
_ON_NUMBERS = frozenset(
    {
        "acos", "acosh", "add", "angle", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh",
        "asin", "asinh", "atan", "atan2", "atanh", "clamp", "clamp_max", "clamp_min", "clip", "copysign", "cos", "cosh",
        "deg2rad", "digamma", "div", "divide", "entr", "erf", "erfc", "erfcx", "erfinv", "exp", "exp2", "expit",
        "expm1", "floor_divide", "floordiv", "fmod", "gammaln", "i0", "i0e", "i1", "i1e", "iadd", "ifloordiv", "imod",
        "imul", "ipow", "isub", "itruediv", "ldexp", "lgamma", "log", "log10", "log1p", "log2", "log_ndtr", "logit",
        "mod", "mul", "multiply", "ndtr", "ndtri", "pow", "psi", "rad2deg", "radd", "rdiv", "reciprocal", "remainder",
        "rfloordiv", "rmod", "rmul", "rpow", "rsqrt", "rsub", "rtruediv", "sigmoid", "sin", "sinc", "sinh", "softsign",
        "sqrt", "sub", "subtract", "tan", "tanh", "tanhshrink", "true_divide", "truediv", "xlog1py", "xlogy", "zeta",
    }
)  # fmt: skip


def lift_graph(graph_module: GraphModule) -> GraphModule:
    """Rewrite a graph and the graphs inside of it, in place, to compute in float64; return the same module.

    Casts and dtype arguments that name float32, float16, bfloat16, complex64 or complex32 name the wide dtype instead,
    constants of these dtypes are cast to it, and autocast is disabled. Integers are cast before an operation that turns
    them into narrow floats (`_lift_node`). Inputs, attributes, and called modules that are not graphs, are left as they
    are. Which nodes have tensors is read from the metadata: a node without it is left alone. Graphs are recompiled.
    """
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.op in ("call_function", "call_method"):
                    _lift_node(node)
            module.recompile()
    return graph_module


def lift_upcasts(graph_module: GraphModule, keep: frozenset[str] = frozenset()) -> GraphModule:
    """Let casts to float32 and dtype arguments that name it name float64 instead, in place; return the same module.

    A pass that computes a part of a narrow program in float32, and finds that program in float64, would narrow it.
    Nodes whose name is in `keep`, which are the program's own, stay, and so do dtypes below float32, attributes, and
    calls that read no other node, which make constants. Graphs inside of the graph are rewritten too; all are
    recompiled.
    """
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if node.op in ("call_function", "call_method") and node.name not in keep and not _is_factory(node):
                    node.target = "double" if node.op == "call_method" and node.target == "float" else node.target
                    node.args = map_aggregate(node.args, _widened_float32)
                    node.kwargs = map_aggregate(node.kwargs, _widened_float32)
            module.recompile()
    return graph_module


def _is_factory(node: Node) -> bool:
    """Tell whether a call reads no other node: what it makes is a constant, which keeps its own rounding."""
    return not node.all_input_nodes


def _widened_float32(value: Any) -> Any:
    """Return float64 in place of float32; any other value unchanged."""
    return torch.float64 if value is torch.float32 else value


def form_of(graph_module: GraphModule) -> tuple[str, ...]:
    """Return the calls of functions and methods in a graph as texts, in order, such as `div(2, 'floor')`.

    Of the arguments only numbers, booleans and texts are shown (`_plain_arguments`). Graphs inside of the graph are
    included. Casts, dtypes, assertions about them, autocast and calls of modules are left out. A program that is
    captured natively and in float64 has one form, unless it branches on its dtype or computes with numbers that depend
    on it, such as `torch.finfo(x.dtype).eps`.
    """
    form = []
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op in ("call_function", "call_method") and _plain_name(node) not in _WITHOUT_FORM:
                form.append(node.meta.get(_FORM) or _shown(node))
    return tuple(form)


def _shown(node: Node) -> str:
    """Return a call as a text: its name, and the numbers, booleans and texts among its arguments."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name}({', '.join(_plain_arguments(node))})"


def _plain_arguments(node: Node) -> list[str]:
    """Return the `repr` of each number, boolean and text among a node's arguments, nested ones and keywords included.

    Nodes, dtypes and all other values are left out.
    """
    plain: list[str] = []

    def add(value: Any) -> None:
        if isinstance(value, (bool, int, float, complex, str)):
            plain.append(repr(value))

    map_aggregate((node.args, node.kwargs), add)
    return plain


def _lift_node(node: Node) -> None:
    """Rewrite one node in place so that it does not round below float64; nodes may be inserted around it.

    A node that enters autocast gets it disabled. One without tensor inputs that makes a narrow tensor, by the graph's
    metadata, is told the wide dtype if it computes or draws its elements, as `linspace` and `rand` do; if not, it makes
    its `_rounded_constant` or, if it has none, its users read a cast of it. One that makes no narrow tensor is left
    alone.
    A node with tensor inputs names wide dtypes in place of narrow ones. If it is `_is_elementwise` and turns integers
    into narrow floats without naming a dtype, its inputs are cast.
    """
    if node.target is torch.amp.autocast_mode._enter_autocast:
        device, dtype, _, cache = node.args
        node.args = (device, dtype, False, cache)
        return
    if node.target is torch.set_autocast_enabled:
        node.args = (*node.args[:-1], False)
        return
    sources = [_value_of(source) for source in node.all_input_nodes]
    tensors = [value for value in sources if isinstance(value, torch.Tensor)]
    output = _value_of(node)
    if not tensors:
        if isinstance(output, torch.Tensor) and is_narrow(output.dtype):
            name = _plain_name(node)
            if is_computing_factory(name) or is_drawing_factory(name, node.args):
                node.kwargs = {**node.kwargs, "dtype": widened(output.dtype)}
            # a constant keeps the program's rounding: 0.1 in float32 is the program's 0.1
            elif (constant := _rounded_constant(node, output)) is not None:
                _name_constant(node, constant, output)
            else:
                _widen_after(node, output)
        return
    if node.op == "call_method":
        node.target = _METHODS.get(str(node.target), node.target)
        if node.target == "type" and isinstance(node.args[-1], str):  # such as torch.BFloat16Tensor
            node.args = (*node.args[:-1], widened(output.dtype))
    node.args = map_aggregate(node.args, _widened)
    node.kwargs = map_aggregate(node.kwargs, _widened)
    has_floats = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    if (
        not has_floats
        and _is_elementwise(node)
        and isinstance(output, torch.Tensor)
        and is_narrow(output.dtype)
        and not _names_dtype(node)
    ):
        _widen_before(node, output.dtype)


def _widen_after(node: Node, output: torch.Tensor) -> None:
    """Insert a cast to the wide dtype behind a node, and let all its users read the cast."""
    with node.graph.inserting_after(node):
        wide = node.graph.call_method("to", (node, widened(output.dtype)))
    wide.meta["example_value"] = output
    node.replace_all_uses_with(wide, lambda user: user is not wide)


def _rounded_constant(node: Node, output: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a node makes of plain numbers, widened, if its own dtype rounds one of them; else None.

    A compiler may leave out the narrow tensor in a chain of casts, and would then compute with the numbers as they were
    before they were rounded. None too for functions that are not among `_CONSTANTS`, if a number is known only in a
    run, for a tensor that requires a gradient, and for one without elements or with more than
    `_MOST_CONSTANT`. `output` is the
    node's value by the graph's metadata.
    """
    is_constant = node.op == "call_function" and _plain_name(node) in _CONSTANTS and not node.all_input_nodes
    if not is_constant or output.requires_grad or not 0 < output.numel() <= _MOST_CONSTANT or not callable(node.target):
        return None
    wide = widened(output.dtype)
    with unset_fake_temporarily():
        rounded: torch.Tensor = node.target(*node.args, **node.kwargs).to(wide)
        exact = node.target(*node.args, **{**node.kwargs, "dtype": wide})
        return None if torch.equal(rounded, exact) else rounded


def _name_constant(node: Node, constant: torch.Tensor, output: torch.Tensor) -> None:
    """Let a node make this constant of its numbers, in the constant's dtype; `form_of` shows it as it was before.

    `output` is the node's value by the graph's metadata, on whose device the constant is made.
    """
    node.meta[_FORM] = _shown(node)
    node.kwargs = {"dtype": constant.dtype, "device": output.device}
    first = constant.reshape(-1)[:1]
    if torch.equal(constant, first.expand(constant.numel()).reshape(constant.shape)):
        node.target, node.args = torch.full, (list(constant.shape), first.item())
    else:
        node.target, node.args = torch.tensor, (constant.tolist(),)


def _widen_before(node: Node, dtype: torch.dtype) -> None:
    """Cast all tensors that a node reads, which are of integers, to the wide form of `dtype`, so that it returns that.

    Sizes and other numbers stay as they are.
    """
    for source in [each for each in node.all_input_nodes if isinstance(_value_of(each), torch.Tensor)]:
        with node.graph.inserting_before(node):
            wide = node.graph.call_method("to", (source, widened(dtype)))
        node.replace_input_with(source, wide)


def _is_elementwise(node: Node) -> bool:
    """Tell by its name whether a node is one of `_ON_NUMBERS`: elementwise, and floats for integers."""
    # an index or a mask must stay an integer; arithmetic on integers may be done on floats
    return _plain_name(node) in _ON_NUMBERS


def _plain_name(node: Node) -> str:
    """Return the name of what a node calls: `div` for `aten.div_.Tensor` too, and `expit` for `torch.special.expit`.

    That is the name without overload, outer underscores and the prefix `special_`.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0].strip("_").removeprefix("special_")


def _names_dtype(node: Node) -> bool:
    """Tell whether a node has a dtype among its arguments, or is the method `double` or `cdouble`."""
    are_dtypes = []
    map_aggregate((node.args, node.kwargs), lambda value: are_dtypes.append(isinstance(value, torch.dtype)))
    return any(are_dtypes) or (node.op == "call_method" and node.target in _METHODS.values())


def _widened(value: Any) -> Any:
    """Return the wide dtype in place of a narrow one; any other value unchanged."""
    return widened(value) if isinstance(value, torch.dtype) else value


def _value_of(node: Node) -> Any:
    """Return a node's value by the graph's metadata, as a fake tensor, or None if there is none."""
    return node.meta.get("example_value", node.meta.get("val"))
