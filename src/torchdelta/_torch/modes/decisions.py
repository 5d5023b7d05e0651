"""Decisions among floats: recorded in one run of a program, replayed in another, and by which margin they were made.

An operation decides if the smallest change of an operand can make its result jump. A choice (argmax, topk, sort, …)
returns the indices of the values that it chose, a comparison returns a boolean, a rounding returns a whole number. The
margin is the distance of the operand from the edge at which the result jumps. Within rounding of that edge, a correct
program may decide either way, and everything that is computed from the decision then differs by far more than rounding:
a token goes to another expert. Two runs can be compared behind a decision only if both decide alike.

    with DecisionRecord() as record:
        reference = program(inputs)
    with DecisionReplay(record.indices, unit=2.0**-24):
        truth = program(lifted_inputs)

`_DECIDERS` is the table of all operations that decide: start reading there. `DecisionRecord` and `DecisionReplay`
handle the choices, because only those are replayed. `MarginWatch` follows the margins of all integers and booleans.
A check uses the three in `check/decisions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.tensors import ViewKey, view_key

aten = torch.ops.aten

NEAR = 16.0
"""Two values within this many units of rounding of each other may be in either order.

It serves a replay, which knows the dtype's unit of rounding and no measured noise.
"""


def _distance_of_operands(first: torch.Tensor, second: Any, **_: Any) -> torch.Tensor:
    """Return how far two operands are apart: the margin of a comparison."""
    distance: torch.Tensor = (first - second).abs()
    return distance


def _distance_from_zero(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return how far each value is from zero, where the sign jumps; other arguments are ignored."""
    return values.abs()


def _distance_from_whole(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return how far each value is from the nearest whole number; other arguments are ignored."""
    return (values - values.round()).abs()


def _distance_from_truncation(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return how far each value is from the nearest whole number except 0, where its whole part jumps."""
    sizes = values.abs()
    return torch.where(sizes < 1.0, 1.0 - sizes, _distance_from_whole(values))


def _distance_of_cast(values: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    """Return how far each value is from where its cast to an integer or boolean dtype jumps."""
    return _distance_from_zero(values) if dtype is torch.bool else _distance_from_truncation(values)


def _distance_from_half(values: torch.Tensor, *_: Any, decimals: int = 0, **__: Any) -> torch.Tensor:
    """Return how far each value is from the nearest half of the last digit that `round` keeps, where it jumps."""
    scale = 10.0**decimals
    scaled = values * scale
    return (0.5 - (scaled - scaled.round()).abs()) / scale


@dataclass(frozen=True, kw_only=True)
class _Decider:
    """How one operation of aten decides."""

    margins: Callable[..., torch.Tensor] | None = None
    """Takes the arguments, and returns the margin of each element of the result; None for a choice: see `Choice`."""
    returns_floats: bool = False
    """Whether the decided values are floats, which a rounding returns."""
    choosing: tuple[str, ...] = ()
    """The overloads that return indices of the values which they chose, and write to no argument."""
    dim_position: int = 1
    """The place of the dimension among the arguments of a choice."""
    default_dim: int | None = -1
    """The dimension of a choice that names none; None if it chooses among all values."""


_DECIDERS: dict[str, _Decider] = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _Decider(margins=_distance_of_operands)),
    "_to_copy": _Decider(margins=_distance_of_cast),
    **dict.fromkeys(("ceil", "floor"), _Decider(margins=_distance_from_whole, returns_floats=True)),
    "trunc": _Decider(margins=_distance_from_truncation, returns_floats=True),
    **dict.fromkeys(("sign", "sgn"), _Decider(margins=_distance_from_zero, returns_floats=True)),
    "round": _Decider(margins=_distance_from_half, returns_floats=True),
    **dict.fromkeys(("argmax", "argmin"), _Decider(choosing=("default",), default_dim=None)),
    **dict.fromkeys(("max", "min"), _Decider(choosing=("dim",))),
    "topk": _Decider(choosing=("default",), dim_position=2),
    "sort": _Decider(choosing=("default", "stable")),
}
"""Every operation that decides among floats, by its name in aten."""

