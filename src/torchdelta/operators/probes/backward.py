"""A probe of an operator's backward: it must not write to the tensors that it gets, nor depend on their memory layout.

Autograd hands the same gradient tensor to several backwards, in the layout that `expand`, `t` or a slice left it in. So
the backward is run on gradients of the same values in several layouts, and its results are compared. Start with
`backward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchdelta._torch.process import runtime
from torchdelta._torch.process.runtime import DrawWatch
from torchdelta.check.baseline import Baseline
from torchdelta.compare.distance import first_difference, with_other_last_bits
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.policy import Bitwise
from torchdelta.operators.inputs import describe_error
from torchdelta.operators.probes.base import OpSubject, is_tensor
from torchdelta.program.copies import copy_together
from torchdelta.program.examples import STRIDED, Layout, contiguous
from torchdelta.program.sides import Side
from torchdelta.program.stages import cotangent_for
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

_USE_STRIDES = "gradients come in any layout: begin the backward with grad = grad.contiguous(), or use its strides"


def backward(subject: OpSubject) -> Probe:
    """Run the backward on gradients in several memory layouts, and judge what it writes to and what it returns.

    The first finding is returned, and EQUIVALENT if there is none. For each of several contiguous gradients:
    INCONCLUSIVE if it raises, DIVERGED if it writes to a tensor that it gets, INCONCLUSIVE if it draws random numbers.
    Then, for each other layout of the same values: CRASHED if it raises, DIVERGED if it writes to a tensor that it gets
    or if its results differ by more than rounding.
    """
    baseline = subject.inputs.own
    for plain_layout, layouts in _LAYOUTS:
        try:
            plain = _Backward.run(baseline, plain_layout)
            moved = [_Backward.run(baseline, partial(_move, plain_layout, sign)).gradients for sign in (1, -1)]
        except Exception as error:
            reason = f"its backward does not run once more ({describe_error(error)})"
            return Probe(name="backward", verdict=Verdict.INCONCLUSIVE, reason=reason)
        if plain.written:
            return _report_writes(plain.written)
        if plain.has_drawn:
            reason = "its backward draws random numbers in the order of memory, so layouts cannot be compared"
            return Probe(name="backward", verdict=Verdict.INCONCLUSIVE, reason=reason)
        for layout, lay_out in layouts.items():
            which = f"for a gradient of the same values that is not contiguous ({layout})"
            try:
                other = _Backward.run(baseline, lay_out)
            except Exception as error:
                reason = f"{which} its backward raises {describe_error(error)}"
                return Probe(name="backward", verdict=Verdict.CRASHED, reason=reason, remedy=_USE_STRIDES)
            if other.written:
                return _report_writes(other.written)
            if different := first_difference(plain.gradients, other.gradients, moved, max):
                reason = f"{which} its backward returns another {different}"
                return Probe(name="backward", verdict=Verdict.DIVERGED, reason=reason, remedy=_USE_STRIDES)
    reason = "its backward writes to no tensor that it gets, and returns the same for a gradient that is not contiguous"
    return Probe(name="backward", verdict=Verdict.EQUIVALENT, reason=reason)


def _expand(axes: slice, gradient: torch.Tensor, _: int) -> torch.Tensor:
    """Return the gradient's first elements along the axes, copied and then expanded to the gradient's shape.

    The backward of `sum` over these axes returns such a gradient. Its values are not those of `gradient`.
    """
    chosen = range(gradient.dim())[axes]
    first = gradient[tuple(slice(0, 1) if axis in chosen else slice(None) for axis in range(gradient.dim()))]
    return first.clone().expand(gradient.shape)


def _repeat(axes: slice, gradient: torch.Tensor, place: int) -> torch.Tensor:
    """Return the values of `_expand` in a tensor that is contiguous."""
    return _expand(axes, gradient, place).contiguous()


def _move(plain_layout: Layout, sign: int, gradient: torch.Tensor, place: int) -> torch.Tensor:
    """Return the gradient in the plain layout, with last bits moved away from zero (`sign` 1) or towards it (-1)."""
    return with_other_last_bits(plain_layout(gradient, place), sign)


_EXPANDED_AXES = {
    "a single number expanded": slice(None),
    "expanded along its first axis": slice(1),
    "expanded along its last axis": slice(-1, None),
}
_LAYOUTS: Sequence[tuple[Layout, Mapping[str, Layout]]] = (
    (contiguous, STRIDED),
    *((partial(_repeat, axes), {name: partial(_expand, axes)}) for name, axes in _EXPANDED_AXES.items()),
)
"""A plain layout of a gradient, and other layouts of the same values by name."""


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """One backward: the gradients that it returned, and the tensors it got and wrote to."""

    gradients: Leaves
    written: list[str]
    has_drawn: bool
    """Whether it drew random numbers."""

    @classmethod
    def run(cls, baseline: Baseline, lay_out: Layout) -> _Backward:
        """Run a copy of the program and its backward; return the gradients, the writes, and whether the backward draws.

        The gradients are those of the inputs that require grad, None for one that got none. The cotangents are random
        numbers, laid out by `lay_out`. Cotangents, outputs and inputs are watched for writes of the backward. Raise
        what the program or its backward raises.
        """
        side = Side.copied_from(baseline.program)
        seed = baseline.plan.seed
        runtime.seed_everything(seed)
        with baseline.eager_scope():
            leaves = leaves_of(side.call(*side.args, **side.kwargs), "outputs")
            outputs = {path: leaf for path, leaf in leaves.items() if is_tensor(leaf)}
            roots = {path: leaf for path, leaf in outputs.items() if leaf.requires_grad}
            cotangents = {
                path: lay_out(cotangent_for(leaf, path, seed), place)
                for place, (path, leaf) in enumerate(roots.items())
            }
            inputs = {**leaves_of(side.args, "args"), **leaves_of(side.kwargs, "kwargs")}
            inputs = {path: leaf for path, leaf in inputs.items() if is_tensor(leaf)}
            # a detached output shows a write to its memory, and has no gradient of its own
            arguments = {
                **{f"the gradient of {path}": leaf for path, leaf in cotangents.items()},
                **{path: leaf.detach() for path, leaf in outputs.items()},
                **inputs,
            }
            before = dict(copy_together(arguments, name="the arguments of its backward"))
            differentiated = {path: leaf for path, leaf in inputs.items() if leaf.requires_grad}
            for leaf in differentiated.values():
                leaf.grad = None
            with DrawWatch() as draws:
                torch.autograd.backward(list(roots.values()), list(cotangents.values()))
        comparisons, _ = Judge(policy=Bitwise()).compare(before, arguments)
        return cls(
            gradients={f"gradient of {path}": leaf.grad for path, leaf in differentiated.items()},
            written=[each.path for each in comparisons if each.verdict is not Verdict.EQUIVALENT],
            has_drawn=draws.has_drawn,
        )


def _report_writes(places: Sequence[str]) -> Probe:
    """Return a DIVERGED probe for a backward that writes to tensors; `places` are their paths, for the message."""
    return Probe(
        name="backward",
        verdict=Verdict.DIVERGED,
        reason=f"its backward writes to {', '.join(places)}, which other nodes may read after it",
        remedy="let the backward return a new tensor, and change none of its arguments",
    )
