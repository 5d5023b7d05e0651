"""What a program chose among floats, recorded in one run and replayed in another.

Where two values are within rounding of each other, a correct program may choose either, and everything behind the
choice is another computation: a token goes to another expert. Two runs can only be compared there if both choose alike.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdelta._torch.operations import OperationMode

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


class Record(OperationMode):
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


class Replay(OperationMode):
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
