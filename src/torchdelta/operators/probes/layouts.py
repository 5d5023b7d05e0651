"""Probes with inputs in other memory layouts: a kernel that reads a data pointer may ignore the strides.

The other layouts hold the same values, so the results must be the same but for rounding. The normal amount of rounding
is measured with inputs whose last bits are moved. Start with `layout`.
"""

from __future__ import annotations

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
from torchdelta.operators.inputs import call_on_copies, describe_error
from torchdelta.operators.probes.base import OpSubject
from torchdelta.operators.probes.fake import compare_fake
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

REMEDY = (
    "inputs come in any layout: begin with x = x.contiguous(), or use its strides; if the operator is about memory "
    "(as_strided, random numbers in its order), leave this probe out"
)


def layout(subject: OpSubject) -> Probe | str:
    """Ask whether the operator returns the same, but for rounding, for other memory layouts that it accepts.

    DIVERGED for the first layout with other results, else EQUIVALENT; INCONCLUSIVE if it raises when called again. The
    reason also tells of the last layout that it rejects. Return a text if there is nothing to ask: no other layout is
    accepted, the operator draws random numbers, or it returns something else when called again with another seed.
    """
    inputs, own = subject.inputs, subject.inputs.own
    if not inputs.laid_out:
        return inputs.why_no_layouts
    try:
        with DrawWatch() as draws:
            plain = _call(own.program, own)
        if draws.has_drawn:
            return "it draws random numbers, in the order of memory"
        repeats, _ = Judge(policy=Bitwise()).compare(plain, _call(own.program, own, seed=own.plan.seed + 1))
        results = {name: _call(other.program, other) for name, other in inputs.laid_out.items()}
    except Exception as error:
        reason = f"called once more it raises {describe_error(error)}"
        return _answer(subject, Verdict.INCONCLUSIVE, reason)
    if any(comparison.verdict is not Verdict.EQUIVALENT for comparison in repeats):
        return "called once more, with another seed, it returns something else"
    moved = [_call_with_moved_bits(own, sign) for sign in (1, -1)]
    for name, result in results.items():
        if difference := first_difference(plain, result, moved):
            reason = f"for inputs of the same values that are {name} in memory it returns another {difference}"
            return _answer(subject, Verdict.DIVERGED, reason, REMEDY)
    reason = f"it returns the same for inputs that are {' or '.join(results)} in memory"
    return _answer(subject, Verdict.EQUIVALENT, reason)


def fake_layout(subject: OpSubject) -> Probe | str:
    """Compare fake and real results for the other memory layouts that the forward accepts; return the worst probe.

    If the probe for the user's own layout is not EQUIVALENT, return that one, because the layout is not the cause.
    Return a text if no other layout is accepted.
    """
    inputs = subject.inputs
    if not inputs.laid_out:
        return inputs.why_no_layouts
    plain = compare_fake("fake/layout", inputs.own)
    if plain.verdict is not Verdict.EQUIVALENT:
        return plain  # the layout is not the cause
    answers = [_name_layout(compare_fake("fake/layout", other), name) for name, other in inputs.laid_out.items()]
    return max(answers, key=lambda probe: probe.verdict.severity)


def _answer(subject: OpSubject, verdict: Verdict, reason: str, remedy: str = "") -> Probe:
    """Return the probe `layout`; its reason also tells of the last layout that the operator rejects, if any."""
    rejected = f"; {subject.inputs.layout_error}" if subject.inputs.layout_error else ""
    return Probe(name="layout", verdict=verdict, reason=reason + rejected, remedy=remedy)


def _call_with_moved_bits(own: Baseline, sign: int) -> Leaves:
    """Call the operator on inputs with other last bits, and return its results by path; empty if the operator raises.

    They show how much rounding is normal. A `sign` of 1 moves floats away from zero, -1 towards zero.
    """
    program = own.program
    try:
        args, kwargs = tree_map_only(torch.Tensor, partial(_move, sign), (program.args, dict(program.kwargs)))
        return _call(replace(program, args=args, kwargs=kwargs), own)
    except Exception:  # an operator need not take every value
        return {}


def _move(sign: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor with other last bits and the same `requires_grad`; integers are unchanged."""
    return with_other_last_bits(tensor.detach(), sign).requires_grad_(tensor.requires_grad)


def _call(program: Program, baseline: Baseline, *, seed: int | None = None) -> Leaves:
    """Call a copy of the program eagerly; return its outputs and its input tensors afterwards (`call_on_copies`)."""
    return call_on_copies(Side.copied_from(program), baseline, seed=seed)


def _name_layout(probe: Probe, name: str) -> Probe:
    """Return the answer with the name of the layout before its reason, unless it is equivalent."""
    if probe.verdict is Verdict.EQUIVALENT:
        return probe
    return replace(probe, reason=f"for inputs that are {name} in memory {probe.reason}")
