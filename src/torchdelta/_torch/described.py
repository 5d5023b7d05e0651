"""What a traced value was, without the value: fake tensors as shape, dtype, strides and device, and back.

A size that is a symbol is written as its text and its hint. Read back, equal texts are one symbol; that one expression
was computed from another is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import Source
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.passes.shape_prop import TensorMetadata

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
class _Place(Source):
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
        source = _Place(f"size_{len(self._symbols)}")
        symbol = self._shapes.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
        )
        return self._shapes.create_symintnode(symbol, hint=hint, source=source)


def _constant(name: Any, kind: type) -> Any:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return found
