"""What an operator is asked when it runs eagerly: its schema, its steadiness, its autograd."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchdelta._torch.operators import schemas
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_leaves, tree_map_only
from torchdelta.check.baseline import Baseline
from torchdelta.compare.distance import distance
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.policy import Bitwise
from torchdelta.operators.inputs import called
from torchdelta.operators.probes.derivative import slopes
from torchdelta.program import examples
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

CALLS = 2
"""How often an operator is watched with the same inputs: what it does undeclared it may do only sometimes."""
DRAWS = 8
"""With so many draws of fresh values: it may depend on them."""
ROUNDINGS = 4
"""So many units in the last place of the largest element may differ where a sum is taken in another order."""
NO_SLOPE = "along these it has no derivative that differences tell (a kink, a staircase, or no number)"


def schema(op: Any, baseline: Baseline, *others: Baseline) -> Probe:
    """Watch what an operator writes to and what it returns, several times, with fresh values and with other inputs."""
    watching = schemas.DeclaredEffects(op)
    drawn = [
        program
        for draw in range(DRAWS)
        for program in itertools.islice(examples.redraw(baseline.program, seed=baseline.plan.seed + draw + 1), 1)
    ]
    for program in (baseline.program, *drawn, *(each.program for each in others)):
        for call in range(CALLS):
            inputs = copy_together((program.args, dict(program.kwargs)), name=program.name)
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
            runtime.seed_everything(baseline.plan.seed + call)
            try:
                with baseline.eager_scope(), watching:
                    watching.call(args, kwargs)
            except Exception:
                if program is baseline.program:
                    raise
                break  # not every value is to an operator's liking
    if not watching.breaches:
        said = f"{watching.calls} calls did what it declares"
        return Probe(name="schema", verdict=Verdict.EQUIVALENT, reason=said)
    return Probe(
        name="schema",
        verdict=Verdict.DIVERGED,
        reason="; ".join(watching.breaches),
        remedy="declare what it changes (mutates_args=… or Tensor(a!)), and return a copy of what it would alias",
    )


def repeat(baseline: Baseline) -> Probe:
    """Call it twice, with the same inputs and the same seed: what it returns, and what it leaves in its inputs."""
    side = Side.copied_from(baseline.program)
    first, second = called(side, baseline), called(side, baseline)
    found, _ = Judge(policy=Bitwise()).compare(first, second)
    worst = max(found, key=lambda seen: seen.rank, default=None)
    if worst is None or worst.verdict is Verdict.EQUIVALENT:
        return Probe(name="repeat", verdict=Verdict.EQUIVALENT, reason="called again it gives the same")
    values = f": {worst.worst.reference} and then {worst.worst.candidate}" if worst.worst else ""
    left = "" if worst.path.startswith("outputs") else "what it leaves in "
    said = f"called again with the same inputs and the same seed, {left}{worst.path} is another{values}"
    if _is_rounding(first[worst.path], second.get(worst.path)):
        return Probe(name="repeat", verdict=Verdict.INCONCLUSIVE, reason=f"{said}, which may be rounding")
    return Probe(
        name="repeat",
        verdict=Verdict.DIVERGED,
        reason=said,
        remedy="a trace runs it once and keeps what it saw: give what it remembers from call to call as an argument "
        "that it declares to change, or draw from torch's generators",
    )


def _is_rounding(first: Any, second: Any) -> bool:
    """Tell whether two results are as near as those of a sum that is not always taken in the same order."""
    if not (_is_tensor(first) and _is_tensor(second) and is_inexact(first.dtype)):
        return False
    return distance(first, second) <= ROUNDINGS * torch.finfo(first.dtype).eps


def registration(op: Any, baseline: Baseline) -> Probe:
    """Ask whether gradients pass the operator where the dispatcher knows of it."""
    program = baseline.program
    devices = {leaf.device.type for leaf in tree_leaves((program.args, dict(program.kwargs))) if _is_tensor(leaf)}
    if all(schemas.has_autograd_kernel(op, device) for device in devices or {"cpu"}):
        return Probe(name="registration", verdict=Verdict.EQUIVALENT, reason="it has an autograd kernel")
    copies = copy_together((program.args, dict(program.kwargs)), name=program.name)
    # what is no leaf may be written to
    args, kwargs = tree_map_only(torch.Tensor, lambda copied: copied.clone(), copies)
    given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    with baseline.eager_scope(), schemas.without_autograd_fallback():
        returned = tree_leaves(op(*args, **kwargs))
    if not any(_is_tensor(leaf) and is_inexact(leaf.dtype) for leaf in returned):
        return Probe(name="registration", verdict=Verdict.EQUIVALENT, reason="what it returns has no gradient")
    if any(_is_tensor(leaf) and leaf.requires_grad and id(leaf) not in given for leaf in returned):
        return Probe(
            name="registration",
            verdict=Verdict.DIVERGED,
            reason="gradients are recorded inside of its kernel, where a compiler does not see them",
            remedy="register them with torch.library.register_autograd, or the whole as CompositeImplicitAutograd",
        )
    return Probe(
        name="registration",
        verdict=Verdict.INCONCLUSIVE,
        reason="inputs require grad, and it has no autograd kernel: what its gradients should be cannot be told",
        remedy="register one with torch.library.register_autograd; if it has none, check it with gradients=False",
    )


def derivative(given: Baseline, others: Mapping[str, Sequence[Baseline]]) -> Probe:
    """Hold the backward against differences of the function, at the given inputs and at others, by what they are.

    What has a kink at some of them is known if it has none at another; what is wrong at any of them is wrong.
    """
    unknown: set[str] | None = None
    places = [("", given), *((f" {place}", other) for place, each in others.items() for other in each)]
    for place, baseline in places:
        try:
            found = slopes(baseline)
        except Exception as error:
            if baseline is not given:
                continue  # not every value is to an operator's liking
            return Probe(
                name="derivative",
                verdict=Verdict.INCONCLUSIVE,
                reason=f"it does not run in float64 ({type(error).__name__}: {_line(error)}), so nothing can be told",
            )
        if wrong := [f"{slope}{place}" for slope in found if slope.is_wrong]:
            return Probe(
                name="derivative",
                verdict=Verdict.DIVERGED,
                reason="; ".join(wrong),
                remedy="mend the backward given to register_autograd; where it is meant to be another function (a "
                "straight-through estimator), leave this probe out",
            )
        unsure = {slope.path for slope in found if not slope.is_known}
        unknown = unsure if unknown is None else unknown & unsure
    if unknown:
        reason = f"{NO_SLOPE}: {', '.join(sorted(unknown))}"
        return Probe(name="derivative", verdict=Verdict.INCONCLUSIVE, reason=reason)
    said = "in float64 the backward is the derivative of the forward"
    return Probe(name="derivative", verdict=Verdict.EQUIVALENT, reason=said)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
