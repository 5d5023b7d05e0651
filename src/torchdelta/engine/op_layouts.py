"""What an operator makes of inputs that lie otherwise in memory: a kernel that reads a pointer may not mind strides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch.trees import tree_map_only
from torchdelta.compare.distance import distance
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.leaves import Leaves
from torchdelta.compare.policy import Bitwise
from torchdelta.engine import op_fakes
from torchdelta.engine.baseline import Baseline
from torchdelta.engine.operated import called
from torchdelta.execute.programs import Program
from torchdelta.execute.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

_MOVED = 64.0
"""So many times of what other last bits of the inputs change is rounding in another order."""


def layout(given: Baseline, others: Mapping[str, Baseline]) -> Probe | str:
    """Ask whether it gives the same however its inputs lie in memory; or say why that cannot be asked."""
    plain = _called(given.program, given)
    redrawn, _ = Judge(policy=Bitwise()).compare(plain, _called(given.program, given, seed=given.plan.seed + 1))
    if any(each.verdict is not Verdict.EQUIVALENT for each in redrawn):
        return "it draws random numbers, in the order of memory"
    moved = _moved(given)
    for name, other in others.items():
        if different := first_difference(plain, _called(other.program, other), moved):
            return Probe(
                name="layout",
                verdict=Verdict.DIVERGED,
                reason=f"for inputs of the same values that are {name} in memory it gives another {different}",
                remedy="inputs come in any layout: begin with x = x.contiguous(), or mind its strides; where memory is "
                "what it is about (as_strided), leave this probe out",
            )
    said = f"it gives the same for inputs that are {' or '.join(others)} in memory"
    return Probe(name="layout", verdict=Verdict.EQUIVALENT, reason=said)


def fake_layout(others: Mapping[str, Baseline]) -> Probe:
    """Hold what the fake kernel says for these layouts against what the real one returns."""
    answers = [_told_of(op_fakes.fake("fake/layout", other), name) for name, other in others.items()]
    return max(answers, key=lambda probe: probe.verdict.severity)


def first_difference(plain: Leaves, other: Leaves, moved: Leaves) -> str:
    """Return which tensor is another, and by how much; nothing where rounding explains all of it.

    `moved` is what comes of inputs with other last bits: what cancels out but for rounding is as far from itself.
    """
    for path, first in plain.items():
        second, third = other.get(path), moved.get(path)
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            if isinstance(first, torch.Tensor) is not isinstance(second, torch.Tensor):
                return f"{path}: {_kind(first)}, and then {_kind(second)}"
            continue
        noise = distance(first, third) if isinstance(third, torch.Tensor) else 0.0
        # a sum in another order is far nearer, and a permutation of the numbers far away
        least = torch.finfo(first.dtype).eps ** 0.5 if is_inexact(first.dtype) else 0.0
        if (apart := distance(first, second)) > max(least, _MOVED * noise):
            return f"{path}: {_apart(apart)}"
    return ""


def with_other_last_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers but for rounding."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs.to(tensor))


def _moved(given: Baseline) -> Leaves:
    """Return what comes of inputs with other last bits; nothing where there is no such thing."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = with_other_last_bits(tensor.detach()) if is_inexact(tensor.dtype) else tensor.detach()
        return moved.requires_grad_(tensor.requires_grad)

    program = given.program
    try:
        args, kwargs = tree_map_only(torch.Tensor, move, (program.args, dict(program.kwargs)))
        return _called(replace(program, args=args, kwargs=kwargs), given)
    except Exception:  # not every value is to an operator's liking
        return {}


def _called(program: Program, baseline: Baseline, *, seed: int | None = None) -> Leaves:
    return called(Side.copied_from(program), baseline, seed=seed)


def _told_of(probe: Probe, name: str) -> Probe:
    if probe.verdict is Verdict.EQUIVALENT:
        return probe
    return replace(probe, reason=f"for inputs that are {name} in memory {probe.reason}")


def _apart(share: float) -> str:
    return f"{share:.3g} of its largest element apart" if math.isfinite(share) else "of another kind"


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else str(value)
