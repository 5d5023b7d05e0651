"""What the backward of an operator does with what it is given: it may not write to it, nor mind how it lies in memory.

The engine hands the same gradient to others too, and hands it on as it comes: as `t` or a slice made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchdelta._torch import runtime
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.policy import Bitwise
from torchdelta.engine.baseline import Baseline
from torchdelta.engine.op_layouts import first_difference, with_other_last_bits
from torchdelta.execute.copies import copy_together
from torchdelta.execute.layouts import STRIDED, Layout
from torchdelta.execute.sides import Side
from torchdelta.execute.stages import cotangent_for
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

_MIND_STRIDES = "gradients come in any layout: begin the backward with grad = grad.contiguous(), or mind its strides"


def backward(baseline: Baseline) -> Probe:
    """Ask whether the backward leaves alone what it is given, and gives the same however that lies in memory."""
    for plainly, layouts in ((torch.Tensor.contiguous, STRIDED), (_ones, {"a single number expanded": _expanded})):
        try:
            plain = _Backward.run(baseline, plainly)
            moved = _Backward.run(baseline, partial(_moved, plainly))
        except Exception as error:
            said = f"its backward does not run once more ({_line(error)})"
            return Probe(name="backward", verdict=Verdict.INCONCLUSIVE, reason=said)
        if plain.written:
            return _writes(plain.written)
        for layout, lay_out in layouts.items():
            given = f"for a gradient of the same values that is not contiguous ({layout})"
            try:
                other = _Backward.run(baseline, lay_out)
            except Exception as error:
                said = f"{given} its backward raises {_line(error)}"
                return Probe(name="backward", verdict=Verdict.CRASHED, reason=said, remedy=_MIND_STRIDES)
            if other.written:
                return _writes(other.written)
            if different := first_difference(plain.gradients, other.gradients, moved.gradients):
                said = f"{given} its backward gives another {different}"
                return Probe(name="backward", verdict=Verdict.DIVERGED, reason=said, remedy=_MIND_STRIDES)
    said = "its backward leaves what it is given as it was, and gives the same for a gradient that is not contiguous"
    return Probe(name="backward", verdict=Verdict.EQUIVALENT, reason=said)


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """One backward: the gradients that it gave, and what it wrote to of what it was given."""

    gradients: Leaves
    written: list[str]

    @classmethod
    def run(cls, baseline: Baseline, lay_out: Layout) -> _Backward:
        """Differentiate a copy of the program."""
        side = Side.copied_from(baseline.program)
        seed = baseline.plan.seed
        runtime.seed_everything(seed)
        with baseline.eager_scope():
            leaves = leaves_of(side.call(*side.args, **side.kwargs), "outputs")
            outputs = {path: leaf for path, leaf in leaves.items() if _is_tensor(leaf)}
            roots = {path: leaf for path, leaf in outputs.items() if leaf.requires_grad}
            cotangents = {path: lay_out(cotangent_for(leaf, path, seed)) for path, leaf in roots.items()}
            inputs = {**leaves_of(side.args, "args"), **leaves_of(side.kwargs, "kwargs")}
            inputs = {path: leaf for path, leaf in inputs.items() if _is_tensor(leaf)}
            # an output is detached: it shows what is written to its memory, and has no gradient of its own
            given = {
                **{f"the gradient of {path}": leaf for path, leaf in cotangents.items()},
                **{path: leaf.detach() for path, leaf in outputs.items()},
                **inputs,
            }
            before = dict(copy_together(given, name="what its backward is given"))
            asked = {path: leaf for path, leaf in inputs.items() if leaf.requires_grad}
            for leaf in asked.values():
                leaf.grad = None
            torch.autograd.backward(list(roots.values()), list(cotangents.values()))
        seen, _ = Judge(policy=Bitwise()).compare(before, given)
        return cls(
            gradients={f"gradient of {path}": leaf.grad for path, leaf in asked.items()},
            written=[each.path for each in seen if each.verdict is not Verdict.EQUIVALENT],
        )


def _moved(plainly: Layout, gradient: torch.Tensor) -> torch.Tensor:
    return with_other_last_bits(plainly(gradient))


def _ones(gradient: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(gradient, memory_format=torch.contiguous_format)


def _expanded(gradient: torch.Tensor) -> torch.Tensor:
    """Return ones as `sum` hands them back: all of them the same place in memory."""
    return gradient.new_ones(()).expand(gradient.shape)


def _writes(places: Sequence[str]) -> Probe:
    return Probe(
        name="backward",
        verdict=Verdict.DIVERGED,
        reason=f"its backward writes to {', '.join(places)}, which others may read after it",
        remedy="let the backward return a new tensor, and change none that it is given",
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
