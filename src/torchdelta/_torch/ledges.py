"""Where a program jumps: operations whose result is another for the smallest change of an operand at their edge.

For each integer or boolean that a comparison, a choice or a rounding made of floats, the margin is how far the operand
is from the edge: two values that compare equal, two largest ones, a half. Within noise of its edge a correct program
may fall on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Margins = Callable[..., torch.Tensor | None]


class Ledges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, the margin of every integer that floats were turned into is kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.margins: dict[StorageWeakRef, tuple[torch.Tensor, str]] = {}

    def margin_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """Return the margin of each element and the operation that made it; None where that is not known."""
        found = self.margins.get(_identity(tensor))
        return found if found is not None and found[0].shape == tensor.shape else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and keep the margin of what it decided."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        is_rounded = name in _ROUNDED
        decided = [output for output in outputs if is_rounded or not output.is_floating_point()]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not decided or not operands:
            return made
        is_known = name == "_to_copy" and self.margin_of(operands[0]) is not None
        if name in _MARGINS and operands[0].is_floating_point() and not is_known:
            margin = _MARGINS[name](decided[0], *args, **kwargs)
            if margin is not None:
                self.margins[_identity(decided[0])] = margin, name
        elif len(known := [found for operand in operands if (found := self.margin_of(operand))]) == 1:
            # an integer computed from one that was decided has its margin
            self.margins[_identity(decided[0])] = known[0]
        return made


def _identity(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _compared(_: torch.Tensor, first: torch.Tensor, second: Any, **__: Any) -> torch.Tensor:
    distance: torch.Tensor = (first - second).abs()
    return distance


def _to_whole(_: torch.Tensor, values: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    margin = (values - values.round()).abs()
    # a float that is a whole number was one before: it is at no edge
    return margin.where(margin > 0, torch.inf)


def _to_nearest(_: torch.Tensor, values: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    return 0.5 - (values - values.round()).abs()


def _chosen(made: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor | None:
    """Return the distance of the largest, or of each of the first few, from its neighbour in the order."""
    dim = named.get("dim", next((value for value in rest if isinstance(value, int) and value < values.dim()), None))
    if dim is None:
        ordered = values.reshape(-1).sort(descending=True).values
        return (ordered[0] - ordered[1]).reshape(made.shape) if ordered.numel() > 1 else None
    return _in_order(made, values, int(dim))


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
    made: torch.Tensor, values: torch.Tensor, count: int, dim: int = -1, *_: Any, **__: Any
) -> torch.Tensor | None:
    del count
    return _in_order(made, values, dim)


def _sorted(made: torch.Tensor, values: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> torch.Tensor | None:
    return _in_order(made, values, dim)


_ROUNDED = frozenset({"ceil", "floor", "round", "trunc"})
_MARGINS: dict[str, Margins] = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared),
    **dict.fromkeys(("argmax", "argmin", "max", "min"), _chosen),
    "topk": _top,
    "sort": _sorted,
    **dict.fromkeys(("_to_copy", "ceil", "floor", "trunc"), _to_whole),
    "round": _to_nearest,
}
