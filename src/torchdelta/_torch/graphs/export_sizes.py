"""The sizes that an exported program leaves open: asked for with `dynamic_shapes`, and found with `open_sizes`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves

_UNBOUNDED = 2**31


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that an exported program leaves open: its symbol, and the bounds within which it may be."""

    name: str
    least: int
    most: int


def dynamic_shapes(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], axes: Collection[int]
) -> Any:
    """Return the `dynamic_shapes` for `torch.export` that leave sizes of the inputs open, where the program allows it.

    These are the sizes above 1 of every tensor on the given axes, or on all axes if none is given.
    """
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor):
            open_axes = [axis for axis, size in enumerate(leaf.shape) if size > 1 and (not axes or axis in axes)]
            if open_axes:
                shapes[leaf] = dict.fromkeys(open_axes, Dim.AUTO)
    return shapes.dynamic_shapes(module, args, dict(kwargs))  # type: ignore[no-untyped-call]


def open_sizes(program: ExportedProgram) -> list[list[Size | None]]:
    """Return for each flat input of an exported program the open size of each axis, or None for a fixed one.

    A size that is computed from a symbol, and the symbol itself, count as fixed, because both would have to change
    together. An input that is not a tensor has an empty list.
    """
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    shapes = [getattr(values.get(str(name)), "shape", ()) for name in names]
    expressions = [size.node.expr for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    computed = {symbol for each in expressions if not each.is_symbol for symbol in each.free_symbols}
    return [[_open_size(size, program, computed) for size in shape] for shape in shapes]


def _open_size(size: int | torch.SymInt, program: ExportedProgram, computed: Collection[Any]) -> Size | None:
    """Return a size with its bounds if it is a symbol that is not in `computed`; None if it is fixed or an expression.

    Without bounds in the program they are 2 and `_UNBOUNDED`.
    """
    if not isinstance(size, torch.SymInt) or not size.node.expr.is_symbol or size.node.expr in computed:
        return None
    symbol = size.node.expr
    bounds = program.range_constraints.get(symbol)
    least, most = (bounds.lower, bounds.upper) if bounds is not None else (2, _UNBOUNDED)
    return Size(name=str(symbol), least=_as_int(least), most=_as_int(most))


def _as_int(bound: Any) -> int:
    """Return a bound as an integer; `_UNBOUNDED` if it is not one, such as infinity."""
    return int(bound) if isinstance(bound, int) or getattr(bound, "is_Integer", False) else _UNBOUNDED
