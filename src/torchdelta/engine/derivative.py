"""Is the backward the derivative of the forward? Both sides of a check run the same backward: only the function tells.

Along a random direction the function is differenced in float64 with ever smaller steps. Where a step agrees best with
both of its neighbours is the derivative, and how well they agree is how well it is known. Where it is another to the
left than to the right, or no number, there is none; what rounds inside is a staircase, of which small steps tell
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchdelta._torch import lift, runtime
from torchdelta._torch.trees import tree_map_only
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import leaves_of
from torchdelta.engine.baseline import Baseline
from torchdelta.execute.sides import Side
from torchdelta.execute.stages import cotangent_for

STEPS = tuple(10.0**-power for power in range(1, 8))
MARGIN = 8.0
"""So many times of what neighbouring steps differ by is allowed."""
FLOOR = 1e-6
"""And so much of what the gradient amounts to along a direction of its own size."""
KINK = 0.1
"""Left and right that differ by more than this share of the larger are of two minds."""

VAGUE = 1e-3
"""A bound that is a larger share of the function than this is no small number."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One input: what its gradient says of a direction, and what the function does along it."""

    path: str
    gradient: float
    is_none: bool
    derivative: float
    allowed: float
    is_known: bool
    """Whether the function has a derivative there that differences tell."""

    @property
    def is_wrong(self) -> bool:
        """Whether they differ by more than can be told."""
        return self.is_known and not abs(self.gradient - self.derivative) <= self.allowed

    def __str__(self) -> str:
        said = "None" if self.is_none else f"{self.gradient:.6g}"
        return (
            f"along a random direction of {self.path} the function changes by {self.derivative:.6g} "
            f"(known to {self.allowed:.2g}), and its gradient says {said}"
        )


def slopes(baseline: Baseline) -> list[Slope]:
    """Return one for each input that requires grad, in float64; what the operator raises there is raised."""
    function = _Function(baseline)
    value = function.at({})
    if not value.requires_grad:
        return []
    with function.scope():
        value.backward()  # type: ignore[no-untyped-call]
    return [function.slope(path, leaf, float(value.detach())) for path, leaf in function.inputs.items()]


class _Function:
    """The outputs of an operator, each against a random cotangent, added up."""

    def __init__(self, baseline: Baseline) -> None:
        self.seed = baseline.plan.seed
        # a cast that the function names itself is none here
        self.scope = baseline.lifted_scope(baseline.drawn_in)
        self.side = Side.copied_from(baseline.program, convert=lift.widened)
        found = {**leaves_of(self.side.args, "args"), **leaves_of(self.side.kwargs, "kwargs")}
        met: set[int] = set()
        self.inputs: dict[str, torch.Tensor] = {}
        self.starts: dict[str, torch.Tensor] = {}
        for path, leaf in found.items():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in met:
                self.inputs[path] = leaf
                self.starts[path] = leaf.detach().clone()  # a backward may write to it
                leaf.grad = None
            met.add(id(leaf))

    def at(self, moved: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return it with some inputs in another place; what a call writes to is a copy."""

        def given(tensor: torch.Tensor) -> torch.Tensor:
            return moved.get(id(tensor), tensor) if tensor.requires_grad else tensor.clone()

        args, kwargs = tree_map_only(torch.Tensor, given, (self.side.args, self.side.kwargs))
        runtime.seed_everything(self.seed)
        with self.scope():
            outputs = self.side.call(*args, **kwargs)
        total = torch.zeros((), dtype=torch.float64)
        for path, leaf in leaves_of(outputs, "outputs").items():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_inexact(leaf.dtype):
                product = cotangent_for(leaf, path, self.seed).conj() * leaf
                total = total + (product.real if product.is_complex() else product).sum()
        return total

    def slope(self, path: str, leaf: torch.Tensor, here: float) -> Slope:
        """Hold the gradient of one input against differences along a direction."""
        start = self.starts[path]
        direction = _direction(start, path)

        def moved_by(step: float) -> float:
            there = (start + step * direction).requires_grad_()
            return float(self.at({id(leaf): there}).detach())

        ends = [(moved_by(step), moved_by(-step)) for step in STEPS]
        differences = [(ahead - behind) / (2.0 * step) for step, (ahead, behind) in zip(STEPS, ends, strict=True)]
        spread, place = min(
            (max(abs(differences[place] - differences[place + side]) for side in (-1, 1)), place)
            for place in range(1, len(STEPS) - 1)
        )
        derivative = differences[place]
        # left and right come nearer to each other with smaller steps where it only bends, and not where it has a kink;
        # where few of many elements have one, any number in between is a gradient
        gap, slope = min(
            (abs((ahead - here) - (here - behind)) / step, abs(ahead - behind) / step)
            for step, (ahead, behind), difference in list(zip(STEPS, ends, differences, strict=True))[place:]
            if abs(difference - derivative) <= KINK * abs(derivative)  # of a staircase small steps tell nothing
        )
        is_smooth = gap <= KINK * slope + MARGIN * spread
        is_staircase = derivative == 0.0 and spread == 0.0 and any(differences)
        gradient = leaf.grad
        said = 0.0 if gradient is None else _inner(gradient, direction)
        size = 0.0 if gradient is None else float(gradient.norm()) * float(direction.norm())
        allowed = MARGIN * spread + gap + FLOOR * max(size, abs(derivative))
        # beside a kink smaller steps may be right, although larger ones agree with each other better
        are_torn = abs(derivative - said) > allowed and any(abs(each - said) <= allowed for each in differences[place:])
        # a bound that admits zero tells nothing, unless it is small beside the function itself
        is_vague = allowed > max(0.5 * max(abs(derivative), abs(said)), VAGUE * abs(here))
        return Slope(
            path=path,
            gradient=said,
            is_none=gradient is None,
            derivative=derivative,
            allowed=allowed,
            is_known=is_smooth and not (is_staircase or are_torn or is_vague) and math.isfinite(derivative + spread),
        )


def _direction(start: torch.Tensor, path: str) -> torch.Tensor:
    drawn = cotangent_for(start, path, seed=1)
    finite = start[torch.isfinite(start)]
    size = float(finite.abs().square().mean().sqrt()) if finite.numel() else 1.0
    return drawn * (size or 1.0)


def _inner(gradient: torch.Tensor, direction: torch.Tensor) -> float:
    product = gradient.conj() * direction
    return float((product.real if product.is_complex() else product).sum())
