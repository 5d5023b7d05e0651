"""What the backward of an operator does with what it is given: it may not write to it, nor mind how it lies in memory.

The engine hands the same gradient to others too, and hands it on as it comes: as `expand`, `t` or a slice made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchdelta._torch.process import runtime
from torchdelta._torch.process.runtime import DrawWatch
from torchdelta.check.baseline import Baseline
from torchdelta.compare.distance import first_difference, with_other_last_bits
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.policy import Bitwise
from torchdelta.program.copies import copy_together
from torchdelta.program.examples import STRIDED, Layout, contiguous
from torchdelta.program.sides import Side
from torchdelta.program.stages import cotangent_for
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

_MIND_STRIDES = "gradients come in any layout: begin the backward with grad = grad.contiguous(), or mind its strides"


def backward(baseline: Baseline) -> Probe:
    """Ask whether the backward leaves alone what it is given, and gives the same however that lies in memory."""
    for plainly, layouts in _ASKED:
        try:
            plain = _Backward.run(baseline, plainly)
            moved = [_Backward.run(baseline, partial(_moved, plainly, sign)).gradients for sign in (1, -1)]
        except Exception as error:
            said = f"its backward does not run once more ({_line(error)})"
            return Probe(name="backward", verdict=Verdict.INCONCLUSIVE, reason=said)
        if plain.written:
            return _writes(plain.written)
        if plain.has_drawn:
            said = "its backward draws random numbers in the order of memory: whether that matters cannot be told"
            return Probe(name="backward", verdict=Verdict.INCONCLUSIVE, reason=said)
        for layout, lay_out in layouts.items():
            given = f"for a gradient of the same values that is not contiguous ({layout})"
            try:
                other = _Backward.run(baseline, lay_out)
            except Exception as error:
                said = f"{given} its backward raises {_line(error)}"
                return Probe(name="backward", verdict=Verdict.CRASHED, reason=said, remedy=_MIND_STRIDES)
            if other.written:
                return _writes(other.written)
            if different := first_difference(plain.gradients, other.gradients, moved, max):
                said = f"{given} its backward gives another {different}"
                return Probe(name="backward", verdict=Verdict.DIVERGED, reason=said, remedy=_MIND_STRIDES)
    said = "its backward leaves what it is given as it was, and gives the same for a gradient that is not contiguous"
    return Probe(name="backward", verdict=Verdict.EQUIVALENT, reason=said)


def _expanded(axes: slice, gradient: torch.Tensor, _: int) -> torch.Tensor:
    """Return what is the same along axes, as `sum` over them hands it back: the same place in memory."""
    chosen = range(gradient.dim())[axes]
    first = gradient[tuple(slice(0, 1) if axis in chosen else slice(None) for axis in range(gradient.dim()))]
    return first.clone().expand(gradient.shape)


def _repeated(axes: slice, gradient: torch.Tensor, place: int) -> torch.Tensor:
    return _expanded(axes, gradient, place).contiguous()


def _moved(plainly: Layout, sign: int, gradient: torch.Tensor, place: int) -> torch.Tensor:
    return with_other_last_bits(plainly(gradient, place), sign)


_SUMMED = {
    "a single number expanded": slice(None),
    "expanded along its first axis": slice(1),
    "expanded along its last axis": slice(-1, None),
}
_ASKED: Sequence[tuple[Layout, Mapping[str, Layout]]] = (
    (contiguous, STRIDED),
    *((partial(_repeated, axes), {name: partial(_expanded, axes)}) for name, axes in _SUMMED.items()),
)
"""How a gradient lies plainly in memory, and how otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """One backward: the gradients that it gave, and what it wrote to of what it was given."""

    gradients: Leaves
    written: list[str]
    has_drawn: bool
    """Whether it drew random numbers."""

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
            cotangents = {
                path: lay_out(cotangent_for(leaf, path, seed), place)
                for place, (path, leaf) in enumerate(roots.items())
            }
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
            with DrawWatch() as draws:
                torch.autograd.backward(list(roots.values()), list(cotangents.values()))
        seen, _ = Judge(policy=Bitwise()).compare(before, given)
        return cls(
            gradients={f"gradient of {path}": leaf.grad for path, leaf in asked.items()},
            written=[each.path for each in seen if each.verdict is not Verdict.EQUIVALENT],
            has_drawn=draws.has_drawn,
        )


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
