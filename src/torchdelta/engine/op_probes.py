"""What an operator is asked besides whether it compiles: its schema, its steadiness, its autograd, its fake kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from torchdelta._torch import fakes, runtime, schemas
from torchdelta._torch.modes import dispatch_kept
from torchdelta._torch.trees import tree_leaves, tree_map_only
from torchdelta.compare.contract import Terms, breaches
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.policy import Bitwise
from torchdelta.engine.baseline import Baseline
from torchdelta.engine.derivative import slopes
from torchdelta.execute import examples
from torchdelta.execute.copies import copy_together
from torchdelta.execute.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

CALLS = 2
"""How often an operator is watched with the same inputs: what it does undeclared it may do only sometimes."""
DRAWS = 8
"""With so many draws of fresh values: it may depend on them."""
ROUNDINGS = 4
"""So many units in the last place of the largest element may differ where a sum is taken in another order."""
NO_SLOPE = "at these inputs it has no derivative: it is no number, or another to the left than to the right"
REGISTER_FAKE = (
    "register a fake kernel: @torch.library.register_fake(NAME) on a function of the same arguments that returns empty "
    "tensors of the right sizes, strides and dtypes"
)
SYMBOLS = "let its fake kernel take sizes that are no numbers: ask them only what a torch.SymInt answers"


def schema(op: Any, baseline: Baseline) -> Probe:
    """Watch what an operator writes to and what it returns, several times and with fresh values."""
    watching = schemas.Declared(op)
    drawn = [
        program
        for draw in range(DRAWS)
        for program in itertools.islice(examples.fresh(baseline.program, seed=baseline.plan.seed + draw + 1), 1)
    ]
    for program in (baseline.program, *drawn):
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
        said = f"{watching.watched} calls did what it declares"
        return Probe(name="schema", verdict=Verdict.EQUIVALENT, reason=said)
    return Probe(
        name="schema",
        verdict=Verdict.DIVERGED,
        reason="; ".join(watching.breaches),
        remedy="declare what it changes (mutates_args=… or Tensor(a!)), and return a copy of what it would alias",
    )


def repeat(baseline: Baseline) -> Probe:
    """Call it twice, with the same inputs and the same seed."""
    side = Side.copied_from(baseline.program)
    first, second = _called(side, baseline), _called(side, baseline)
    found, _ = Judge(policy=Bitwise()).compare(first, second)
    worst = max(found, key=lambda seen: seen.rank, default=None)
    if worst is None or worst.verdict is Verdict.EQUIVALENT:
        return Probe(name="repeat", verdict=Verdict.EQUIVALENT, reason="called again it gives the same")
    values = f": {worst.worst.reference} and then {worst.worst.candidate}" if worst.worst else ""
    said = f"called again with the same inputs and the same seed, {worst.path} is another{values}"
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
    if not (_is_tensor(first) and _is_tensor(second) and first.shape == second.shape and first.dtype == second.dtype):
        return False
    if not is_inexact(first.dtype):
        return False
    most = float(first.abs().max()) * ROUNDINGS * torch.finfo(first.dtype).eps
    return bool(float((first - second).abs().max()) <= most)


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


def derivative(baselines: Iterable[Baseline]) -> Probe:
    """Hold the backward against differences of the function; a kink at one of the inputs is none at the others."""
    wrong: list[str] = []
    asked = 0
    for baseline in baselines:
        try:
            found = slopes(baseline)
        except Exception as error:
            return Probe(
                name="derivative",
                verdict=Verdict.INCONCLUSIVE,
                reason=f"it does not run in float64 ({type(error).__name__}: {_line(error)}), so nothing can be told",
            )
        asked += sum(slope.is_known for slope in found)
        wrong = [str(slope) for slope in found if slope.is_wrong]
        if not wrong:
            break
    if wrong:
        return Probe(
            name="derivative",
            verdict=Verdict.DIVERGED,
            reason="; ".join(wrong),
            remedy="mend the backward given to register_autograd; where it is meant to be another function (a "
            "straight-through estimator), leave this probe out",
        )
    if not asked:
        return Probe(name="derivative", verdict=Verdict.INCONCLUSIVE, reason=NO_SLOPE)
    return Probe(name="derivative", verdict=Verdict.EQUIVALENT, reason="the backward is the derivative of the forward")


def fake(name: str, baseline: Baseline) -> Probe:
    """Hold what the fake kernel says of the results against what the real one returned."""
    side = Side.copied_from(baseline.program)
    with runtime.preserved_generators(), dispatch_kept():
        try:
            returned = fakes.call_faked(side.call, side.args, side.kwargs)
        except Exception as error:
            return _failed(name, error)
    said = leaves_of(returned, "outputs")
    return _compared(name, _outputs(baseline), said, {path: _sizes(leaf) for path, leaf in said.items()})


def symbolic(name: str, given: Baseline, other: Baseline) -> Probe | str:
    """Run the fake kernel with sizes that are symbols, and put other numbers in their place; or say why not."""
    side = Side.copied_from(given.program)
    tensors = [leaf for leaf in tree_leaves((other.program.args, dict(other.program.kwargs))) if _is_tensor(leaf)]
    with runtime.preserved_generators(), dispatch_kept():
        try:
            made = fakes.Symbolic(side.call, side.args, side.kwargs)
            is_elsewhere = made.goes_other_ways_for(tensors)
        except Exception as error:
            return _failed(name, error)
    if is_elsewhere and made.fixes_sizes:
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason="it takes a size for the number that it is: every other one is compiled anew",
            remedy=SYMBOLS,
        )
    if is_elsewhere:
        return "it goes another way with the other sizes that were tried"
    said = leaves_of(made.returned, "outputs")
    sizes = {path: made.sizes(leaf, tensors) if _is_tensor(leaf) else None for path, leaf in said.items()}
    return _compared(name, _outputs(other), said, sizes)


Sizes = tuple[int | None, ...] | None


def _compared(name: str, real: Leaves, said: Leaves, sizes: dict[str, Sizes]) -> Probe:
    wrong = [f"{path} is missing" for path in real if path not in said]
    wrong += [f"{path} does not exist" for path in said if path not in real]
    for path, leaf in said.items():
        partner, size = real.get(path), sizes[path]
        if not _is_tensor(leaf) or not _is_tensor(partner):
            wrong += [f"{path} is no tensor"] if path in real and _is_tensor(leaf) != _is_tensor(partner) else []
            continue
        assert isinstance(partner, torch.Tensor)
        if (
            size is None
            or len(size) != partner.dim()
            or any(one is not None and one != other for one, other in zip(size, partner.shape, strict=True))
        ):
            known = tuple("?" if one is None else one for one in size or ())
            wrong.append(f"{path} has sizes {known}, really {tuple(partner.shape)}")
            continue
        wrong += [f"{path} has {each}" for each in _other_breaches(partner, leaf)]
    if wrong:
        return Probe(
            name=name,
            verdict=Verdict.DIVERGED,
            reason=f"the fake kernel says: {'; '.join(wrong)}",
            remedy="mend the function given to register_fake: sizes, strides and dtypes follow from its arguments'",
        )
    return Probe(name=name, verdict=Verdict.EQUIVALENT, reason="the fake kernel says what the real one does")


def _other_breaches(real: torch.Tensor, said: torch.Tensor) -> Iterable[str]:
    if any(isinstance(size, torch.SymInt) for size in (*said.shape, *said.stride())):
        return [] if real.dtype == said.dtype else [f"dtype {said.dtype}, really {real.dtype}"]
    found = breaches(real, said, Terms(strict=frozenset({"stride"})))
    return [f"{each.clause} {each.candidate}, really {each.reference}" for each in found]


def _sizes(leaf: Any) -> Sizes:
    if not _is_tensor(leaf):
        return None
    return tuple(None if fakes.is_unknown(size) else int(size) for size in leaf.shape)


def remedy_of(message: str) -> str:
    """Return what to register where a trace raised this."""
    if "no fake impl" in message or "register_fake" in message:
        return REGISTER_FAKE
    if "register_autograd" in message:
        return "register its gradient: torch.library.register_autograd(NAME, backward, setup_context=…)"
    if "SymInt" in message or "symbolic" in message:
        return SYMBOLS
    return ""


def _failed(name: str, error: Exception) -> Probe:
    if fakes.lacks_fake_kernel(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason="there is no fake kernel, so there is nothing to hold against the real one",
            remedy=REGISTER_FAKE,
        )
    if fakes.depends_on_data(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"without data nothing can be told of what it returns ({type(error).__name__}: {_line(error)})",
        )
    return Probe(
        name=name,
        verdict=Verdict.CRASHED,
        reason=f"the fake kernel raises {type(error).__name__}: {_line(error)}",
        remedy=SYMBOLS if name.endswith("symbolic") else "mend the function given to register_fake",
    )


def _called(side: Side, baseline: Baseline) -> Leaves:
    args, kwargs = copy_together((side.args, side.kwargs), name=baseline.program.name)
    runtime.seed_everything(baseline.plan.seed)
    with baseline.eager_scope():
        returned = side.call(*args, **kwargs)
    # its memory may be written to by the next call
    return leaves_of(copy_together(returned, name="the outputs"), "outputs")


def _outputs(baseline: Baseline) -> Leaves:
    """Return what the real kernel returns itself: a copy of it may be laid out otherwise."""
    side = Side.copied_from(baseline.program)
    runtime.seed_everything(baseline.plan.seed)
    with baseline.eager_scope():
        return leaves_of(side.call(*side.args, **side.kwargs), "outputs")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
