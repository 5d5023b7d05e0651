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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.tensors import ViewKey, storage_key, view_key

aten = torch.ops.aten

NEAR = 16.0
"""Two values within this many units of rounding of each other may be in either order.

It serves a replay, which knows the dtype's unit of rounding and no measured noise.
"""


def _distance_of_operands(first: torch.Tensor, second: Any, **_: Any) -> torch.Tensor:
    """Return how far two operands are apart: the margin of a comparison."""
    # in float64, because torch does not subtract booleans
    first, second = (each.double() if isinstance(each, torch.Tensor) else each for each in (first, second))
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


def _quotient(first: torch.Tensor, second: Any) -> torch.Tensor:
    """Return the quotient that a floor division rounds."""
    quotient: torch.Tensor = first / second
    return quotient


def _distance_of_quotient(first: torch.Tensor, second: Any, **_: Any) -> torch.Tensor:
    """Return how far each quotient is from the nearest whole number, where a floor division jumps."""
    return _distance_from_whole(_quotient(first, second))


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
    operand: Callable[..., torch.Tensor] = lambda first, *_, **__: first
    """Takes the arguments, and returns the values that are rounded."""
    returns_floats: bool = False
    """Whether the decided values are floats, which a rounding returns."""
    choosing: tuple[str, ...] = ()
    """The overloads that return indices of the values which they chose, and write to no argument."""
    dim_position: int = 1
    """The place of the dimension among the arguments of a choice."""
    default_dim: int | None = -1
    """The dimension of a choice that names none; None if it chooses among all values."""


_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_DECIDERS: dict[str, _Decider] = {
    **dict.fromkeys(_COMPARISONS, _Decider(margins=_distance_of_operands)),
    "_to_copy": _Decider(margins=_distance_of_cast),
    **dict.fromkeys(("ceil", "ceil_", "floor", "floor_"), _Decider(margins=_distance_from_whole, returns_floats=True)),
    **dict.fromkeys(("trunc", "trunc_"), _Decider(margins=_distance_from_truncation, returns_floats=True)),
    **dict.fromkeys(("sign", "sign_", "sgn", "sgn_"), _Decider(margins=_distance_from_zero, returns_floats=True)),
    **dict.fromkeys(("round", "round_"), _Decider(margins=_distance_from_half, returns_floats=True)),
    **dict.fromkeys(
        ("floor_divide", "floor_divide_"),
        _Decider(margins=_distance_of_quotient, operand=_quotient, returns_floats=True),
    ),
    **dict.fromkeys(("argmax", "argmin"), _Decider(choosing=("default",), default_dim=None)),
    **dict.fromkeys(("max", "min"), _Decider(choosing=("dim",))),
    "topk": _Decider(choosing=("default",), dim_position=2),
    "sort": _Decider(choosing=("default", "stable")),
}
"""Every operation that decides among floats, by its name in aten."""

# these move elements of one tensor, so a margin can be moved along by the same call
_MOVES = frozenset(
    {aten._unsafe_view.default, aten.clone.default, aten.flip.default, aten.index_select.default, aten.roll.default}
)

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

    @property
    def row_numbers(self) -> torch.Tensor:
        """The number of its row for each index, in the shape of the indices."""
        index_rows = self.index_rows
        numbers = torch.arange(len(index_rows), device=self.indices.device)[:, None].expand(index_rows.shape)
        if self._index_dim is None:
            return numbers.reshape(self.indices.shape)
        return numbers.reshape(self.indices.movedim(self._index_dim, -1).shape).movedim(-1, self._index_dim)

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


