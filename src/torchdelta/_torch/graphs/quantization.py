"""What quantize and dequantize nodes say of the levels that they round to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.graphs.handles import is_dequantizing, is_quantizing, observed_by
from torchdelta._torch.graphs.nodes import arguments

_EVERY = ("per_tensor", "per_channel", "per_token")


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The levels of one quantized tensor: `low` to `high`, a `scale` apart, with zero at `zero_point`."""

    scale: torch.Tensor | None
    """None where the graph computes it from the values themselves."""
    zero_point: torch.Tensor | None
    low: int
    high: int
    axes: tuple[int, ...] | None
    """The dimensions along which the scale varies; None where those are all but the last."""

    def along(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return a scale or zero point in a shape that spreads over the values."""
        if parameter.numel() == 1:
            return parameter.reshape(())
        shape = [1] * values.dim()
        for axis in self.kept_in(values):
            shape[axis] = values.shape[axis]
        return parameter.reshape(shape)

    def kept_in(self, values: torch.Tensor) -> tuple[int, ...]:
        """Return the dimensions of these values along which the scale varies."""
        if self.axes is None:
            return tuple(range(values.dim() - 1))
        return tuple(axis % max(values.dim(), 1) for axis in self.axes)


def levels_of(node: Node) -> Levels | None:
    """Return the levels behind a dequantize node; None where nobody knows how its operator counts them.

    They are those that the values were rounded to: of the quantize node where there is one.
    """
    source = observed_by(node)
    is_rounded_here = source is not None and is_quantizing(source) and not is_dequantizing(source)
    return _levels_in(source if is_rounded_here and source is not None else node)


def _levels_in(node: Node) -> Levels | None:
    operator = str(node.target).split(".")[1]
    how = next((how for how in _EVERY if operator.endswith(how)), None)
    given = arguments(node)
    low, high = given.get("quant_min"), given.get("quant_max")
    if how is None or not isinstance(low, int) or not isinstance(high, int) or high <= low:
        return None
    by_axes: dict[str, tuple[int, ...] | None] = {
        "per_tensor": (),
        "per_channel": (int(given.get("axis", 0)),),
        "per_token": None,
    }
    return Levels(
        scale=_constant(given.get("scale", given.get("scales")), node),
        zero_point=_constant(given.get("zero_point", given.get("zero_points")), node),
        low=low,
        high=high,
        axes=by_axes[how],
    )


def _constant(value: Any, node: Node) -> torch.Tensor | None:
    if isinstance(value, Node):
        module = node.graph.owning_module
        if value.op != "get_attr" or module is None:
            return None
        held: Any = module
        for name in str(value.target).split("."):
            held = getattr(held, name)
        value = held
    if isinstance(value, torch.Tensor):
        return value.detach().double()
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, (int, float)) else None
