"""Gradients within noise of zero: their sign is nobody's, and an optimizer that divides by their size steps by it.

Where a gradient is undecided, a noisy run steps either way, and the parameters that such a step made are not judged:
the gradient is, in its own place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta.compare.leaves import Leaves
from torchdelta.compare.spread import block_length
from torchdelta.program.stages import Observation
from torchdelta.records.comparison import Comparison

NEAR = 4.0
"""Within so many times its noise of zero, a gradient may have either sign."""

_STEPPED = re.compile(r"steps\[(?P<step>\d+)\]\.parameters(?P<name>\[.*\])")


@dataclass
class SignFlips:
    """Flips the signs of undecided gradients, as another correct program might have."""

    reference: Observation
    truth: Observation | None
    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def flip(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give each undecided element a random sign, in place."""
        if self.truth is None:
            return
        for name, gradient in gradients.items():
            known = [_gradient(side, step, f"[{name!r}]") for side in (self.truth, self.reference)]
            if known[0] is None or known[1] is None or known[0].shape != gradient.shape:
                continue
            signs = torch.randint(0, 2, gradient.shape, generator=self.generator).to(gradient.device) * 2 - 1
            near = is_near_zero(known[0], (known[1], gradient))
            with torch.no_grad():
                gradient.copy_(torch.where(near, gradient * signs, gradient))


@dataclass(kw_only=True)
class FollowedSigns:
    """Gives the undecided elements of each step the candidate's gradients: whoever steps so is on its trajectory.

    One element that was stepped the other way moves all gradients after it by far more than rounding does.
    """

    candidate: Observation
    truth: Observation
    runs: Sequence[Observation]
    """Correct runs, for the noise of the first step: later ones may have gone other ways."""
    where: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """The undecided elements of each step, as the truth that follows had them."""
    count: int = 0
    """Elements whose step the candidate took the other way."""

    def lead(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Follow the candidate in the truth, in place, and remember where."""
        for name, gradient in gradients.items():
            key = f"[{name!r}]"
            first = [_gradient(side, 0, key) for side in (self.truth, *self.runs)]
            given = _gradient(self.candidate, step, key)
            runs = [run for run in first[1:] if run is not None and run.shape == gradient.shape]
            if first[0] is None or given is None or not runs or given.shape != gradient.shape:
                continue
            noise = _noise(first[0], runs)
            near = (gradient.abs() <= NEAR * noise) & (given.abs() <= 2.0 * NEAR * noise) & (given != gradient)
            self.where[step, name] = near
            self.count += int((near & (given.sign() != gradient.sign())).sum())
        self.follow(step, gradients)

    def follow(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Follow the candidate where the truth did, in place."""
        for name, gradient in gradients.items():
            near, given = self.where.get((step, name)), _gradient(self.candidate, step, f"[{name!r}]")
            if near is not None and given is not None:
                with torch.no_grad():
                    gradient.copy_(torch.where(near, given.to(gradient.dtype), gradient))


def is_near_zero(truth: torch.Tensor, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tell of each element whether the truth is within noise of zero: the noise of its block in these runs."""
    if not truth.numel():
        return torch.zeros_like(truth, dtype=torch.bool)
    near = truth.detach().double().abs() <= NEAR * _noise(truth, runs)
    # a gradient that is zero in every run has been decided
    return near & torch.stack([run != 0 for run in (truth, *runs)]).any(0)


def _noise(truth: torch.Tensor, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return for each element the noise of its block in these runs."""
    length = max(block_length(truth.shape), 1)
    wide = truth.detach().double()
    noise = torch.zeros(wide.numel() // length, 1, dtype=torch.float64, device=truth.device)
    for run in runs:
        error = torch.nan_to_num(run.detach().double() - wide).reshape(-1, length)
        noise = torch.maximum(noise, error.square().mean(-1, keepdim=True).sqrt())
    return noise.expand(-1, length).reshape(truth.shape)


def settle(
    sides: Sequence[Leaves], truth: Observation, runs: Sequence[Observation]
) -> tuple[list[Leaves], dict[str, int]]:
    """Return the sides' leaves of `steps` with the truth wherever an undecided gradient made a parameter.

    With them comes how many elements of each leaf those are.
    """
    counts: dict[str, int] = {}
    settled = [dict(leaves) for leaves in sides]
    undecided: dict[str, torch.Tensor] = {}
    for path, value in truth.stages["steps"].items():
        match = _STEPPED.fullmatch(path)
        if match is None or not isinstance(value, torch.Tensor):
            continue
        name, step = match["name"], int(match["step"])
        found = [_gradient(side, step, name) for side in (truth, *runs)]
        gradients = [gradient for gradient in found if gradient is not None and gradient.shape == value.shape]
        if len(gradients) < 2:
            continue
        near = is_near_zero(gradients[0], gradients[1:])
        # a step in doubt leaves every later value of the parameter in doubt
        undecided[name] = near | undecided[name] if name in undecided else near
        if undecided[name].any():
            counts[path] = int(undecided[name].sum())
            for leaves in settled:
                if path in leaves:
                    leaves[path] = _with_truth(leaves[path], value, undecided[name])
    return settled, counts


def with_count(seen: Comparison, counts: Mapping[str, int]) -> Comparison:
    """Return the comparison with how many of its elements were not held against a step."""
    if seen.path not in counts:
        return seen
    count = counts[seen.path]
    reason = f"{seen.reason}, but for {count} elements whose gradient is within noise of zero"
    return replace(seen, reason=reason, details={**seen.details, "undecided": count})


def _with_truth(leaf: object, truth: torch.Tensor, where: torch.Tensor) -> object:
    if not isinstance(leaf, torch.Tensor) or leaf.shape != truth.shape:
        return leaf
    settled = torch.empty_like(leaf, memory_format=torch.preserve_format)
    with torch.no_grad():
        settled.copy_(torch.where(where, truth.to(leaf.dtype), leaf))
    return settled.requires_grad_(leaf.requires_grad)


def _gradient(side: Observation, step: int, name: str) -> torch.Tensor | None:
    """Return the gradient that a step took; the first takes those of the stage before."""
    found = side.stages.get("steps", {}).get(f"steps[{step}].gradients{name}")
    if found is None and step == 0:
        found = side.stages.get("gradients", {}).get(f"parameters{name}.grad")
    return found if isinstance(found, torch.Tensor) else None