# these move elements of one tensor, so a margin can be moved along by the same call
_MOVES = frozenset({aten.clone.default, aten.flip.default, aten.index_select.default, aten.roll.default})

_EXTREMES = frozenset({aten.max.default, aten.min.default, aten.amax.default, aten.amin.default})


def is_choice(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Tell whether a call returns indices of floats that it chose: argmax, argmin, max and min by dim, topk, sort.

    It is False for operands that are not of floats, and for an overload that writes to an argument (out=).
    """
    decider = _decider_of(func)
    return (
        decider is not None
        and func._overloadname in decider.choosing
        and isinstance(args[0], torch.Tensor)
        and args[0].is_floating_point()
    )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One call of an operation that chose among floats.

    A row is one set of values that the operation chose among: all values, or those along one dimension.
    """

    operation: str
    values: torch.Tensor
    indices: torch.Tensor
    """The indices of the chosen values, as the operation returned them."""
    dim: int | None
    """The dimension of the values that the operation chose along; None if it chose among all of them."""

    @classmethod
    def of(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], indices: torch.Tensor) -> Choice:
        """Return the choice that a call made, given the indices that it returned; values and indices are not copied.

        The dimension is the call's argument, or the operation's default if the call names none.
        """
        name = _name_of(func)
        decider = _DECIDERS[name]
        is_positional = len(args) > decider.dim_position
        dim = args[decider.dim_position] if is_positional else kwargs.get("dim", decider.default_dim)
        return cls(operation=name, values=args[0], indices=indices, dim=None if dim is None else int(dim))

    def copy(self) -> Choice:
        """Return a choice with detached copies, which later writes to the values or the indices do not change."""
        return Choice(
            operation=self.operation,
            values=self.values.detach().clone(),
            indices=self.indices.detach().clone(),
            dim=self.dim,
        )

    @property
    def rows(self) -> torch.Tensor:
        """The values in float64 as a matrix, with one row for each set of values that was chosen among."""
        wide = self.values.double()
        if self.dim is None or wide.dim() == 0:
            return wide.reshape(1, -1)
        return _as_rows(wide, self.dim)

    @property
    def index_rows(self) -> torch.Tensor:
        """The indices as a matrix, with one row for each row of the values."""
        if self._index_dim is None:
            return self.indices.reshape(-1, 1)
        return _as_rows(self.indices, self._index_dim)

    @property
    def _index_dim(self) -> int | None:
        """The dimension along which a row of the indices lies; None if each index is a row by itself."""
        return self.dim if self.dim is not None and self.indices.dim() == self.values.dim() > 0 else None

    def has_values_at(self, indices: torch.Tensor) -> bool:
        """Tell whether every index is valid here, because those of another run may be of more values; True if none.

        Valid are the indices from 0 below the number of values that the choice is among.
        """
        count = self.values.numel() if self.dim is None or not self.values.dim() else self.values.shape[self.dim]
        return not indices.numel() or (int(indices.min()) >= 0 and int(indices.max()) < count)

    def values_at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the choice's values at these indices, of the shape that the operation returns them in.

        The indices must have the same shape as those of the choice.
        """
        if self.dim is None:
            return self.values.reshape(-1)[indices]
        if indices.dim() == self.values.dim():
            return self.values.gather(self.dim, indices)
        return self.values.gather(self.dim, indices.unsqueeze(self.dim)).squeeze(self.dim)

    def margins(self) -> torch.Tensor | None:
        """Return the distance of each chosen value from the nearest other one of its row, in the shape of the indices.

        That is the margin of an index as an integer: a smaller change keeps the value in its place of the order. Return
        None if a row has fewer than two values.
        """
        values, dim = self.values, self.dim
        if dim is None:
            ordered = values.reshape(-1).sort(descending=self.operation == "argmax").values
            return (ordered[0] - ordered[1]).abs().reshape(self.indices.shape) if ordered.numel() > 1 else None
        if values.dim() == 0 or values.shape[dim] < 2:
            return None
        ordered = values.sort(dim).values
        end = torch.full_like(values.narrow(dim, 0, 1), torch.inf)
        gaps = torch.cat((end, ordered.diff(dim=dim), end), dim)
        count = values.shape[dim]
        nearest = torch.minimum(gaps.narrow(dim, 0, count), gaps.narrow(dim, 1, count))
        # back from the order of the values to their places
        distances = torch.empty_like(values).scatter_(dim, values.argsort(dim), nearest)
        if self._index_dim is not None:
            return distances.gather(dim, self.indices)
        return distances.gather(dim, self.indices.unsqueeze(dim)).squeeze(dim)

    def nearest_exchanges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the margin of each row, and a matrix with two indices a row that a change of that size exchanges.

        The two are a chosen index, and the one that would take its place. The order among the chosen values does not
        count, unless all values of a row were chosen, as a sort does: then the two are the neighbours with the smallest
        distance. Where a row has no other choice, the margin is infinite and the indices are 0.
        """
        chosen, rows = self.index_rows, self.rows
        if rows.shape[-1] < 2 or not chosen.shape[-1]:
            return rows.new_full((len(rows),), torch.inf), chosen.new_zeros((len(rows), 2))
        if chosen.shape[-1] == rows.shape[-1]:
            margins, at = rows.gather(-1, chosen).diff(dim=-1).abs().min(-1, keepdim=True)
            return margins[:, 0], chosen.gather(-1, torch.cat((at, at + 1), -1))
        inside = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, chosen, True)
        lowest_in, highest_in = rows.where(inside, torch.inf).min(-1), rows.where(inside, -torch.inf).max(-1)
        lowest_out, highest_out = rows.where(~inside, torch.inf).min(-1), rows.where(~inside, -torch.inf).max(-1)
        is_largest = lowest_in.values >= highest_out.values
        margins = torch.where(is_largest, lowest_in.values - highest_out.values, lowest_out.values - highest_in.values)
        leaving = torch.where(is_largest, lowest_in.indices, highest_in.indices)
        entering = torch.where(is_largest, highest_out.indices, lowest_out.indices)
        return margins, torch.stack((leaving, entering), -1)

    def exchange(self, row: int, pair: torch.Tensor) -> torch.Tensor:
        """Return a copy of the indices, in which the two indices of `pair` are exchanged in the row number `row`.

        If only one of the two is in the row, the other takes its place; if neither is, nothing changes.
        """
        rows = self.index_rows.clone()
        before = rows[row].clone()
        rows[row] = torch.where(before == pair[0], pair[1], torch.where(before == pair[1], pair[0], before))
        if self._index_dim is None:
            return rows.reshape(self.indices.shape)
        return rows.reshape(self.indices.movedim(self._index_dim, -1).shape).movedim(-1, self._index_dim)


