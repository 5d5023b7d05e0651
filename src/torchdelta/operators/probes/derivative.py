"""A probe: is the backward the derivative of the forward?

A check cannot tell, because both of its sides run the same backward. So the function itself is differenced in float64,
along a random direction, with smaller and smaller steps. The step that agrees best with both of its neighbours gives
the derivative, and their agreement says how well it is known. There is no derivative where left and right differ or
where it is not a number. A function that rounds inside is a staircase, and small steps say nothing about it.

Start with `derivative`, then `_estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchdelta._torch.modes import lift
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_leaves, tree_map_only
from torchdelta.check.baseline import Baseline
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import leaves_of
from torchdelta.operators.inputs import describe_error
from torchdelta.operators.probes.base import OpSubject, is_tensor
from torchdelta.program.sides import Side
from torchdelta.program.stages import cotangent_for
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

STEPS = tuple(10.0**-power for power in range(1, 8))
MARGIN = 8.0
"""A gradient may differ from the derivative by so many times the difference between neighbouring steps."""
FLOOR = 1e-6
"""It may also differ by this share of the gradient's own norm."""
NOTHING = 1e-10
"""It may also differ by this share of the function's values, because a gradient that cancels out is rounding."""
TINY = 1e-20
"""It may differ by this in any case, because numbers near it underflow in most dtypes."""
KINK = 0.1
"""There is a kink if the slopes to the left and right differ by more than this share of all slopes."""
ROUNDING = 1e-12
"""The share of the function's values that may be rounding, with room to spare."""
WILD = 1e12
"""A function that is larger than its input by more than this has no accurate derivative in float64."""
VAGUE = 1e-3
"""A bound on the derivative is vague if it is a larger share of the function's values than this."""
NO_SLOPE = "along these it has no derivative that differences tell (a kink, a staircase, or not a number)"


def derivative(subject: OpSubject) -> Probe:
    """Compare the backward with differences of the function: at the user's inputs, at fresh values, at other sizes.

    DIVERGED if a gradient is wrong at any of these; the first place with a wrong one is reported. INCONCLUSIVE if the
    operator does not run in float64 with the user's inputs, if no output requires grad in float64 at any of these, or
    if the derivative along some input is known at none of these. Otherwise EQUIVALENT. Other inputs that the operator
    does not take are skipped; none are tried if a tensor input is of integers or booleans.
    """
    own = subject.inputs.own
    unknown: set[str] | None = None
    for where, baseline in (("", own), *_other_inputs(subject)):
        try:
            comparisons = slopes(baseline)
        except Exception as error:
            if baseline is not own:
                continue  # an operator need not take every value
            return Probe(
                name="derivative",
                verdict=Verdict.INCONCLUSIVE,
                reason=f"it does not run in float64 ({describe_error(error)}), so its derivative is unknown",
            )
        if wrong := [f"{slope}{where}" for slope in comparisons if slope.is_wrong]:
            return Probe(
                name="derivative",
                verdict=Verdict.DIVERGED,
                reason="; ".join(wrong),
                remedy="mend the backward given to register_autograd; if it is another function on purpose (a "
                "straight-through estimator), leave this probe out",
            )
        if not comparisons:
            continue
        unknown_here = {slope.path for slope in comparisons if not slope.is_known}
        unknown = unknown_here if unknown is None else unknown & unknown_here
    if unknown is None:
        reason = "in float64 no output requires grad, so that there is no derivative to compare with"
        return Probe(name="derivative", verdict=Verdict.INCONCLUSIVE, reason=reason)
    if unknown:
        reason = f"{NO_SLOPE}: {', '.join(sorted(unknown))}"
        return Probe(name="derivative", verdict=Verdict.INCONCLUSIVE, reason=reason)
    reason = "in float64 the backward is the derivative of the forward"
    return Probe(name="derivative", verdict=Verdict.EQUIVALENT, reason=reason)


