"""What an operator makes of inputs that lie otherwise in memory: a kernel that reads a pointer may not mind strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from torchdelta._torch.process.runtime import DrawWatch
from torchdelta._torch.pytree import tree_map_only
from torchdelta.check.baseline import Baseline
from torchdelta.compare.distance import first_difference, with_other_last_bits
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves
from torchdelta.compare.policy import Bitwise
from torchdelta.operators.inputs import called
from torchdelta.operators.probes import fake
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

REMEDY = (
    "inputs come in any layout: begin with x = x.contiguous(), or mind its strides; where memory is what it is about "
    "(as_strided, random numbers in its order), leave this probe out"
)


def layout(given: Baseline, others: Mapping[str, Baseline]) -> Probe | str:
    """Ask whether it gives the same however its inputs lie in memory; or say why that cannot be asked."""
    try:
        with DrawWatch() as draws:
            plain = _called(given.program, given)
        if draws.has_drawn:
            return "it draws random numbers, in the order of memory"
        again, _ = Judge(policy=Bitwise()).compare(plain, _called(given.program, given, seed=given.plan.seed + 1))
        results = {name: _called(other.program, other) for name, other in others.items()}
    except Exception as error:
        said = f"called once more it raises {type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        return Probe(name="layout", verdict=Verdict.INCONCLUSIVE, reason=said)
    if any(each.verdict is not Verdict.EQUIVALENT for each in again):
        return "called once more, with another seed, it gives something else"
    moved = [_moved(given, sign) for sign in (1, -1)]
    for name, result in results.items():
        if different := first_difference(plain, result, moved):
            said = f"for inputs of the same values that are {name} in memory it gives another {different}"
            return Probe(name="layout", verdict=Verdict.DIVERGED, reason=said, remedy=REMEDY)
    said = f"it gives the same for inputs that are {' or '.join(others)} in memory"
    return Probe(name="layout", verdict=Verdict.EQUIVALENT, reason=said)


def fake_layout(given: Baseline, others: Mapping[str, Baseline]) -> Probe:
    """Hold what the fake kernel says for these layouts against what the real one returns."""
    plain = fake.fake("fake/layout", given)
    if plain.verdict is not Verdict.EQUIVALENT:
        return plain  # no layout has to do with it
    answers = [_told_of(fake.fake("fake/layout", other), name) for name, other in others.items()]
    return max(answers, key=lambda probe: probe.verdict.severity)


def _moved(given: Baseline, sign: int) -> Leaves:
    """Return what comes of inputs with other last bits; nothing where the operator does not take them."""
    program = given.program
    try:
        args, kwargs = tree_map_only(torch.Tensor, partial(_move, sign), (program.args, dict(program.kwargs)))
        return _called(replace(program, args=args, kwargs=kwargs), given)
    except Exception:  # not every value is to an operator's liking
        return {}


def _move(sign: int, tensor: torch.Tensor) -> torch.Tensor:
    return with_other_last_bits(tensor.detach(), sign).requires_grad_(tensor.requires_grad)


def _called(program: Program, baseline: Baseline, *, seed: int | None = None) -> Leaves:
    return called(Side.copied_from(program), baseline, seed=seed)


def _told_of(probe: Probe, name: str) -> Probe:
    if probe.verdict is Verdict.EQUIVALENT:
        return probe
    return replace(probe, reason=f"for inputs that are {name} in memory {probe.reason}")