class DecisionRecord(OperationMode):
    """Keeps a copy of every choice that is made while the mode is active, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices: list[Choice] = []

    @property
    def indices(self) -> list[torch.Tensor]:
        """The indices of every choice, as `DecisionReplay` takes them."""
        return [choice.indices for choice in self.choices]

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and return its result; append a copy of its choice to `choices` if it is a choice."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_choice(func, args):
            self.choices.append(Choice.of(func, args, kwargs, _indices_in(result)).copy())
        return result


class DecisionReplay(OperationMode):
    """Makes the choices of a program as they were recorded, in the same order; choices beyond the record are free.

    With a `unit` of rounding, recorded indices are taken only where their present values are within rounding of those
    that the program would choose. Without, they are forced, whatever the values are. A choice is free too if its
    indices have another shape than the recorded ones, or if a recorded index is beyond its values.
    """

    def __init__(self, recorded: Iterable[torch.Tensor], *, unit: float | None = None) -> None:
        """Begin at the first entry of `recorded`, which has one tensor of indices for each choice, in order.

        `unit` is the relative unit of rounding; with None, recorded indices are forced.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = iter(recorded)
        self.unit = unit
        self.count = 0
        """Indices that would have been others, where only those within rounding are replayed."""

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and return its result; of a choice, return the next recorded indices instead of its own.

        If the choice returns values too, they are the present ones at those indices. With a `unit`, only indices within
        rounding are replaced. Each choice takes one entry off the record. Its own result is returned if the record has
        ended, the shapes differ, or one of the recorded indices is beyond the values.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_choice(func, args):
            return result
        recorded = next(self.recorded, None)
        choice = Choice.of(func, args, kwargs, _indices_in(result))
        if recorded is None or recorded.shape != choice.indices.shape or not choice.has_values_at(recorded):
            return result
        indices = recorded.clone() if self.unit is None else self._replay_close(choice, recorded, self.unit)
        return type(result)((choice.values_at(indices), indices)) if isinstance(result, tuple) else indices

    def _replay_close(self, choice: Choice, recorded: torch.Tensor, unit: float) -> torch.Tensor:
        """Return the recorded indices where their values are within rounding of the chosen ones, else the choice's own.

        Within rounding is a distance of up to `NEAR` times `unit` times the largest of three sizes: the absolute values
        of the two, and the median of those of the row. One that is not finite counts as 0. A row of several indices is
        replayed as a whole or not at all. The number of indices that are changed is added to `count`.
        """
        values, indices, dim = choice.values, choice.indices, choice.dim
        if not indices.numel():
            return indices
        chosen, others = choice.values_at(indices), choice.values_at(recorded)
        # not the largest of the row, which may be a mask constant: any two values are close beside that
        typical = values.abs().where(values.isfinite(), torch.nan)
        if dim is None:
            typical = typical.nanmedian()
        else:
            typical = typical.nanmedian(dim, keepdim=indices.dim() == values.dim()).values
        sizes = (chosen.abs(), others.abs(), typical.expand_as(chosen))
        size = torch.stack([each.where(each.isfinite(), 0.0) for each in sizes]).amax(0)
        near = (chosen - others).abs() <= NEAR * unit * size
        if dim is not None and near.dim() == values.dim():
            # a row is replayed as a whole, because a part of it might choose one value twice
            near = near.all(dim, keepdim=True).expand_as(near)
        self.count += int((near & (indices != recorded)).sum())
        return torch.where(near, recorded, indices)


