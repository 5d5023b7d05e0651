"""Choices by a hair: among which values each was made, by what margin, and what the other way would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdelta._torch.choices import choice_dim, is_choice, values_at
from torchdelta._torch.operations import OperationMode


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One operation that chose among floats."""

    operation: str
    rows: torch.Tensor
    """The values in float64, one row for each thing that was chosen among."""
    indices: torch.Tensor
    """What was chosen, as the operation returned it."""
    dim: int | None
    """Along which dimension of the indices a row of them lies; None where each is one row."""

    @classmethod
    def of(cls, operation: str, values: torch.Tensor, indices: torch.Tensor, dim: int | None) -> Choice:
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


class Watch(OperationMode):
    """While it is active, every choice is kept with what it was made among."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices: list[Choice] = []

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, and keep its choice."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if is_choice(func, args):
            indices = made[1] if isinstance(made, tuple) else made
            name = func._schema.name.partition("::")[2]
            self.choices.append(Choice.of(name, args[0], indices, choice_dim(func, args, kwargs)))
        return made


class Force(OperationMode):
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
