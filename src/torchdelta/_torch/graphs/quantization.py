"""Read from quantize and dequantize nodes which levels a tensor is rounded to. Start reading at `levels_of`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.graphs.handles import is_dequantizing, is_quantizing, observed_by
from torchdelta._torch.graphs.nodes import arguments

_KINDS = ("per_tensor", "per_channel", "per_token")


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The levels of one quantized tensor: `low` to `high`, a `scale` apart, with zero at `zero_point`."""

    scale: torch.Tensor | None
    """None if the graph computes it from the values themselves."""
    zero_point: torch.Tensor | None
    low: int
    high: int
    axes: tuple[int, ...] | None
    """The dimensions along which the scale varies, or None if those are all but the last."""

    def along(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return a scale or zero point in a shape that broadcasts over the values; a single element becomes 0-d."""
        if parameter.numel() == 1:
            return parameter.reshape(())
        shape = [1] * values.dim()
        for axis in self.axes_in(values):
            shape[axis] = values.shape[axis]
        return parameter.reshape(shape)

    def axes_in(self, values: torch.Tensor) -> tuple[int, ...]:
        """Return the dimensions of these values along which the scale varies, counted from the first.

        These are all but the last if `axes` is None.
        """
        if self.axes is None:
            return tuple(range(values.dim() - 1))
        return tuple(axis % max(values.dim(), 1) for axis in self.axes)


def levels_of(node: Node) -> Levels | None:
    """Return the levels of a dequantize node, or None if its operator is of an unknown kind or has no bounds.

    If its first input is a quantize node, the result is that of the quantize node, because it did the rounding.
    """
    source = observed_by(node)
    is_rounded_here = source is not None and is_quantizing(source) and not is_dequantizing(source)
    return _levels_in(source if is_rounded_here and source is not None else node)


def _levels_in(node: Node) -> Levels | None:
    """Return the levels that the arguments of a quantize or dequantize node describe, or None.

    None if its operator is not one by tensor, channel or token, or if its bounds are not two integers, the lower one
    first. The scale or zero point of the levels is None if the graph computes it.
    """
    operator = str(node.target).split(".")[1]
    kind = next((kind for kind in _KINDS if operator.endswith(kind)), None)
    values = arguments(node)
    low, high = values.get("quant_min"), values.get("quant_max")
    if kind is None or not isinstance(low, int) or not isinstance(high, int) or high <= low:
        return None
    axes: dict[str, tuple[int, ...] | None] = {
        "per_tensor": (),
        "per_channel": (int(values.get("axis", 0)),),
        "per_token": None,
    }
    return Levels(
        scale=_constant(values.get("scale", values.get("scales")), node),
        zero_point=_constant(values.get("zero_point", values.get("zero_points")), node),
        low=low,
        high=high,
        axes=axes[kind],
    )


def _constant(value: Any, node: Node) -> torch.Tensor | None:
    """Return a number, a tensor, or the tensor that a `get_attr` node reads, as a float64 tensor; None for the rest.

    `value` is an argument of `node`.
    """
    if isinstance(value, Node):
        module = node.graph.owning_module
        if value.op != "get_attr" or module is None:
            return None
        attribute: Any = module
        for name in str(value.target).split("."):
            attribute = getattr(attribute, name)
        value = attribute
    if isinstance(value, torch.Tensor):
        return value.detach().double()
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, (int, float)) else None
