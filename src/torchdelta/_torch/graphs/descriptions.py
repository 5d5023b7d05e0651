"""Traced values and calling conventions of graphs as JSON's own types, and back.

A traced value is described without its numbers: a fake tensor as dtype, shape, strides, device and `requires_grad`.

    describe_value(torch.empty(2, 3, device="meta"))  ->  {"tensor": ["float32", [2, 3], [3, 1], "meta", false]}

A size that is a symbol is written as its text and its hint. When it is read, equal texts become one symbol; how one
expression was computed from another is lost.

A calling convention says whether a graph takes its inputs one by one (`"values"`), in one list (`"boxed"`), or as
pytrees that it flattens itself.

Start reading at `describe_value` and `ValueBuilder.build`, then `describe_convention` and `set_convention`.
"""

from __future__ import annotations

import collections
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import Source
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.graph import CodeGen, _BoxedCodeGen, _PyTreeCodeGen, _PyTreeInfo
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree

from torchdelta._torch.graphs.targets import name_target
from torchdelta._torch.tensors import dtype_name
from torchdelta.records.strict_json import encode_float

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def describe_value(value: Any) -> Any:
    """Return the description, without elements, of a tensor, its metadata, a size, or nested lists and tuples of these.

    It is a dict of one entry, whose key is `metadata`, `tensor`, `list`, `tuple` or `size`; a size is a number, None or
    a symbolic integer. A named tuple becomes a plain `tuple`. Raise ValueError for other values, and for tensors that
    are more than this, such as quantized ones.
    """
    if isinstance(value, TensorMetadata):
        if value.is_quantized:
            raise ValueError("a quantized tensor is more than its shape")
        shape, stride = ([_describe_size(size) for size in sizes] for sizes in (value.shape, value.stride))
        layout = None if value.memory_format is None else str(value.memory_format).removeprefix("torch.")
        return {"metadata": [dtype_name(value.dtype), shape, stride, value.requires_grad, layout]}
    if isinstance(value, torch.Tensor):
        return {"tensor": _describe_tensor(value)}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [describe_value(item) for item in value]}
    return {"size": _describe_size(value)}


def _describe_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape, strides, device and `requires_grad` as a list, without the tensor's elements.

    Raise ValueError if it is sparse, quantized, without strides, or of a subclass other than a parameter or fake
    tensor.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"{type(tensor).__name__} is more than a strided tensor")
    try:
        shape, stride = (
            [_describe_size(size) for size in tensor.shape],
            [_describe_size(size) for size in tensor.stride()],
        )
    except RuntimeError as error:  # inside of vmap a tensor has no strides
        raise ValueError(str(error)) from error
    return [dtype_name(tensor.dtype), shape, stride, str(tensor.device), tensor.requires_grad]


def _describe_size(size: Any) -> Any:
    """Return a number or None as JSON has it, and a symbolic integer as `{"symbol": [expression, hint]}`.

    A float that is not finite becomes a text. The hint is the symbol's value in the traced run, or None if it is not
    known. Raise ValueError for any other value.
    """
    if size is None or type(size) in (bool, int):
        return size
    if type(size) is float:
        return encode_float(size)
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return {"symbol": [str(size.node.expr), hint if type(hint) is int else None]}
    raise ValueError(f"{type(size).__name__} is neither a tensor nor a size")


@dataclass(frozen=True)
class _StoredPlace(Source):
    """The origin of a symbol. Dynamo has such classes too, but importing them takes as long as all of torch."""

    text: str

    @property
    def _name_template(self) -> str:
        """The text as the name of the place."""
        return self.text


class ValueBuilder:
    """Builds values from their descriptions; all its fake tensors and symbols belong to one mode."""

    def __init__(self) -> None:
        self._shapes = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._shapes)
        self._symbols: dict[str, Any] = {}

    def build(self, data: Any) -> Any:
        """Return the value that `describe_value` described as `data`; a tensor becomes a fake tensor.

        Symbols of the same text become one symbol in all values of this builder. Raise ValueError if the kind, a dtype,
        a memory format or a size is unknown; other damage of `data` may raise other errors.
        """
        ((kind, content),) = data.items()
        if kind in ("list", "tuple"):
            items = [self.build(item) for item in content]
            return items if kind == "list" else tuple(items)
        if kind == "size":
            return self._size(content)
        if kind == "metadata":
            dtype, shape, stride, requires_grad, layout = content
            return TensorMetadata(
                shape=torch.Size([self._size(size) for size in shape]),
                dtype=_constant(dtype, torch.dtype),
                requires_grad=bool(requires_grad),
                stride=tuple(self._size(size) for size in stride),
                memory_format=None if layout is None else _constant(layout, torch.memory_format),
                is_quantized=False,
                qparams={},
            )
        if kind != "tensor":
            raise ValueError(f"{kind!r} is not a kind of description")
        dtype, shape, stride, device, requires_grad = content
        sizes, steps = [self._size(size) for size in shape], [self._size(size) for size in stride]
        empty = torch.empty_strided(sizes, steps, dtype=_constant(dtype, torch.dtype), device="meta")
        fake = FakeTensor(self._mode, empty, torch.device(device))
        return fake.requires_grad_() if requires_grad is True else fake

    def _size(self, data: Any) -> Any:
        """Return a described size: a number or None as it is, a float from its text, or the symbol of a dict.

        The symbol is made at its first use and remembered by its text; the hints of later uses are ignored. It is
        unbacked if its first use has no hint. Raise ValueError if a dict does not describe a symbol.
        """
        if not isinstance(data, dict):
            return float(data) if isinstance(data, str) else data
        ((kind, (text, hint)),) = data.items()
        if kind != "symbol" or not isinstance(text, str) or not (hint is None or type(hint) is int):
            raise ValueError(f"{data} is not a size")
        if text not in self._symbols:
            self._symbols[text] = self._shapes.create_unbacked_symint() if hint is None else self._symbol(hint)
        return self._symbols[text]

    def _symbol(self, hint: int) -> Any:
        """Return a new symbolic size whose value in the traced run was `hint`; the caller has to remember it."""
        source = _StoredPlace(f"size_{len(self._symbols)}")
        symbol = self._shapes.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
        )
        return self._shapes.create_symintnode(symbol, hint=hint, source=source)