def _other_inputs(subject: OpSubject) -> list[tuple[str, Baseline]]:
    """Return fresh values and other sizes as (words for a message, baseline); empty if a tensor input is not of floats.

    Fresh integers may select an element twice, and the function may then have no derivative.
    """
    inputs = subject.inputs
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    if any(is_tensor(leaf) and not is_inexact(leaf.dtype) for leaf in leaves):
        return []
    fresh = [(" with fresh values", baseline) for baseline in inputs.fresh]
    return fresh + [(" with other sizes", baseline) for baseline in inputs.resized]


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One input: the gradient along a random direction, and the derivative of the function along it."""

    path: str
    gradient: float
    is_none: bool
    derivative: float
    allowed: float
    is_known: bool
    """Whether differences determine a derivative there."""

    @property
    def is_wrong(self) -> bool:
        """Whether gradient and derivative differ by more than is allowed, NaN included; False if not `is_known`."""
        return self.is_known and not abs(self.gradient - self.derivative) <= self.allowed

    def __str__(self) -> str:
        """Return a sentence on the derivative, how well it is known, and the gradient, for the reason of a probe."""
        gradient = "None" if self.is_none else f"{self.gradient:.6g}"
        return (
            f"along a random direction of {self.path} the function changes by {self.derivative:.6g} "
            f"(known to {self.allowed:.2g}), and its gradient says {gradient}"
        )


def slopes(baseline: Baseline) -> list[Slope]:
    """Run the operator and its backward in float64; return the slope of each input tensor that requires grad.

    A slope is the gradient and the derivative by differences, along one random direction. Return an empty list if no
    output requires grad in float64. Raise what the operator or its backward raises there.
    """
    function = _Function(baseline)
    here = function.at({})
    if not here.requires_grad:
        return []
    with function.scope():
        here.sum().backward()  # type: ignore[no-untyped-call]
    return [function.slope(path, leaf, here.detach()) for path, leaf in function.inputs.items()]


class _Function:
    """The function that is differentiated: the sum of the outputs that require grad, times random cotangents."""

    def __init__(self, baseline: Baseline) -> None:
        """Copy the program in float64, and find the inputs that require grad, each tensor at its first path only.

        `starts` has copies of their values, because a backward may write to them.
        """
        self.seed = baseline.plan.seed
        # casts inside of the function do not round in this scope
        self.scope = baseline.lifted_scope(baseline.drawn_in)
        self.side = Side.copied_from(baseline.program, convert=lift.widened)
        leaves = {**leaves_of(self.side.args, "args"), **leaves_of(self.side.kwargs, "kwargs")}
        earlier: set[int] = set()
        self.inputs: dict[str, torch.Tensor] = {}
        self.starts: dict[str, torch.Tensor] = {}
        for path, leaf in leaves.items():
            if is_tensor(leaf) and leaf.requires_grad and id(leaf) not in earlier:
                self.inputs[path] = leaf
                self.starts[path] = leaf.detach().clone()  # a backward may write to it
                leaf.grad = None
            earlier.add(id(leaf))

    def at(self, moved: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Call the program; return the function's summands: each element of an output times its random cotangent.

        Only outputs that require grad count; of complex products, the real part. The summands are one flat tensor,
        empty if no output requires grad. `moved` has values to use in place of inputs that require grad, by the id of
        the input. Raise what the program raises.
        """

        def replace_input(tensor: torch.Tensor) -> torch.Tensor:
            return moved.get(id(tensor), tensor) if tensor.requires_grad else tensor.clone()

        args, kwargs = tree_map_only(torch.Tensor, replace_input, (self.side.args, self.side.kwargs))
        runtime.seed_everything(self.seed)
        with self.scope():
            outputs = self.side.call(*args, **kwargs)
        products: list[torch.Tensor] = []
        for path, leaf in leaves_of(outputs, "outputs").items():
            if is_tensor(leaf) and leaf.requires_grad and is_inexact(leaf.dtype):
                product = cotangent_for(leaf, path, self.seed).conj() * leaf
                products.append((product.real if product.is_complex() else product).reshape(-1))
        return torch.cat(products) if products else torch.zeros(0, dtype=torch.float64)

    def slope(self, path: str, leaf: torch.Tensor, here: torch.Tensor) -> Slope:
        """Return the gradient of one input, and the derivative by differences, both along one random direction.

        `leaf` is the input at `path`, with its gradient in `leaf.grad`; None counts as zero. `here` has the summands at
        the start, as `at` returns them. The slope is not known if the differences do not settle on a derivative, or if
        the function's values are too large for float64.
        """
        start = self.starts[path]
        direction = _draw_direction(start, path)

        def moved_by(step: float) -> torch.Tensor:
            there = (start + step * direction).requires_grad_()
            return self.at({id(leaf): there}).detach()

        differences = [_Difference.of(here, moved_by(step), moved_by(-step), step) for step in STEPS]
        estimate = _estimate(differences)
        gradient = leaf.grad
        along = 0.0 if gradient is None else _inner_product(gradient, direction)
        size = 0.0 if gradient is None else float(gradient.norm()) * float(direction.norm())
        scale = max(difference.scale for difference in differences)
        allowed = estimate.allowed + FLOOR * max(size, abs(estimate.derivative)) + NOTHING * scale + TINY
        # values so much larger than the input have lost their last digits, and so has their backward
        is_wild = not scale <= WILD * max(1.0, float(direction.abs().max()))
        return Slope(
            path=path,
            gradient=along,
            is_none=gradient is None,
            derivative=estimate.derivative,
            allowed=allowed,
            is_known=estimate.is_known and not is_wild,
        )


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """How fast a function changes along a direction, measured with one step."""

    step: float
    slope: float
    total: float
    """The sum of the absolute slopes of its elements."""
    bend: float
    """The sum of the absolute differences between left and right slopes of its elements."""
    scale: float
    """The sum of the absolute values of its elements."""

    @classmethod
    def of(cls, here: torch.Tensor, ahead: torch.Tensor, behind: torch.Tensor, step: float) -> _Difference:
        """Return the difference for a step: `slope` is the sum of (ahead − behind) / (2 step); see the other fields.

        `here`, `ahead` and `behind` are the summands at the start, one step ahead of it and one step behind it.
        """
        slopes = (ahead - behind) / (2.0 * step)
        return cls(
            step=step,
            slope=float(slopes.sum()),
            total=float(slopes.abs().sum()),
            bend=float((ahead - 2.0 * here + behind).abs().sum()) / step,
            scale=max(float(each.abs().sum()) for each in (here, ahead, behind)),
        )


