"""Single nodes of an FX graph: what a node calls, where it comes from, its arguments, and what it may write to.

A node may call an ATen operator, a Python function, a method or a module; these functions hide the difference. Whether
a node writes is read from the operator's schema where there is one, and otherwise guessed from its name: a wrong
"writes" is safe, a wrong "does not write" is not.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')
# dynamo names a module as its frame reaches it: L['self'].layers[0], or L['fn']._modules['0']
_SCAFFOLD = re.compile(r"^[LG]\.\w+|\._modules(?=\.)")
_INDEX = re.compile(r"\[(?P<quote>['\"]?)(?P<name>[^\]'\"]+)(?P=quote)\]")
_TORCH = os.path.dirname(torch.__file__) + os.sep


def op_name(node: Node) -> str:
    """Return the name of what a node calls, such as `aten.relu.default` or `relu`; that of a module is its path.

    A `get_attr`, `placeholder` or `output` node has that word as its name.
    """
    if node.op in ("get_attr", "placeholder", "output"):
        return node.op
    if node.op == "call_function" and not isinstance(node.target, OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target)


def module_path(node: Node) -> str:
    """Return the path of the innermost module that the node was traced in, or an empty string if none is known.

    For a `get_attr` node that is the module that holds the attribute, and for a backward node that of its forward node.
    Dynamo's names such as `L['self'].layers[0]` become paths such as `layers.0`.
    """
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0]
    # a backward node carries the modules of its forward node
    stack = list((node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    if not path.startswith(("L[", "G[")):
        return path
    return _SCAFFOLD.sub("", _INDEX.sub(r".\g<name>", path)).lstrip(".")


def source_line(node: Node) -> str:
    """Return the innermost source line of a node's stack trace, as `file:line: code`, or an empty string without one.

    Lines outside of torch are preferred. A `get_attr` node has the line of its first reader.
    """
    reader = next(iter(node.users)) if node.op == "get_attr" and node.users else node
    frames = list(_FRAME.finditer(reader.meta.get("stack_trace") or ""))
    outside = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
    return "{file}:{line}: {code}".format(**(outside or frames)[-1].groupdict()) if frames else ""


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator's node by the names of the schema.

    An argument that the node leaves out has its default, or None without one.
    """
    return {name: value for name, (value, _) in _bound(node).items()}


def set_argument(node: Node, name: str, value: Any) -> None:
    """Change one argument of an operator's node in place, positional or not, by its name in the schema.

    KeyError if the schema has no such name. All arguments are written to the node anew, also those that it left out,
    with their defaults.
    """
    bound = {**_bound(node)}
    bound[name] = (value, bound[name][1])
    node.args = tuple(value for value, is_keyword in bound.values() if not is_keyword)
    node.kwargs = {name: value for name, (value, is_keyword) in bound.items() if is_keyword}


def _bound(node: Node) -> dict[str, tuple[Any, bool]]:
    """Return (value, whether it is keyword-only) of each argument by its name in the schema, in the schema's order.

    An argument that the node leaves out has its default, or None without one. The node has to call an `OpOverload`.
    """
    assert isinstance(node.target, OpOverload)
    declared = node.target._schema.arguments
    # there may be fewer positional arguments than the schema declares
    values = {**dict(zip((argument.name for argument in declared), node.args, strict=False)), **node.kwargs}
    return {
        argument.name: (values.get(argument.name, argument.default_value), argument.kwarg_only) for argument in declared
    }


def drop_metadata_assertions(root: torch.nn.Module) -> None:
    """Remove export's assertions about dtypes and devices from all graphs in a module, and recompile the graphs.

    A graph that was changed may violate the assertions.
    """
    for module in root.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    module.graph.erase_node(node)
            module.recompile()


_WRITING_NORMS = frozenset(
    {
        "batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_impl_index",
        "batch_norm_update_stats",
        "cudnn_batch_norm",
        "instance_norm",
        "miopen_batch_norm",
        "native_batch_norm",
    }
)
WRITING_OPERATORS = frozenset({operator.setitem, operator.delitem}) | {
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
} - {operator.index, operator.invert, operator.inv}
"""Python's operators that may write to their first operand, such as that of `x += y`."""
_WRITERS = frozenset({*(function.__name__ for function in WRITING_OPERATORS), "copy_"})


def updates_statistics(name: str) -> bool:
    """Tell whether an operation of this name may write to running statistics although its schema does not say so.

    The name is that of a function, or of an operator as `op_name` returns it: `batch_norm`, `aten.batch_norm.default`.
    """
    return short_name(name) in _WRITING_NORMS


