"""What a program chose among floats, recorded in one run and replayed in another.

Where two values are within rounding of each other, a correct program may choose either, and everything behind the
choice is another computation: a token goes to another expert. Two runs can only be compared there if both choose alike.

Choices by a hair: among which values each was made, by what margin, and what the other way would have been.

Where a program jumps: operations whose result is another for the smallest change of an operand at their edge.

For each integer or boolean that a comparison, a choice or a rounding made of floats, the margin is how far the operand
is from the edge: two values that compare equal, two largest ones, a half. Within noise of its edge a correct program
may fall on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.tensors import ViewKey, view_key

aten = torch.ops.aten
_CHOICES = {
    aten.topk.default: 2,
    aten.sort.default: 1,
    aten.sort.stable: None,
    aten.argmax.default: 1,
    aten.argmin.default: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
}
"""Where the dimension stands among the arguments."""

NEAR = 16.0
"""Two values within so many units of rounding of each other may be in either order."""


class ChoiceRecord(OperationMode):
    """While it is active, the indices of every choice are kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen: list[torch.Tensor] = []

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, and keep what it chose."""
        made = func(*args, **(kwargs or {}))
        if is_choice(func, args):
            self.chosen.append((made[1] if isinstance(made, tuple) else made).clone())
        return made


class ChoiceReplay(OperationMode):
    """While it is active, each choice that is a matter of rounding, in this unit, is made as it was recorded."""

    def __init__(self, chosen: list[torch.Tensor], unit: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen = iter(chosen)
        self.unit = unit
        self.count = 0
        """Choices that would have been others."""

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation; where it chose otherwise by a hair, return what was chosen before."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not is_choice(func, args):
            return made
        before = next(self.chosen, None)
        indices = made[1] if isinstance(made, tuple) else made
        if before is None or before.shape != indices.shape:
            return made
        dim = choice_dim(func, args, kwargs)
        settled = self._settled(args[0], indices, before, dim)
        if not isinstance(made, tuple):
            return settled
        return type(made)((values_at(args[0], settled, dim), settled))

    def _settled(
        self, values: torch.Tensor, indices: torch.Tensor, before: torch.Tensor, dim: int | None
    ) -> torch.Tensor:
        margin = (values_at(values, indices, dim) - values_at(values, before, dim)).abs()
        size = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=indices.dim() == values.dim())
        near = margin <= NEAR * self.unit * size
        if dim is not None and near.dim() == values.dim():
            # one row is one choice: half of it replayed might choose the same value twice
            near = near.all(dim, keepdim=True).expand_as(near)
        self.count += int((near & (indices != before)).sum())
        return torch.where(near, before, indices)


def is_choice(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an operation chooses among floats."""
    return func in _CHOICES and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()


def choice_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension that an operation chooses along; None where it chooses among all values."""
    default = None if func in (aten.argmax.default, aten.argmin.default) else -1
    position = _CHOICES[func]
    dim = args[position] if position is not None and len(args) > position else kwargs.get("dim", default)
    return None if dim is None else int(dim)


def values_at(values: torch.Tensor, indices: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return the values at the chosen places."""
    if dim is None:
        return values.reshape(-1)[indices]
    if indices.dim() == values.dim():
        return values.gather(dim, indices)
    return values.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


@dataclass(frozen=True, kw_only=True)
class CloseChoice:
    """One operation that chose among floats."""

    operation: str
    rows: torch.Tensor
    """The values in float64, one row for each thing that was chosen among."""
    indices: torch.Tensor
    """What was chosen, as the operation returned it."""
    dim: int | None
    """Along which dimension of the indices a row of them lies; None where each is one row."""

    @classmethod
    def of(cls, operation: str, values: torch.Tensor, indices: torch.Tensor, dim: int | None) -> CloseChoice:
        """Return a choice along a dimension of the values, or among all of them."""
        wide = values.detach().double()
        if dim is None or values.dim() == 0:
            rows = wide.reshape(1, -1)
        else:
            rows = wide.movedim(dim, -1).reshape(-1, values.shape[dim])
        along = dim if dim is not None and indices.dim() == values.dim() > 0 else None
        return cls(operation=operation, rows=rows, indices=indices.detach().clone(), dim=along)

    @property
    def chosen(self) -> torch.Tensor:
        """What was chosen, row by row."""
        if self.dim is None:
            return self.indices.reshape(-1, 1)
        return self.indices.movedim(self.dim, -1).reshape(-1, self.indices.shape[self.dim])

    def other_way(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return by how much each row was decided, and which two places change with each other if it is not."""
        chosen, rows = self.chosen, self.rows
        if rows.shape[-1] < 2 or not chosen.shape[-1]:
            return rows.new_full((len(rows),), torch.inf), chosen.new_zeros((len(rows), 2))
        if chosen.shape[-1] == rows.shape[-1]:  # an order of all: the two that are nearest
            margins, at = rows.gather(-1, chosen).diff(dim=-1).abs().min(-1, keepdim=True)
            return margins[:, 0], chosen.gather(-1, torch.cat((at, at + 1), -1))
        inside = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, chosen, True)
        lowest_in, highest_in = rows.where(inside, torch.inf).min(-1), rows.where(inside, -torch.inf).max(-1)
        lowest_out, highest_out = rows.where(~inside, torch.inf).min(-1), rows.where(~inside, -torch.inf).max(-1)
        is_largest = lowest_in.values >= highest_out.values
        margins = torch.where(is_largest, lowest_in.values - highest_out.values, lowest_out.values - highest_in.values)
        given = torch.where(is_largest, lowest_in.indices, highest_in.indices)
        taken = torch.where(is_largest, highest_out.indices, lowest_out.indices)
        return margins, torch.stack((given, taken), -1)

    def changed(self, row: int, pair: torch.Tensor) -> torch.Tensor:
        """Return the indices with two places changed with each other in one row."""
        rows = self.chosen.clone()
        before = rows[row].clone()
        rows[row] = torch.where(before == pair[0], pair[1], torch.where(before == pair[1], pair[0], before))
        if self.dim is None:
            return rows.reshape(self.indices.shape)
        return rows.reshape(self.indices.movedim(self.dim, -1).shape).movedim(-1, self.dim)


class DecisionWatch(OperationMode):
    """While it is active, every choice is kept with what it was made among."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices: list[CloseChoice] = []

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, and keep its choice."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if is_choice(func, args):
            indices = made[1] if isinstance(made, tuple) else made
            name = func._schema.name.partition("::")[2]
            self.choices.append(CloseChoice.of(name, args[0], indices, choice_dim(func, args, kwargs)))
        return made


class ForcedDecisions(OperationMode):
    """While it is active, the first choices are these, whatever the values are; later ones are free."""

    def __init__(self, chosen: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen = iter(chosen)

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation; a choice returns what it is told to."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not is_choice(func, args):
            return made
        told = next(self.chosen, None)
        indices = made[1] if isinstance(made, tuple) else made
        if told is None or told.shape != indices.shape:
            return made
        if not isinstance(made, tuple):
            return told.clone()
        return type(made)((values_at(args[0], told, choice_dim(func, args, kwargs)), told.clone()))


aten = torch.ops.aten
Margins = Callable[..., torch.Tensor | None]


class MarginWatch(OperationMode):
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
