"""Where a program jumps: operations whose result is another for the smallest change of an operand at their edge.

For each integer or boolean that a comparison, a choice or a rounding made of floats, the margin is how far the operand
is from the edge: two values that compare equal, two largest ones, a half. Within noise of its edge a correct program
may fall on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchdelta._torch.operations import OperationMode
from torchdelta._torch.tensors import ViewKey, view_key

aten = torch.ops.aten
Margins = Callable[..., torch.Tensor | None]


class Ledges(OperationMode):
    """While it is active, the margin of every integer that floats were turned into is kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.margins: dict[ViewKey, tuple[torch.Tensor, str]] = {}

    def margin_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """Return the margin of each element and the operation that made it; None where that is not known."""
        return self.margins.get(view_key(tensor))

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, and keep the margin of what it decided."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        decided = [output for output in outputs if name in _ROUNDED or not output.is_floating_point()]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not decided or not operands:
            return made
        known = [found for operand in operands if (found := self.margin_of(operand)) is not None]
        is_decision = name in _MARGINS and operands[0].is_floating_point() and not (name == "_to_copy" and known)
        margin: torch.Tensor | None = None
        if is_decision:
            margin = _MARGINS[name](name, decided[0], *args, **kwargs)
        elif len(known) == 1:
            # an integer computed from one that was decided has its margin, wherever it is moved to
            margin, name = known[0]
            if func.is_view or func in _MOVES:
                margin = func(margin, *args[1:], **kwargs)
            elif torch.Tag.pointwise not in func.tags and func is not aten._to_copy.default:
                margin = None
        if margin is not None and margin.shape == decided[0].shape:
            self._forget()
            self.margins[view_key(decided[0])] = margin, name
        return made

    def _forget(self) -> None:
        for key in [key for key in self.margins if key[0].expired()]:  # type: ignore[no-untyped-call]
            del self.margins[key]


def _compared(_: str, __: torch.Tensor, first: torch.Tensor, second: Any) -> torch.Tensor:
    distance: torch.Tensor = (first - second).abs()
    return distance


def _to_whole(_: str, __: torch.Tensor, values: torch.Tensor, **___: Any) -> torch.Tensor:
    return (values - values.round()).abs()


def _to_nearest(_: str, __: torch.Tensor, values: torch.Tensor, **___: Any) -> torch.Tensor:
    return 0.5 - (values - values.round()).abs()


def _chosen(
    name: str, made: torch.Tensor, values: torch.Tensor, dim: int | None = None, *_: Any, **__: Any
) -> torch.Tensor | None:
    """Return the distance of the largest or smallest from the next."""
    if dim is not None:
        return _in_order(made, values, dim)
    ordered = values.reshape(-1).sort(descending=name in ("argmax", "max")).values
    return (ordered[0] - ordered[1]).abs().reshape(made.shape) if ordered.numel() > 1 else None


def _in_order(made: torch.Tensor, values: torch.Tensor, dim: int) -> torch.Tensor | None:
    if values.dim() == 0 or values.shape[dim] < 2:
        return None
    at = made if made.dim() == values.dim() else made.unsqueeze(dim)
    ordered = values.sort(dim).values
    gap = torch.full_like(values.narrow(dim, 0, 1), torch.inf)
    gaps = torch.cat((gap, ordered.diff(dim=dim), gap), dim)
    nearest = torch.minimum(gaps.narrow(dim, 0, values.shape[dim]), gaps.narrow(dim, 1, values.shape[dim]))
    # in the place of each value in the order, put its distance from the nearer neighbour
    margins = torch.empty_like(values).scatter_(dim, values.argsort(dim), nearest)
    found = margins.gather(dim, at)
    return found if made.dim() == values.dim() else found.squeeze(dim)


def _top(
    _: str, made: torch.Tensor, values: torch.Tensor, __: int, dim: int = -1, *___: Any, **____: Any
) -> torch.Tensor | None:
    return _in_order(made, values, dim)


def _sorted(
    _: str, made: torch.Tensor, values: torch.Tensor, dim: int = -1, *__: Any, **___: Any
) -> torch.Tensor | None:
    return _in_order(made, values, dim)


_MOVES = frozenset({aten.clone.default, aten.flip.default, aten.index_select.default, aten.roll.default})
_ROUNDED = frozenset({"ceil", "floor", "round", "trunc"})
_MARGINS: dict[str, Margins] = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared),
    **dict.fromkeys(("argmax", "argmin", "max", "min"), _chosen),
    "topk": _top,
    "sort": _sorted,
    **dict.fromkeys(("_to_copy", "ceil", "floor", "trunc"), _to_whole),
    "round": _to_nearest,
}