def writes_to(node: Node) -> bool:
    """Tell whether a node may write to one of its inputs; a call of a module always may.

    An operator is judged by its schema, other functions and methods by their name and by their arguments `out` and
    `inplace=True`. Norms that may update running statistics count as writing.
    """
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable) or updates_statistics(op_name(node))
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_named = name in _WRITERS or updates_statistics(name) or (name.endswith("_") and not name.endswith("__"))
    return is_named or "out" in node.kwargs or is_inplace(node.target, node.args, node.kwargs)


def is_inplace(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call passes a true argument `inplace`, by name or by position.

    Of a function without a readable signature, only an argument by name counts.
    """
    by_name = bool(kwargs.get("inplace", False))
    signature = None if by_name or isinstance(target, str) else _signature_with_inplace(target)
    if signature is None:
        return by_name
    try:
        return bool(signature.bind(*args, **kwargs).arguments.get("inplace", False))
    except TypeError:
        return False


def _signature_with_inplace(target: Any) -> inspect.Signature | None:
    """Return the signature of a function that has a parameter `inplace`, or None for any other target."""
    try:
        return _readable_signature(target)
    except TypeError:  # it has no hash
        return None


@functools.lru_cache(maxsize=4096)
def _readable_signature(target: Any) -> inspect.Signature | None:
    """Return the signature of a function that has a parameter `inplace`; None if it has none or cannot be read."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a builtin
        return None
    return signature if "inplace" in signature.parameters else None


def may_write(node: Node) -> frozenset[Node]:
    """Return the input nodes whose values a node may write to; empty if it does not write.

    For an operator these are the arguments that its schema declares as written to, and those whose names start with
    `running_`. If any other function, method or module writes, all its input nodes count.
    """
    if not writes_to(node):
        return frozenset()
    if not isinstance(node.target, OpOverload):
        return frozenset(node.all_input_nodes)
    written = [
        value
        for argument in node.target._schema.arguments
        for value in [arguments(node)[argument.name]]
        if argument.name.startswith("running_") or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return frozenset(leaf for leaf in tree_leaves(written) if isinstance(leaf, Node))


def has_effect(node: Node) -> bool:
    """Tell whether a node does more than return a value: it writes (`writes_to`), draws, asserts or sets a mode.

    Torch's `Node.is_impure` tells the last three, which it never does of a method. Placeholders, outputs and calls of
    modules always count.
    """
    return writes_to(node) or node.is_impure()


INDUCTOR_RANDOMS = ("prims.inductor_random", "prims.inductor_randint", "prims.inductor_seed")
"""The operators by which inductor replaces random numbers; they draw other numbers than eager PyTorch."""


def has_inductor_randoms(graph_module: GraphModule) -> bool:
    """Tell whether a graph, or one inside of it, has inductor's own operators for random numbers."""
    return any(op_name(node).startswith(INDUCTOR_RANDOMS) for node in every_node(graph_module))


def takes_tangents(graph_module: GraphModule) -> bool:
    """Tell whether a graph is a joint or backward graph of AOTAutograd, whose outputs are gradients too.

    That is so if the name of an input begins with `tangents_`.
    """
    return any(node.name.startswith("tangents_") for node in graph_module.graph.find_nodes(op="placeholder"))


def needs_other_processes(graph_module: GraphModule) -> bool:
    """Tell whether a graph, or one inside of it, has collectives, so that other processes would have to run it too.

    False unless torch.distributed is initialised with more than one process.
    """
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
        return False
    return any("c10d" in op_name(node) for node in every_node(graph_module))


def every_node(graph_module: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of the graphs inside of it."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


CASTS = frozenset(
    {
        *("bfloat16", "cdouble", "cfloat", "chalf", "convert_element_type", "double", "float", "half"),
        *("to", "to_copy", "type", "type_as"),
    }
)
"""The names of operations that change the dtype alone, as `short_name` returns them."""


def is_cast(node: Node) -> bool:
    """Tell by its name whether a node only changes the dtype of its operand."""
    return node.op in ("call_function", "call_method") and _short_name(node) in CASTS


def widens(node: Node) -> bool:
    """Tell whether a node is a cast operator that converts floats to a float dtype of more bytes, by graph metadata.

    False if the metadata `val` of the node or of its first argument is missing or not a tensor of floats.
    """
    if not isinstance(node.target, OpOverload):
        return False
    if node.target._schema.name.partition("::")[2] not in ("_to_copy", "to", "convert_element_type"):
        return False
    source = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    result = node.meta.get("val")
    both = [value for value in (source, result) if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return len(both) == 2 and both[0].itemsize < both[1].itemsize


def is_unset(node: Node) -> bool:
    """Tell by its name whether a node returns uninitialised memory, as `empty` and `new_empty` do."""
    return _short_name(node) in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def writes_to_first(node: Node) -> bool:
    """Tell whether a node may write to an input, and is neither a module nor a norm that may update statistics.

    Such a node is taken to write to its first argument, although one with `out=` does not.
    """
    return writes_to(node) and not updates_statistics(op_name(node)) and node.op != "call_module"


def returns_what_it_writes(node: Node) -> bool:
    """Tell whether a node seems to write to its first argument, which is a node, and to return that same tensor.

    An operator is judged by its schema. Writing methods and writing functions of torch count, and Python's operators
    such as `+=` if the metadata of the first argument is a tensor. False for `x[index] = value`, unless it is the
    `setitem` of this module, for modules, norms that may update running statistics, functions with `out=`, and
    functions of the user's.
    """
    if node.target is setitem:
        return isinstance(node.args[0], Node)
    if not (node.args and isinstance(node.args[0], Node) and writes_to_first(node)) or is_item_assignment(node):
        return False
    if isinstance(node.target, OpOverload):
        first, returns = node.target._schema.arguments[0].alias_info, node.target._schema.returns
        return first is not None and first.is_write and len(returns) == 1 and returns[0].alias_info is not None
    if node.op == "call_method":
        return True
    if "out" in node.kwargs:
        return False
    value = node.args[0].meta.get("val", node.args[0].meta.get("example_value"))
    is_operator = getattr(node.target, "__module__", "") == "_operator"
    # `+=` on numbers returns a new number, and a function of the user's may return anything
    return isinstance(value, torch.Tensor) if is_operator else _is_function_of_torch(node.target)


def _is_function_of_torch(target: Any) -> bool:
    """Tell whether a function is defined in torch; one without a `__module__` counts too."""
    module = getattr(target, "__module__", None)
    return module is None or str(module).partition(".")[0] == "torch"


def reads_memory(node: Node) -> bool:
    """Tell whether a node's result depends on the memory layout of its first argument, not only on the elements.

    Only the `as_strided` operations count.
    """
    return _short_name(node).startswith("as_strided")


def is_bounded(node: Node) -> bool:
    """Tell whether a node computes cos, erf, erfc, sigmoid, sin or tanh, which are bounded by a constant."""
    return _short_name(node) in ("cos", "erf", "erfc", "sigmoid", "sin", "tanh")


def is_wide_float(node: Node) -> bool:
    """Tell by its metadata whether a node's value, or one of several, is a tensor of floats of 32 bits or more."""
    value = node.meta.get("val", node.meta.get("example_value"))
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, torch.Tensor) and each.is_floating_point() and each.itemsize >= 4 for each in values)


def setitem(container: Any, index: Any, value: Any) -> Any:
    """Do `container[index] = value` and return the container, as `operator.setitem` does not."""
    container[index] = value
    return container


def is_item_assignment(node: Node) -> bool:
    """Tell whether a node is `x[index] = value`, which writes without returning the tensor."""
    return _short_name(node) == "setitem"


def may_share(node: Node) -> bool:
    """Tell whether a node's result may share memory with its first argument.

    An operator may if it is a view, writes, or is one of `_MAYBE_VIEWS`, such as `reshape`. A method always may. A
    function may if it writes or is named like one of these, or `getitem`. A module counts only if its path is such a
    name.
    """
    if isinstance(node.target, OpOverload):
        return node.target.is_view or node.target._schema.is_mutable or _short_name(node) in _MAYBE_VIEWS
    return node.op == "call_method" or writes_to_first(node) or _short_name(node) in (*_MAYBE_VIEWS, "getitem")


_MAYBE_VIEWS = frozenset(
    {
        "alias", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "broadcast_to", "chunk",
        "conj", "contiguous", "detach", "diagonal", "dropout", "dsplit", "expand", "flatten", "getattr", "hsplit",
        "imag", "meshgrid", "moveaxis", "movedim", "narrow", "permute", "positive", "ravel", "real", "reshape",
        "resolve_conj", "resolve_neg", "select", "setitem", "split", "split_with_sizes", "squeeze", "swapaxes",
        "swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze",
        "view", "view_as", "view_as_complex", "view_as_real", "vsplit",
    }
)  # fmt: skip
"""Operations that return a view, or the tensor itself, of some arguments or all."""


def short_name(name: str) -> str:
    """Return an operation's name as all kinds of graphs share it: `relu` for `aten.relu_.default` and for `relu`.

    It is the operator's name if the namespace is aten or prims or the overload is `default`, and otherwise all before
    the first dot: of other operators that is the namespace. Underscores at both ends are dropped.
    """
    namespace, *rest = name.split(".")
    is_operator = bool(rest) and (namespace in ("aten", "prims") or rest[-1] == "default")
    return (rest[0] if is_operator else namespace).strip("_")


def _short_name(node: Node) -> str:
    """Return the `short_name` of what a node calls."""
    return short_name(op_name(node))