class Origin:
    """Tells how far the operands of a decision would have to move to make it give other values."""

    def margins_of(self, values: torch.Tensor, truth: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return this distance for each element of `values`; infinite if no distance is enough.

        `truth` has the values that were decided, and `rows` the number of the row of each element, in the same shape.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class _ChoiceOrigin(Origin):
    """Elements are indices, and each was chosen among the values of its row."""

    values: torch.Tensor
    """A matrix."""

    def margins_of(self, values: torch.Tensor, truth: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the distance between the values at two indices; infinite for an index beyond the row."""
        count = self.values.shape[-1]
        is_inside = (values >= 0) & (values < count) & (truth >= 0) & (truth < count)
        chosen = self.values[rows, values.long().clamp(0, count - 1)]
        of_truth = self.values[rows, truth.long().clamp(0, count - 1)]
        # the distance between two infinities is not a number
        return (chosen - of_truth).abs().where(chosen != of_truth, 0.0).where(is_inside, torch.inf)


@dataclass(frozen=True)
class _ExtremeOrigin(Origin):
    """Elements are maxima of rows, in which each value becomes the other one if its comparison is decided otherwise."""

    values: torch.Tensor
    """A matrix, as are `others` and `margins`; for minima, values and others are negated."""
    others: torch.Tensor
    margins: torch.Tensor
    sign: float
    """-1 for minima, or else 1."""

    def margins_of(
        self,
        values: torch.Tensor,
        truth: torch.Tensor,  # noqa: ARG002 — the maxima follow from the rows
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return the margin up to which comparisons must be decided otherwise to give each value.

        All larger values must become smaller, and one element must have the value, by its own decision or the other.
        """
        maxima = self.sign * values.double().reshape(-1, 1)
        row = rows.reshape(-1)
        own, others, margins = self.values[row], self.others[row], self.margins[row]
        falls = margins.where(others <= maxima, torch.inf).where(own > maxima, 0.0).amax(-1)
        reaches = margins.where(others == maxima, torch.inf).where(own != maxima, 0.0).amin(-1)
        return torch.maximum(falls, reaches).reshape(values.shape)


@dataclass(frozen=True, kw_only=True)
class DecisionMargins:
    """What is known of the decisions behind a tensor."""

    margins: torch.Tensor
    """The margin of each element."""
    operation: str
    """The name of the operation that decided."""
    sources: tuple[torch.Tensor, ...] = ()
    """The margins from before an extreme, because that may be another element in another run."""
    other: torch.Tensor | None = None
    """What each element is if its comparison is decided otherwise; None if it does not come from one comparison."""
    step: float | None = None
    """How far an element moves if a rounding behind it gives the next number; None if it is not known."""
    operand: torch.Tensor | None = None
    """The operand of that rounding; None if it comes from earlier decisions, as the `origin` of a choice then is."""
    origin: Origin | None = None
    rows: torch.Tensor | None = None
    """The number of the row of `origin` for each element."""
    values: torch.Tensor | None = None
    """A copy of the tensor, if `step` or `origin` is known: a later write through a view is not seen."""

    @property
    def measures(self) -> tuple[torch.Tensor, ...]:
        """Margins that are those of the same decisions in every run."""
        return self.sources or (self.margins,)

    def moved(self, move: Callable[[torch.Tensor], Any]) -> DecisionMargins:
        """Return this record for the elements that a view or a move returns, given how it is called."""
        return replace(
            self,
            margins=move(self.margins),
            other=None if self.other is None else move(self.other),
            rows=None if self.rows is None else move(self.rows),
        )


_FEW_KEPT = 16
"""Up to so many margins are kept whether or not their tensors are alive."""


class MarginWatch(OperationMode):
    """While active, keeps the margins of integers and booleans that were decided among floats, and of rounded floats.

    A margin goes where its element goes: through views, some moves, casts, pointwise operations, and into a maximum or
    minimum. Where several elements meet, the smallest margin counts. Whole floats that are computed from rounded ones
    keep the margins, so that a cast to integers behind a clamp is not a second decision.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decided: dict[ViewKey, DecisionMargins] = {}
        self.behind: set[StorageWeakRef] = set()
        """The memory that was computed from decisions: if one of them goes another way, it has quite other values."""
        self._most_kept = _FEW_KEPT

    def decided_of(self, tensor: torch.Tensor) -> DecisionMargins | None:
        """Return what is known of the decisions behind a tensor; None if nothing is."""
        key = _key(tensor)
        return None if key is None else self.decided.get(key)

    def margin_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """Return the margin of each element and the name of the operation that decided; None if not known."""
        decided = self.decided_of(tensor)
        return None if decided is None else (decided.margins, decided.operation)

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, keep the margins of its decided output if they are known, and return its result.

        The decided output is the first tensor that is not of floats, or the result of a rounding, or whole floats that
        are computed from operands with margins. An operation of `_DECIDERS` whose first tensor is of floats gives new
        margins, except for a cast of a decided value. Others hand on the smallest of those of their operands, with the
        name of the first; nothing is kept if one of them is not known any more: see `_moved_margins`. Of several views,
        as `unbind` returns them, each keeps its own.
        """
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # before the operation runs, which may write to its operands
        before = _rounding_of(func, args, kwargs, operands) if func._schema.is_mutable else None
        result = func(*args, **kwargs)
        is_behind = any((key := _key(operand)) is not None and key[0] in self.behind for operand in operands)
        known = [each for operand in operands if (each := self.decided_of(operand)) is not None]
        if func.is_view and known and isinstance(result, (tuple, list)):
            parts = {
                name: func(tensor, *args[1:], **kwargs)
                for name in ("margins", "other", "rows")
                if (tensor := getattr(known[0], name)) is not None
            }
            for index, view in enumerate(result):
                self._keep(view, replace(known[0], **{name: views[index] for name, views in parts.items()}))
            return result
        decided = _decided_output(func, result)
        # a cast of a decided value is not a second decision
        is_second = func is aten._to_copy.default and bool(known)
        rounding = before
        if decided is not None and not is_second and not func._schema.is_mutable:
            rounding = _rounding_of(func, args, kwargs, operands)
        if is_behind or (decided is not None and (is_choice(func, args) or rounding is not None)):
            self._drop_expired()
            outputs = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self.behind.update(key[0] for output in outputs if (key := _key(output)) is not None)
        if decided is None and known and isinstance(result, torch.Tensor) and _are_whole(result):
            decided = result
        if decided is None or not operands:
            return result
        if is_choice(func, args):
            among = _decided_by_choice(Choice.of(func, args, kwargs, decided), args, kwargs)
            self._keep(decided, replace(among, origin=None, rows=None) if among is not None and is_behind else among)
        elif rounding is not None:
            edge = _decided_by_edge(*rounding, func, kwargs, decided)
            self._keep(decided, replace(edge, operand=None) if is_behind else edge)
        elif known:
            operand = next(each for each in operands if self.decided_of(each) is not None)
            self._keep(decided, _handed_on(operand, known, func, args, kwargs, decided))
        return result

    def _keep(self, tensor: torch.Tensor, decided: DecisionMargins | None) -> None:
        """Keep what is known of a decided tensor, for `decided_of`; do nothing if it is None.

        Nothing is kept either if the margins have another shape than the tensor, or the tensor has no plain memory. All
        is laid out in memory as the tensor is, because a view may depend on that. Margins of freed tensors are dropped.
        """
        key = _key(tensor)
        if decided is not None and decided.margins.shape == tensor.shape and key is not None:
            self._drop_expired()
            is_checked = decided.step is not None or decided.origin is not None
            decided = decided.moved(lambda each: _laid_out_like(tensor, each))
            self.decided[key] = replace(decided, values=tensor.clone() if is_checked else None)

    def _drop_expired(self) -> None:
        """Drop what is kept of tensors whose memory is freed, whenever twice as much is kept as after the last time."""
        if len(self.decided) + len(self.behind) < self._most_kept:
            return
        for key in [key for key in self.decided if key[0].expired()]:  # type: ignore[no-untyped-call]
            del self.decided[key]
        self.behind = {memory for memory in self.behind if not memory.expired()}  # type: ignore[no-untyped-call]
        self._most_kept = max(_FEW_KEPT, 2 * (len(self.decided) + len(self.behind)))


def _decided_by_choice(choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecisionMargins | None:
    """Return what is known of the indices of a choice; None if it had no two values to choose among."""
    margins = choice.margins()
    if margins is None:
        return None
    is_ordered = choice.operation != "topk" or bool(kwargs.get("sorted", args[4] if len(args) > 4 else True))
    if not is_ordered:
        return DecisionMargins(margins=margins, operation=choice.operation)
    rows = choice.row_numbers
    # the values may be written to later, while wide ones are a copy only if they are narrow
    return DecisionMargins(
        margins=margins, operation=choice.operation, origin=_ChoiceOrigin(choice.rows.clone()), rows=rows
    )


def _rounding_of(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the margins of an operation's result, and a copy in float64 of the values that it rounds.

    None if it is not a comparison, a rounding, or a cast to integers or booleans, or not of floats: those of a single
    byte have no arithmetic. One of two operands of a comparison is enough.
    """
    decider = _decider_of(func)
    among = operands[: 2 if _name_of(func) in _COMPARISONS else 1]
    is_of_floats = any(each.is_floating_point() and each.itemsize > 1 for each in among)
    if decider is None or decider.margins is None or not is_of_floats:
        return None
    if any(each.is_complex() or each.layout is not torch.strided for each in among):
        return None
    return decider.margins(*args, **kwargs), decider.operand(*args).detach().double().clone()


def _decided_by_edge(
    margins: torch.Tensor, operand: torch.Tensor, func: OpOverload, kwargs: dict[str, Any], decided: torch.Tensor
) -> DecisionMargins:
    """Return what is known of the result of a comparison, a rounding, or a cast to integers or booleans.

    `margins` are those of its elements, and `operand` the values that it rounds.
    """
    known = DecisionMargins(margins=margins, operation=_name_of(func).removesuffix("_"))
    if decided.dtype is torch.bool:
        return replace(known, other=~decided)
    # a sign may go to the other one
    step = 2.0 if known.operation in ("sign", "sgn") else 10.0 ** -kwargs.get("decimals", 0)
    return replace(known, step=step, operand=operand)


def _key(tensor: torch.Tensor) -> ViewKey | None:
    """Return the key of the elements of a tensor, or None if it has no plain memory, as a sparse one."""
    return view_key(tensor) if storage_key(tensor) else None


def _laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the other tensor, of the same shape, with the strides of the first; itself if that has elements twice."""
    if other.stride() == tensor.stride() or 0 in tensor.stride():
        return other
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=other.dtype, device=other.device).copy_(other)


def _handed_on(
    operand: torch.Tensor,
    known: list[DecisionMargins],
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decided: torch.Tensor,
) -> DecisionMargins | None:
    """Return what is known of the result of an operation on decided operands, which does not decide itself.

    `operand` is the first of them, and `known` has what is known of each. Return None if the margins are not known: see
    `_moved_margins`. Nor are they of an extreme of values that were not chosen, if neither the step nor the other
    values of its operand are: which elements may become the extreme is then not known.
    """
    first = known[0]
    if func is aten.index_select.default and operand is args[2]:
        shape = [-1 if dim == args[1] % decided.dim() else 1 for dim in range(decided.dim())]
        of_index = first.margins.reshape(shape).expand(decided.shape)
        return DecisionMargins(margins=of_index, operation=first.operation)
    if (func.is_view or func in _MOVES) and operand is not args[0]:
        return None
    if func.is_view or func in _MOVES:
        return first.moved(lambda tensor: func(tensor, *args[1:], **kwargs))
    is_extreme = func in _EXTREMES
    margins = _smallest([_moved_margins(each.margins, func, args, kwargs) for each in known], decided.shape)
    if margins is None:
        return None
    sources = sum((each.measures for each in known), ()) if is_extreme or any(each.sources for each in known) else ()
    handed = DecisionMargins(margins=margins, operation=first.operation, sources=sources)
    if len(known) > 1 or func._schema.is_mutable:
        return None if is_extreme else handed
    step = _step_behind(first.step, func, args, kwargs, decided)
    handed = replace(handed, step=step, operand=None if step is None else first.operand)
    if is_extreme:
        if first.other is not None:
            origin = _extreme_among(first.other, first.margins, func, args, kwargs)
            rows = torch.arange(len(origin.values), device=decided.device).reshape(decided.shape)
            return replace(handed, origin=origin, rows=rows)
        is_of_choice = bool(_DECIDERS[first.operation].choosing)
        return handed if step is not None or is_of_choice else None
    if first.other is not None and torch.Tag.nondeterministic_seeded not in func.tags:
        own, named = tree_map(lambda leaf: first.other if leaf is operand else leaf, (args, kwargs))
        try:
            other = func(*own, **named)
        except Exception:  # the program itself has never had the other values: the operation may refuse them
            other = None
        handed = replace(handed, other=other)
    if func is aten._to_copy.default and decided.dtype is not torch.bool:
        handed = replace(handed, origin=first.origin, rows=first.rows)
    return handed


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
    """Return the first tensor of a result of integers or booleans, or the first of any dtype if the operation rounds.

    None if there is none.
    """
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    decider = _decider_of(func)
    takes_floats = decider is not None and decider.returns_floats
    return next((each for each in outputs if takes_floats or not (each.is_floating_point() or each.is_complex())), None)


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
    values = args[0]
    dims, keepdim = _dims_of_extreme(func, args, kwargs)
    extreme = (torch.amax if func in (aten.max.default, aten.amax.default) else torch.amin)(values, dims, keepdim=True)
    return torch.amin(margins.where(values == extreme, torch.inf), dims, keepdim=keepdim)


def _dims_of_extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the dimensions of a maximum or minimum, none if it is of all values, and whether it keeps them."""
    if func not in (aten.amax.default, aten.amin.default):
        return (), False
    named = dict(zip(("self", "dim", "keepdim"), args, strict=False)) | kwargs
    return tuple(named.get("dim", ())), bool(named.get("keepdim", False))


def _extreme_among(
    others: torch.Tensor, margins: torch.Tensor, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _ExtremeOrigin:
    """Return what a maximum or minimum is taken among, given the other values of its operand and their margins."""
    dims, _ = _dims_of_extreme(func, args, kwargs)
    sign = 1.0 if func in (aten.max.default, aten.amax.default) else -1.0
    places = sorted(dim % args[0].dim() for dim in dims) if args[0].dim() else []
    kept = [dim for dim in range(args[0].dim()) if places and dim not in places]

    def as_rows(tensor: torch.Tensor) -> torch.Tensor:
        """Return a matrix in float64 whose rows are the elements of one extreme."""
        rows = tensor.double().permute(*kept, *(dim for dim in range(tensor.dim()) if dim not in kept))
        return rows.reshape(rows.shape[: len(kept)].numel(), -1)

    return _ExtremeOrigin(sign * as_rows(args[0]), sign * as_rows(others), as_rows(margins), sign)


_KEEPS_DISTANCE = frozenset(
    {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.relu.default, aten.neg.default}
    | {aten.abs.default, aten._to_copy.default}
)
"""Operations of one tensor that take no two whole numbers further apart."""
_SHIFTS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar})


def _step_behind(
    step: float | None, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], decided: torch.Tensor
) -> float | None:
    """Return how far an element of the result moves if that of the operand moves by `step`; None if it is not known."""
    if step is None or decided.dtype is torch.bool:
        return None
    is_shift = func in _SHIFTS and not kwargs and sum(isinstance(each, torch.Tensor) for each in args) == 1
    return step if is_shift or func in _KEEPS_DISTANCE or func in _EXTREMES else None


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
    """Tell whether a tensor is of floats, of more than a single byte, that are all whole numbers."""
    is_plain = values.is_floating_point() and values.itemsize > 1 and values.layout is torch.strided
    return is_plain and bool((values == values.round()).all())
