"""Is the backward the derivative of the forward? Both sides of a check run the same backward: only the function tells.

Along a random direction the function is differenced in float64 with ever smaller steps. Where two steps agree best is
the derivative, and how well they agree is how well it is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchdelta._torch import lift, runtime
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import leaves_of
from torchdelta.engine.baseline import Baseline
from torchdelta.execute.sides import Side
from torchdelta.execute.stages import cotangent_for

STEPS = tuple(10.0**-power for power in range(2, 8))
MARGIN = 8.0
"""So many times of what two steps differ by is allowed."""
FLOOR = 1e-6
"""And so much of what the gradient amounts to along a direction of its own size."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One input: what its gradient says of a direction, and what the function does along it."""

    path: str
    gradient: float
    is_none: bool
    derivative: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        """Whether they differ by more than can be told."""
        return not abs(self.gradient - self.derivative) <= self.allowed

    def __str__(self) -> str:
        said = "None" if self.is_none else f"{self.gradient:.6g}"
        return (
            f"along a random direction of {self.path} the function changes by {self.derivative:.6g} "
            f"(known to {self.allowed:.2g}), and its gradient says {said}"
        )


def slopes(baseline: Baseline) -> list[Slope]:
    """Return one for each input that requires grad, in float64; what the operator raises there is raised."""
    side = Side.copied_from(baseline.program, convert=lift.widened)
    inputs = {path: leaf for path, leaf in _inputs(side).items() if leaf.requires_grad}
    evaluate = _scalar_of(side, baseline)
    for leaf in inputs.values():
        leaf.grad = None
    value = evaluate()
    if not value.requires_grad:
        return []
    value.backward()  # type: ignore[no-untyped-call]
    gradients = {path: leaf.grad for path, leaf in inputs.items()}
    return [_slope(path, leaf, gradients[path], evaluate) for path, leaf in inputs.items()]


def _scalar_of(side: Side, baseline: Baseline) -> Callable[[], torch.Tensor]:
    """Return what adds up the outputs, each against a random cotangent."""
    seed = baseline.plan.seed

    def evaluate() -> torch.Tensor:
        saved = [leaf.detach().clone() for leaf in _constants(side)]
        runtime.seed_everything(seed)
        with baseline.eager_scope():
            outputs = side.call(*side.args, **side.kwargs)
        total = torch.zeros((), dtype=torch.float64)
        for path, leaf in leaves_of(outputs, "outputs").items():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_inexact(leaf.dtype):
                product = cotangent_for(leaf, path, seed).conj() * leaf
                total = total + (product.real if product.is_complex() else product).sum()
        with torch.no_grad():  # a call that writes to its inputs must not find its own traces
            for leaf, old in zip(_constants(side), saved, strict=True):
                leaf.copy_(old)
        return total

    return evaluate


def _constants(side: Side) -> list[torch.Tensor]:
    return [leaf for leaf in _inputs(side).values() if not leaf.requires_grad]


def _inputs(side: Side) -> dict[str, torch.Tensor]:
    found = {**leaves_of(side.args, "args"), **leaves_of(side.kwargs, "kwargs")}
    return {path: leaf for path, leaf in found.items() if isinstance(leaf, torch.Tensor)}


def _slope(path: str, leaf: torch.Tensor, gradient: torch.Tensor | None, evaluate: Callable[[], torch.Tensor]) -> Slope:
    direction = _direction(leaf, path)
    said = 0.0 if gradient is None else _inner(gradient, direction)
    size = (
        0.0
        if gradient is None
        else float(torch.linalg.vector_norm(gradient)) * float(torch.linalg.vector_norm(direction))
    )
    start = leaf.detach().clone()
    differences = []
    with torch.no_grad():
        for step in STEPS:
            ends = []
            for sign in (1.0, -1.0):
                leaf.copy_(start + sign * step * direction)
                with torch.enable_grad():
                    ends.append(float(evaluate().detach()))
            differences.append((ends[0] - ends[1]) / (2.0 * step))
        leaf.copy_(start)
    known = [(abs(one - other), other) for one, other in itertools.pairwise(differences)]
    spread, derivative = min(known)
    return Slope(
        path=path,
        gradient=said,
        is_none=gradient is None,
        derivative=derivative,
        allowed=MARGIN * spread + FLOOR * max(size, abs(derivative)),
    )


def _direction(leaf: torch.Tensor, path: str) -> torch.Tensor:
    drawn = cotangent_for(leaf.detach(), path, seed=1)
    finite = leaf.detach()[torch.isfinite(leaf.detach())]
    size = float(finite.abs().square().mean().sqrt()) if finite.numel() else 1.0
    return drawn * (size or 1.0)


def _inner(gradient: torch.Tensor, direction: torch.Tensor) -> float:
    product = gradient.conj() * direction
    return float((product.real if product.is_complex() else product).sum())
