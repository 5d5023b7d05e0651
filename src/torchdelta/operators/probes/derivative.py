"""Is the backward the derivative of the forward? Both sides of a check run the same backward: only the function tells.

Along a random direction the function is differenced in float64 with ever smaller steps. Where a step agrees best with
both of its neighbours is the derivative, and how well they agree is how well it is known. Where it is another to the
left than to the right, or no number, there is none; what rounds inside is a staircase, of which small steps tell
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchdelta._torch.modes import lift
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_map_only
from torchdelta.check.baseline import Baseline
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import leaves_of
from torchdelta.program.sides import Side
from torchdelta.program.stages import cotangent_for

STEPS = tuple(10.0**-power for power in range(1, 8))
MARGIN = 8.0
"""So many times of what neighbouring steps differ by is allowed."""
FLOOR = 1e-6
"""And so much of what the gradient amounts to along a direction of its own size."""
KINK = 0.1
"""Left and right that differ by more than this share of what all changes are of two minds."""

ROUNDING = 1e-12
"""What of the function itself is rounding, with room to spare."""
NOTHING = 1e-10
"""And so much of the function itself: a gradient that cancels out is rounding."""
TINY = 1e-20
"""And so much in any case: who counts in less leaves the numbers of most dtypes."""
WILD = 1e12
"""Numbers that grow by more than this do not keep a derivative in float64."""
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
    here = function.at({})
    if not here.requires_grad:
        return []
    with function.scope():
        here.sum().backward()  # type: ignore[no-untyped-call]
    return [function.slope(path, leaf, here.detach()) for path, leaf in function.inputs.items()]


class _Function:
    """The outputs of an operator, each element times that of a random cotangent; their sum is differentiated."""

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
        products: list[torch.Tensor] = []
        for path, leaf in leaves_of(outputs, "outputs").items():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_inexact(leaf.dtype):
                product = cotangent_for(leaf, path, self.seed).conj() * leaf
                products.append((product.real if product.is_complex() else product).reshape(-1))
        return torch.cat(products) if products else torch.zeros(0, dtype=torch.float64)

    def slope(self, path: str, leaf: torch.Tensor, here: torch.Tensor) -> Slope:
        """Hold the gradient of one input against differences along a direction."""
        start = self.starts[path]
        direction = _direction(start, path)

        def moved_by(step: float) -> torch.Tensor:
            there = (start + step * direction).requires_grad_()
            return self.at({id(leaf): there}).detach()

        differences = [_Difference.of(here, moved_by(step), moved_by(-step), step) for step in STEPS]
        known = _known(differences)
        gradient = leaf.grad
        said = 0.0 if gradient is None else _inner(gradient, direction)
        size = 0.0 if gradient is None else float(gradient.norm()) * float(direction.norm())
        scale = max(difference.scale for difference in differences)
        allowed = known.allowed + FLOOR * max(size, abs(known.derivative)) + NOTHING * scale + TINY
        # what is so much larger than it started from has lost its last digit on the way, and its backward too
        is_wild = not scale <= WILD * max(1.0, float(direction.abs().max()))
        return Slope(
            path=path,
            gradient=said,
            is_none=gradient is None,
            derivative=known.derivative,
            allowed=allowed,
            is_known=known.is_telling and not is_wild,
        )


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """What a function changes by along a direction, measured with one step."""

    step: float
    slope: float
    total: float
    """The slopes of its elements, without their signs."""
    bend: float
    """What the slopes of its elements to the left and to the right differ by."""
    scale: float
    """How large the function is there."""

    @classmethod
    def of(cls, here: torch.Tensor, ahead: torch.Tensor, behind: torch.Tensor, step: float) -> _Difference:
        slopes = (ahead - behind) / (2.0 * step)
        return cls(
            step=step,
            slope=float(slopes.sum()),
            total=float(slopes.abs().sum()),
            bend=float((ahead - 2.0 * here + behind).abs().sum()) / step,
            scale=max(float(each.abs().sum()) for each in (here, ahead, behind)),
        )


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What differences tell of a derivative."""

    derivative: float
    allowed: float
    """How well it is known."""
    is_telling: bool


def _known(differences: Sequence[_Difference]) -> _Known:
    """Return the derivative by the step that agrees best with its neighbours."""
    spread, place = min(
        (max(abs(differences[place].slope - differences[place + side].slope) for side in (-1, 1)), place)
        for place in range(1, len(differences) - 1)
    )
    best, smaller = differences[place], differences[place:]
    # what only bends does so less with smaller steps, and what has a kink does not: any slope in between may be right.
    # Of a staircase, small steps tell nothing
    alike = [each for each in smaller if abs(each.slope - best.slope) <= KINK * abs(best.slope)]
    least = min(alike, key=lambda each: each.bend, default=best)
    allowed = MARGIN * spread + least.bend
    has_kinks = least.bend > KINK * least.total + MARGIN * spread
    is_staircase = best.slope == 0.0 and spread == 0.0 and any(each.slope for each in differences)
    # beside a kink, on a staircase and where all is steep, smaller steps tell what no rounding explains
    are_torn = any(abs(each.slope - best.slope) > allowed + ROUNDING * each.scale / each.step for each in smaller)
    # a bound that admits zero tells nothing, unless it is small beside the function itself
    is_vague = allowed > max(0.5 * abs(best.slope), VAGUE * best.scale)
    is_finite = math.isfinite(best.slope + spread + least.bend)
    return _Known(
        derivative=best.slope,
        allowed=allowed,
        is_telling=is_finite and not (has_kinks or is_staircase or are_torn or is_vague),
    )


def _direction(start: torch.Tensor, path: str) -> torch.Tensor:
    drawn = cotangent_for(start, path, seed=1)
    finite = start[torch.isfinite(start)]
    size = float(finite.abs().square().mean().sqrt()) if finite.numel() else 1.0
    return drawn * (size or 1.0)


def _inner(gradient: torch.Tensor, direction: torch.Tensor) -> float:
    product = gradient.conj() * direction
    return float((product.real if product.is_complex() else product).sum())