def _constant(name: Any, kind: type) -> Any:
    """Return torch's dtype or memory format of that name; raise ValueError if there is none."""
    constant = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(constant, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return constant


_STANDARD: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "namedtuple": collections.namedtuple,  # torch registers every named tuple under this key
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
}


def is_tree_spec(value: Any) -> bool:
    """Tell whether a value is a `TreeSpec`, torch's description of a pytree's structure."""
    return isinstance(value, pytree.TreeSpec)


def describe_tree(spec: Any, encode: Callable[[Any], Any]) -> Any:
    """Return a `TreeSpec` as JSON's own types: None for a leaf, a dict of `type`, `context` and `children` for a node.

    `type` is the short name of a standard container, or a name that `find_target` can find; raise ValueError if the
    class has none. `encode` encodes the context of a node.
    """
    if spec.is_leaf():
        return None
    standard = next((name for name, kind in _STANDARD.items() if kind is spec.type), None)
    return {
        "type": standard or name_target(spec.type),
        "context": encode(spec.context),
        "children": [describe_tree(child, encode) for child in spec.children()],
    }


def rebuild_tree(data: Any, decode: Callable[[Any], Any], find: Callable[[str], Any]) -> Any:
    """Return the `TreeSpec` that `describe_tree` described as `data`; a `data` of None is a leaf.

    `decode` decodes the context of a node, and `find` returns the class of a name that is not a standard container's.
    Raise LookupError if torch does not know the class as a structure, and what `decode` and `find` raise.
    """
    if data is None:
        return pytree.treespec_leaf()
    kind = _STANDARD.get(data["type"]) or find(data["type"])
    if kind not in pytree.SUPPORTED_NODES:
        raise LookupError(f"{kind} is not a structure that torch knows: first import the module that registers it")
    children = [rebuild_tree(child, decode, find) for child in data["children"]]
    return pytree.TreeSpec(kind, decode(data["context"]), children)


def describe_convention(graph: Graph, encode: Callable[[Any], Any]) -> Any:
    """Return how a graph takes its inputs: `"values"` one by one, `"boxed"` in a list, or a dict if as pytrees.

    The dict has the `names` of the arguments, the tree of the inputs as `taken`, and as `returned` a dict with the
    `tree` of the outputs, or None if that is not known. `encode` encodes the context of a tree's node. Raise ValueError
    if the code generator is unknown or has its code changed by a function, if a class in a tree has no name to find it
    by, or if a graph that takes pytrees has a default for an input.
    """
    codegen = graph._codegen
    if codegen._body_transformer is not None:
        raise ValueError("its code is changed by a function when it is generated")
    if type(codegen) is CodeGen:
        return "values"
    if type(codegen) is _BoxedCodeGen:
        return "boxed"
    if type(codegen) is not _PyTreeCodeGen:
        raise ValueError(f"its code is generated by {type(codegen).__name__}")
    _refuse_defaults(graph)
    info = codegen.pytree_info
    return {
        "names": list(info.orig_args),
        "taken": describe_tree(info.in_spec, encode),
        "returned": None if info.out_spec is None else {"tree": describe_tree(info.out_spec, encode)},
    }


def set_convention(graph: Graph, data: Any, decode: Callable[[Any], Any], find: Callable[[str], Any]) -> None:
    """Give a graph the calling convention that `describe_convention` described as `data`; `"values"` changes nothing.

    `decode` and `find` are those of `rebuild_tree`, which may raise LookupError. Raise ValueError if an input has a
    default, or if the name of an argument is not a plain name, because it becomes code. A damaged description may raise
    other errors.
    """
    if data == "values":
        return
    _refuse_defaults(graph)
    if data == "boxed":
        graph.set_codegen(_BoxedCodeGen())
        return
    names = data["names"]
    taken = rebuild_tree(data["taken"], decode, find)
    returned = None if data["returned"] is None else rebuild_tree(data["returned"]["tree"], decode, find)
    # torch puts these names into the code that it generates for the graph
    keys = [key for child in taken.children() if child.type is dict for key in child.context]
    for name in (*names, *keys):
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not the name of an argument")
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, taken, returned)))


def _refuse_defaults(graph: Graph) -> None:
    """Raise ValueError if a placeholder has a default value."""
    # torch splits the text of such placeholders at characters that the text of a default may contain
    for node in graph.nodes:
        if node.op == "placeholder" and node.args:
            raise ValueError(f"{node.name} has a default, which a graph that takes structures cannot have")


def is_plain_name(name: Any) -> bool:
    """Tell whether a value is a text that is an identifier of Python and not a keyword."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def rename(node: Node, name: str) -> None:
    """Give a node exactly this name, also if torch would have changed it."""
    if node.name != name:
        node.graph._graph_namespace._rename_object(node, name)
        node.name = name
