"""Probes that run an operator eagerly: its schema, whether it repeats itself, and its autograd registration.

A trace runs an operator once and keeps what its schema declares. So an operator that changes more than it declares, or
that returns another result when it is called again, is wrong under every compiler.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from torchdelta._torch.operators import schemas
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_leaves, tree_map_only
from torchdelta.compare.distance import distance
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.policy import Bitwise
from torchdelta.operators.inputs import RaisedOnceMore, call_on_copies, calling_once_more
from torchdelta.operators.probes.base import OpSubject, has_input_with_grad, is_tensor
from torchdelta.program import examples
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

CALLS = 2
"""How often an operator is called with the same inputs: an undeclared effect may not happen in every call."""
DRAWS = 8
"""How many draws of fresh values it is called with: an undeclared effect may depend on values."""
ROUNDINGS = 4
"""How many units in the last place of the largest element may differ, because a sum may be taken in another order."""


def schema(subject: OpSubject) -> Probe:
    """Watch what the operator writes to and returns, and compare it with what its schema declares.

    DIVERGED if it changed an argument or returned shared memory without declaring it, otherwise EQUIVALENT. It is
    called several times with each of these: the user's inputs, fresh values, other sizes and other layouts. Raise
    RaisedOnceMore if it raises for the user's inputs; other calls that raise are skipped.
    """
    inputs, own = subject.inputs, subject.inputs.own
    watch = schemas.DeclaredEffects(inputs.op)
    fresh = [
        program
        for draw in range(DRAWS)
        for program in itertools.islice(examples.redraw(own.program, seed=own.plan.seed + draw + 1), 1)
    ]
    others = [other.program for other in (*inputs.resized, *inputs.laid_out.values())]
    for program in (own.program, *fresh, *others):
        for call in range(CALLS):
            copies = copy_together((program.args, dict(program.kwargs)), name=program.name)
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, copies)
            runtime.seed_everything(own.plan.seed + call)
            try:
                with calling_once_more(), own.eager_scope(), watch:
                    watch.call(args, kwargs)
            except RaisedOnceMore:
                if program is own.program:
                    raise
                break  # an operator need not take every value
    if not watch.breaches:
        reason = f"{watch.calls} calls did what it declares"
        return Probe(name="schema", verdict=Verdict.EQUIVALENT, reason=reason)
    return Probe(
        name="schema",
        verdict=Verdict.DIVERGED,
        reason="; ".join(watch.breaches),
        remedy="declare what it changes (mutates_args=… or Tensor(a!)), and return a copy of what it would alias",
    )


def repeat(subject: OpSubject) -> Probe:
    """Call the operator twice with the same inputs and seed; compare outputs, and inputs afterwards, bit by bit.

    EQUIVALENT if nothing differs. Otherwise the worst difference decides: INCONCLUSIVE if it is small enough for a sum
    in another order (`_is_rounding`), else DIVERGED. Raise RaisedOnceMore if a call raises.
    """
    own = subject.inputs.own
    side = Side.copied_from(own.program)
    with calling_once_more():
        first, second = call_on_copies(side, own), call_on_copies(side, own)
    comparisons, _ = Judge(policy=Bitwise()).compare(first, second)
    worst = max(comparisons, key=lambda comparison: comparison.rank, default=None)
    if worst is None or worst.verdict is Verdict.EQUIVALENT:
        return Probe(name="repeat", verdict=Verdict.EQUIVALENT, reason="called again it returns the same")
    values = f": {worst.worst.reference} and then {worst.worst.candidate}" if worst.worst else ""
    written = "" if worst.path.startswith("outputs") else "what it leaves in "
    difference = f"is another{values}" if worst.path in first and worst.path in second else "is there only once"
    reason = f"called again with the same inputs and the same seed, {written}{worst.path} {difference}"
    if _is_rounding(first.get(worst.path), second.get(worst.path)):
        return Probe(name="repeat", verdict=Verdict.INCONCLUSIVE, reason=f"{reason}, which may be rounding")
    return Probe(
        name="repeat",
        verdict=Verdict.DIVERGED,
        reason=reason,
        remedy="a trace runs it once and keeps the result: pass what it remembers between calls as an argument that "
        "it declares to change, or draw from torch's generators",
    )


def _is_rounding(first: Any, second: Any) -> bool:
    """Tell whether two float or complex tensors differ by at most `ROUNDINGS` eps of the first's largest element.

    A sum that is not always taken in the same order differs by as much. False for other values, other shapes or dtypes,
    and misplaced NaNs.
    """
    if not (is_tensor(first) and is_tensor(second) and is_inexact(first.dtype)):
        return False
    return distance(first, second) <= ROUNDINGS * torch.finfo(first.dtype).eps


def registration(subject: OpSubject) -> Probe:
    """Ask whether the operator's gradient is registered with the dispatcher, where a compiler sees it.

    EQUIVALENT if it has an autograd kernel for every device of the inputs, or is composite. Otherwise it is called
    once, on copies: EQUIVALENT if no output is of floats, DIVERGED if an output that is not an input requires grad,
    because that was recorded inside of the kernel, else INCONCLUSIVE. Raise RaisedOnceMore if that call raises.
    """
    op, own = subject.inputs.op, subject.inputs.own
    program = own.program
    devices = {leaf.device.type for leaf in tree_leaves((program.args, dict(program.kwargs))) if is_tensor(leaf)}
    if all(schemas.has_autograd_kernel(op, device) for device in devices or {"cpu"}):
        return Probe(name="registration", verdict=Verdict.EQUIVALENT, reason="it has an autograd kernel")
    copies = copy_together((program.args, dict(program.kwargs)), name=program.name)
    # the operator may write to a clone, because it is not an autograd leaf
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), copies)
    inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    with calling_once_more(), own.eager_scope(), schemas.without_autograd_fallback():
        outputs = tree_leaves(op(*args, **kwargs))
    if not any(is_tensor(leaf) and is_inexact(leaf.dtype) for leaf in outputs):
        return Probe(name="registration", verdict=Verdict.EQUIVALENT, reason="no output can have a gradient")
    if any(is_tensor(leaf) and leaf.requires_grad and id(leaf) not in inputs for leaf in outputs):
        return Probe(
            name="registration",
            verdict=Verdict.DIVERGED,
            reason="gradients are recorded inside of its kernel, where a compiler does not see them",
            remedy="register them with torch.library.register_autograd, or the whole as CompositeImplicitAutograd",
        )
    return Probe(
        name="registration",
        verdict=Verdict.INCONCLUSIVE,
        reason="inputs require grad, and it has no autograd kernel: what its gradients should be is unknown",
        remedy="register one with torch.library.register_autograd; if it has none, check it with gradients=False",
    )


def gradients(subject: OpSubject) -> Probe | str:
    """Ask whether there are gradients to compare, which is what the other probes then do; return a probe, or a text.

    EQUIVALENT if the backward runs. INCONCLUSIVE if no input requires grad, or if the backward raises for the user's
    inputs, or for other sizes that the forward takes (`OpInputs.other_backward_error`). If no output requires grad, an
    EQUIVALENT probe, because a trace has to refuse a backward too; with `gradients="auto"` a text that says so.
    """
    inputs = subject.inputs
    if has_input_with_grad(subject):
        return Probe(
            name="gradients",
            verdict=Verdict.INCONCLUSIVE,
            reason="no input requires grad, so nothing is known about its gradients",
            remedy="give inputs with requires_grad=True, or ask without gradients",
        )
    if inputs.backward_error:
        return Probe(
            name="gradients",
            verdict=Verdict.INCONCLUSIVE,
            reason=f"its backward raises eagerly: {inputs.backward_error}",
            remedy="mend it, or register one with torch.library.register_autograd; or ask without gradients",
        )
    if inputs.resized and inputs.other_backward_error:
        return Probe(
            name="gradients",
            verdict=Verdict.INCONCLUSIVE,
            reason=f"its backward raises for inputs that its forward takes: {inputs.other_backward_error}",
            remedy="mend the backward: it may assume a size",
        )
    if inputs.own.reference.is_differentiable:
        return Probe(name="gradients", verdict=Verdict.EQUIVALENT, reason="its backward runs eagerly")
    if subject.gradients == "auto":
        return "no output requires grad"
    # requires_grad of the outputs is a clause of the contract, so every trace is held to it
    reason = "no output requires grad, so a backward is refused; every equivalent trace refuses it too"
    return Probe(name="gradients", verdict=Verdict.EQUIVALENT, reason=reason)