class MarginWatch(OperationMode):
    """While active, keeps the margins of integers and booleans that were decided among floats, and of rounded floats.

    A margin goes where its element goes: through views, some moves, casts, pointwise operations, and into a maximum or
    minimum. Where several elements meet, the smallest margin counts. Whole floats that are computed from rounded ones
    keep the margins, so that a cast to integers behind a clamp is not a second decision.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.margins: dict[ViewKey, tuple[torch.Tensor, str]] = {}

    def margin_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """Return the margin of each element and the name of the operation that decided; None if not known."""
        return self.margins.get(view_key(tensor))

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, keep the margins of its decided output if they are known, and return its result.

        The decided output is the first tensor that is not of floats, or the result of a rounding, or whole floats that
        are computed from operands with margins. An operation of `_DECIDERS` whose first tensor is of floats gives new
        margins, except for a cast of a decided value. Others hand on the smallest of those of their operands, with the
        name of the first; nothing is kept if one of them is not known any more: see `_moved_margins`. Of several views,
        as `unbind` returns them, each keeps its own.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [margin for operand in operands if (margin := self.margin_of(operand)) is not None]
        if func.is_view and known and isinstance(result, (tuple, list)):
            margins, name = known[0]
            for view, moved in zip(result, func(margins, *args[1:], **kwargs), strict=True):
                self._keep(view, moved, name)
            return result
        decided = _decided_output(func, result)
        if decided is None and known and isinstance(result, torch.Tensor) and _are_whole(result):
            decided = result
        if decided is None or not operands:
            return result
        decider = _decider_of(func)
        # a cast of a decided value is not a second decision
        is_second = func is aten._to_copy.default and bool(known)
        if is_choice(func, args):
            self._keep(decided, Choice.of(func, args, kwargs, decided).margins(), _name_of(func))
        elif decider is not None and decider.margins is not None and operands[0].is_floating_point() and not is_second:
            self._keep(decided, decider.margins(*args, **kwargs), _name_of(func))
        elif known:
            moved = [_moved_margins(margins, func, args, kwargs) for margins, _ in known]
            self._keep(decided, _smallest(moved, decided.shape), known[0][1])
        return result

    def _keep(self, decided: torch.Tensor, margins: torch.Tensor | None, name: str) -> None:
        """Keep the margins of a decided tensor, and the operation's name, for `margin_of`; do nothing if they are None.

        Nothing is kept either if the margins have another shape than the tensor. Margins of freed tensors are dropped.
        """
        if margins is not None and margins.shape == decided.shape:
            self._drop_expired()
            self.margins[view_key(decided)] = margins, name

    def _drop_expired(self) -> None:
        """Drop the margins of tensors whose memory is freed."""
        for key in [key for key in self.margins if key[0].expired()]:  # type: ignore[no-untyped-call]
            del self.margins[key]


def _name_of(func: OpOverload) -> str:
    """Return the name of an operation without namespace and overload, such as `argmax`."""
    return func._schema.name.partition("::")[2]


def _decider_of(func: OpOverload) -> _Decider | None:
    """Return how an operation decides; None if it does not, or is not of aten."""
    return _DECIDERS.get(_name_of(func)) if func.namespace == "aten" else None


def _indices_in(result: Any) -> torch.Tensor:
    """Return the indices in the result of a choice, which may return the values before them."""
    indices: torch.Tensor = result[1] if isinstance(result, tuple) else result
    return indices


def _as_rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a matrix whose rows are the elements along one dimension; it may be empty."""
    last = tensor.movedim(dim, -1)
    return last.reshape(last.shape[:-1].numel(), last.shape[-1])


