"""What a traced value was, without the value: fake tensors as shape, dtype, strides and device, and back.

A size that is a symbol is written as its text and its hint. Read back, equal texts are one symbol; that one expression
was computed from another is lost.

How a graph is called: value by value, or with structures that it takes apart and puts together.
"""

from __future__ import annotations

import collections
import keyword
import math
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

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def describe_value(value: Any) -> Any:
    """Return a description of JSON's own types; ValueError of what is neither tensors nor sizes."""
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
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"{type(tensor).__name__} is more than a strided tensor")
    try:
        shape, stride = (
            [_describe_size(size) for size in tensor.shape],
            [_describe_size(size) for size in tensor.stride()],
        )
    except RuntimeError as error:  # inside of vmap it has none
        raise ValueError(str(error)) from error
    return [dtype_name(tensor.dtype), shape, stride, str(tensor.device), tensor.requires_grad]


def _describe_size(size: Any) -> Any:
    if size is None or type(size) in (bool, int):
        return size
    if type(size) is float:
        return size if math.isfinite(size) else str(size)
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return {"symbol": [str(size.node.expr), hint if type(hint) is int else None]}
    raise ValueError(f"{type(size).__name__} is neither a tensor nor a size")


@dataclass(frozen=True)
class _StoredPlace(Source):
    """Where a symbol comes from; those of dynamo take as long to import as all of torch."""

    text: str

    @property
    def _name_template(self) -> str:
        return self.text


class Redrawing:
    """Makes values of descriptions: fake tensors and symbols that belong together."""

    def __init__(self) -> None:
        self._shapes = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._shapes)
        self._symbols: dict[str, Any] = {}

    def redraw(self, data: Any) -> Any:
        """Return what was described; an error of Python's own where nothing was."""
        ((kind, content),) = data.items()
        if kind in ("list", "tuple"):
            items = [self.redraw(item) for item in content]
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
            raise ValueError(f"{kind!r} describes nothing")
        dtype, shape, stride, device, requires_grad = content
        sizes, steps = [self._size(size) for size in shape], [self._size(size) for size in stride]
        empty = torch.empty_strided(sizes, steps, dtype=_constant(dtype, torch.dtype), device="meta")
        fake = FakeTensor(self._mode, empty, torch.device(device))
        return fake.requires_grad_() if requires_grad is True else fake

    def _size(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return float(data) if isinstance(data, str) else data
        ((kind, (text, hint)),) = data.items()
        if kind != "symbol" or not isinstance(text, str) or not (hint is None or type(hint) is int):
            raise ValueError(f"{data} is no size")
        if text not in self._symbols:
            self._symbols[text] = self._shapes.create_unbacked_symint() if hint is None else self._symbol(hint)
        return self._symbols[text]

    def _symbol(self, hint: int) -> Any:
        source = _StoredPlace(f"size_{len(self._symbols)}")
        symbol = self._shapes.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
        )
        return self._shapes.create_symintnode(symbol, hint=hint, source=source)


def _constant(name: Any, kind: type) -> Any:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return found


_STANDARD: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "namedtuple": collections.namedtuple,  # torch knows all of them under this key
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
}


def is_tree_spec(value: Any) -> bool:
    """Tell whether a value is the description of a structure."""
    return isinstance(value, pytree.TreeSpec)


def describe_tree(spec: Any, encode: Callable[[Any], Any]) -> Any:
    """Return the description of a structure as JSON's own types; None is a leaf."""
    if spec.is_leaf():
        return None
    standard = next((name for name, kind in _STANDARD.items() if kind is spec.type), None)
    return {
        "type": standard or name_target(spec.type),
        "context": encode(spec.context),
        "children": [describe_tree(child, encode) for child in spec.children()],
    }


def rebuild_tree(data: Any, decode: Callable[[Any], Any], find: Callable[[str], Any]) -> Any:
    """Return the structure that was described; LookupError or ValueError where none was."""
    if data is None:
        return pytree.treespec_leaf()
    kind = _STANDARD.get(data["type"]) or find(data["type"])
    if kind not in pytree.SUPPORTED_NODES:
        raise LookupError(f"{kind} is no structure that torch knows: first import what registers it")
    children = [rebuild_tree(child, decode, find) for child in data["children"]]
    return pytree.TreeSpec(kind, decode(data["context"]), children)


def describe_convention(graph: Graph, encode: Callable[[Any], Any]) -> Any:
    """Return how a graph is called as JSON's own types; ValueError of what only its own code knows."""
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
    """Let a graph be called as described; LookupError or ValueError where it is not described."""
    if data == "values":
        return
    _refuse_defaults(graph)
    if data == "boxed":
        graph.set_codegen(_BoxedCodeGen())
        return
    names = data["names"]
    taken = rebuild_tree(data["taken"], decode, find)
    returned = None if data["returned"] is None else rebuild_tree(data["returned"]["tree"], decode, find)
    # these become text of the code that torch generates for the graph
    keys = [key for child in taken.children() if child.type is dict for key in child.context]
    for name in (*names, *keys):
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is no name of an argument")
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, taken, returned)))


def _refuse_defaults(graph: Graph) -> None:
    # torch cuts the text of such placeholders at signs that the text of a default may have in it
    for node in graph.nodes:
        if node.op == "placeholder" and node.args:
            raise ValueError(f"{node.name} has a default, which a graph that takes structures cannot have")


def is_plain_name(name: Any) -> bool:
    """Tell whether text can be a name in code, and nothing else."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def rename(node: Node, name: str) -> None:
    """Give a node exactly this name, also where torch would have made another of it."""
    if node.name != name:
        node.graph._graph_namespace._rename_object(node, name)
        node.name = name