@dataclass(frozen=True, kw_only=True)
class _Estimate:
    """A derivative by differences."""

    derivative: float
    allowed: float
    """The largest error that the derivative may have."""
    is_known: bool


def _estimate(differences: Sequence[_Difference]) -> _Estimate:
    """Return the slope of the step that agrees best with its neighbours, its possible error, and whether it is known.

    `differences` are in the order of `STEPS`, the largest step first. The derivative is not known at a kink (left and
    right slopes differ), on a staircase (small steps change nothing, and larger ones do), if smaller steps disagree by
    more than rounding explains, if its error may be too large to decide anything, or if it is not finite.
    """
    spread, place = min(
        (max(abs(differences[place].slope - differences[place + side].slope) for side in (-1, 1)), place)
        for place in range(1, len(differences) - 1)
    )
    best, smaller = differences[place], differences[place:]
    # a bend shrinks with smaller steps, and a kink does not: there any slope in between may be right. Small steps that
    # fall on one tread of a staircase are left out
    alike = [each for each in smaller if abs(each.slope - best.slope) <= KINK * abs(best.slope)]
    least = min(alike, key=lambda each: each.bend, default=best)
    allowed = MARGIN * spread + least.bend
    has_kinks = least.bend > KINK * least.total + MARGIN * spread
    is_staircase = best.slope == 0.0 and spread == 0.0 and any(each.slope for each in differences)
    # beside a kink, on a staircase and where all is steep, smaller steps differ by more than rounding explains
    steps_disagree = any(abs(each.slope - best.slope) > allowed + ROUNDING * each.scale / each.step for each in smaller)
    # a bound that admits zero decides nothing, unless it is small beside the function's values
    is_vague = allowed > max(0.5 * abs(best.slope), VAGUE * best.scale)
    is_finite = math.isfinite(best.slope + spread + least.bend)
    return _Estimate(
        derivative=best.slope,
        allowed=allowed,
        is_known=is_finite and not (has_kinks or is_staircase or steps_disagree or is_vague),
    )


def _draw_direction(start: torch.Tensor, path: str) -> torch.Tensor:
    """Return a random direction of the input's shape, the same in every run.

    Its size is the root mean square of the input's finite elements, or 1 if that is zero or none is finite.
    """
    drawn = cotangent_for(start, path, seed=1)
    finite = start[torch.isfinite(start)]
    size = float(finite.abs().square().mean().sqrt()) if finite.numel() else 1.0
    return drawn * (size or 1.0)


def _inner_product(gradient: torch.Tensor, direction: torch.Tensor) -> float:
    """Return the sum of the gradient times the direction; of complex ones, the real part, the gradient conjugated."""
    product = gradient.conj() * direction
    return float((product.real if product.is_complex() else product).sum())