def _decided_output(func: OpOverload, result: Any) -> torch.Tensor | None:
    """Return the first tensor of a result that is not of floats, or the first of any dtype if the operation rounds.

    None if there is none.
    """
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    decider = _decider_of(func)
    takes_floats = decider is not None and decider.returns_floats
    return next((output for output in outputs if takes_floats or not output.is_floating_point()), None)


def _moved_margins(
    margins: torch.Tensor, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the margins of a call's result, given those of one decided operand; None if they are not known.

    They are known for a view, a move (`_MOVES`), a pointwise operation, a cast, and a maximum or minimum
    (`_EXTREMES`) of numbers. A view or move is run on `margins` in place of its first argument; an extreme has the
    smallest margin of the elements that are as large as it; otherwise `margins` themselves are returned, which may have
    to be broadcast. Of a sum, or an extreme of booleans, they are not known: how far it moves depends on how many
    elements are near their edge.
    """
    if func in _EXTREMES and args[0].dtype is not torch.bool:
        return _margins_of_extreme(margins, func, args, kwargs)
    if func.is_view or func in _MOVES:
        moved: torch.Tensor = func(margins, *args[1:], **kwargs)
        return moved
    return margins if torch.Tag.pointwise in func.tags or func is aten._to_copy.default else None


def _margins_of_extreme(
    margins: torch.Tensor, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the margins of a maximum or minimum, given those of the values that it is taken of.

    A decision moves a value to the next one at most, so only the elements that equal the extreme can move it.
    """
    values, dims, keepdim = args[0], (), False
    if func in (aten.amax.default, aten.amin.default):
        named = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
        dims, keepdim = tuple(named.get("dim", ())), bool(named.get("keepdim", False))
    extreme = (torch.amax if func in (aten.max.default, aten.amax.default) else torch.amin)(values, dims, keepdim=True)
    return torch.amin(margins.where(values == extreme, torch.inf), dims, keepdim=keepdim)


def _smallest(margins: list[torch.Tensor | None], shape: torch.Size) -> torch.Tensor | None:
    """Return the smallest of several margins at each element, broadcast to a shape.

    None if one is None or does not fit: what is known of some operands alone does not tell how the result was decided.
    """
    smallest: torch.Tensor | None = None
    for margin in margins:
        try:
            wide = None if margin is None else margin.broadcast_to(shape)
        except RuntimeError:
            return None
        if wide is None:
            return None
        smallest = wide if smallest is None else torch.minimum(smallest, wide)
    return smallest


def _are_whole(values: torch.Tensor) -> bool:
    """Tell whether a tensor is of floats that are all whole numbers."""
    return values.is_floating_point() and bool((values == values.round()).all())
