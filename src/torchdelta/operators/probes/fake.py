"""Probes of an operator's fake kernel: sizes, strides and dtypes that it returns, compared with those of the real one.

A compiler plans memory from the fake kernel alone. It is asked with the user's inputs, with other sizes, and with sizes
that are symbols. Start with `compare_fake` and `compare_symbolic`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchdelta import errors
from torchdelta._torch.modes.outside import preserved_dispatch
from torchdelta._torch.operators import fake_kernels
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_leaves
from torchdelta.check.baseline import Baseline
from torchdelta.compare.contract import Terms, breaches
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.operators.inputs import calling_once_more, describe_error, first_line
from torchdelta.operators.probes.base import OpSubject, is_tensor
from torchdelta.program.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

REGISTER_FAKE = (
    "register a fake kernel: @torch.library.register_fake(NAME) on a function of the same arguments that returns empty "
    "tensors of the right sizes, strides and dtypes"
)
SYMBOLS = "let its fake kernel take symbolic sizes: use only operations that a torch.SymInt supports"
_SYMBOL = re.compile(r"\bSym(Int|Float|Bool)s?\b(?!\??\[|\?| \w+[,=)])|symbolic (sizes|shapes|strides|ints?)\b")
"""Matches torch's messages about a symbol, and not the same type names within a schema."""

Sizes = tuple[int | None, ...] | None
"""The sizes of a fake tensor, None for an unknown one; None for a value that is not a tensor."""


def fake_given(subject: OpSubject) -> Probe:
    """Compare the fake kernel with the real one on the user's inputs, and return a probe (`compare_fake`)."""
    return compare_fake("fake/given", subject.inputs.own)


def fake_resized(subject: OpSubject) -> Probe | str:
    """Compare the fake kernel with the real one on inputs of other sizes; return the probe with the worst verdict.

    Return a text that says why there are no other sizes if the operator takes none.
    """
    inputs = subject.inputs
    return _worst_of([compare_fake("fake/resized", other) for other in inputs.resized], inputs.why_no_sizes)


def fake_symbolic(subject: OpSubject) -> Probe | str:
    """Compare the fake kernel, run on symbolic sizes, with the real one on other sizes; return the worst probe.

    The other sizes are those of `resized_alike`. Return a text that says why instead if there are none, or if the fake
    kernel takes another branch for all of them without fixing a size.
    """
    inputs = subject.inputs
    answers = [compare_symbolic("fake/symbolic", inputs.own, other) for other in inputs.resized_alike]
    why_none = inputs.why_no_sizes
    if inputs.resized:
        why_none = "other sizes were tried, but none with the other arguments as they were given"
    return _worst_of(answers, why_none)


def _worst_of(answers: Sequence[Probe | str], why_none: str) -> Probe | str:
    """Return the probe with the worst verdict among the answers, the first of them if several have it.

    Texts count only if there is no probe: then return the first. If there are no answers, return `why_none`.
    """
    probes = [answer for answer in answers if isinstance(answer, Probe)]
    if probes:
        return max(probes, key=lambda probe: probe.verdict.severity)
    return str(answers[0]) if answers else why_none


def compare_fake(name: str, baseline: Baseline) -> Probe:
    """Call fake and real kernel with a baseline's inputs; return a probe, `name`, that compares their results.

    It is EQUIVALENT or DIVERGED: see `_compare`. If the fake kernel raises, it is INCONCLUSIVE or CRASHED: see
    `_report_error`.
    """
    side = Side.copied_from(baseline.program)
    with runtime.preserved_generators(), preserved_dispatch():
        try:
            returned = fake_kernels.call_faked(side.call, side.args, side.kwargs)
        except errors.caught_from_user_code() as error:  # a fake kernel is the user's code
            return _report_error(name, error)
    fakes = leaves_of(returned, "outputs")
    return _compare(name, _call_real(baseline), fakes, {path: _sizes(leaf) for path, leaf in fakes.items()})


def compare_symbolic(name: str, own: Baseline, other: Baseline) -> Probe | str:
    """Run the fake kernel on symbolic sizes; compare its results for the sizes of `other` with the real kernel's.

    The symbols are traced with the inputs of `own`. Return a probe, `name`: see `_compare`, or `_report_error` if the
    fake kernel raises. If it would take another branch for the sizes of `other`, nothing is compared: return an
    INCONCLUSIVE probe if it fixes a size to that of `own`, otherwise a text.
    """
    side = Side.copied_from(own.program)
    tensors = [leaf for leaf in tree_leaves((other.program.args, dict(other.program.kwargs))) if is_tensor(leaf)]
    with runtime.preserved_generators(), preserved_dispatch():
        try:
            symbolic = fake_kernels.Symbolic(side.call, side.args, side.kwargs)
            takes_other_branch = symbolic.has_other_branches_for(tensors)
        except errors.caught_from_user_code() as error:  # a fake kernel is the user's code
            return _report_error(name, error)
    if takes_other_branch and symbolic.fixes_sizes:
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason="its fake kernel fixes a size, so that every other size is compiled anew",
            remedy=SYMBOLS,
        )
    if takes_other_branch:
        return "its fake kernel takes another branch for the other sizes that were tried"
    fakes = leaves_of(symbolic.returned(tensors), "outputs")
    sizes = {path: symbolic.sizes(leaf, tensors) if is_tensor(leaf) else None for path, leaf in fakes.items()}
    return _compare(name, _call_real(other), fakes, sizes)


def _compare(name: str, real: Leaves, fakes: Leaves, sizes: dict[str, Sizes]) -> Probe:
    """Compare the fake leaves with the real leaves of the same paths; return a DIVERGED or EQUIVALENT probe, `name`.

    A path, or a tensor, on one side only is a difference. Tensors differ by sizes and by what `_other_breaches`
    returns, numbers and texts if they are not equal; other objects are not compared. `sizes` has the sizes of each fake
    tensor by its path, and None for other leaves; a single size that is unknown (None) agrees with any.
    """
    wrong = [f"{path} is missing" for path in real if path not in fakes]
    wrong += [f"{path} does not exist" for path in fakes if path not in real]
    for path, leaf in fakes.items():
        partner, size = real.get(path), sizes[path]
        if not is_tensor(leaf) or not is_tensor(partner):
            if path in real and is_tensor(leaf) != is_tensor(partner):
                wrong.append(f"{path} is a tensor on one side only")
            elif _is_other_number(leaf, partner):
                wrong.append(f"{path} is {leaf!r}, really {partner!r}")
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
        wrong += [f"{path} has {breach}" for breach in _other_breaches(partner, leaf)]
    if wrong:
        return Probe(
            name=name,
            verdict=Verdict.DIVERGED,
            reason=f"the fake kernel says: {'; '.join(wrong)}",
            remedy="mend the function given to register_fake: sizes, strides and dtypes follow from its arguments'",
        )
    return Probe(name=name, verdict=Verdict.EQUIVALENT, reason="the fake kernel says what the real one does")


def _is_other_number(fake: Any, real: Any) -> bool:
    """Tell whether two values are plain (a number or a text) and differ; two NaNs do not."""
    is_plain = isinstance(fake, (bool, int, float, complex, str)) and isinstance(real, (bool, int, float, complex, str))
    are_nan = fake != fake and real != real
    return is_plain and fake != real and not are_nan


def _other_breaches(real: torch.Tensor, fake: torch.Tensor) -> Iterable[str]:
    """Return a text for each difference between two tensors in dtype, strides, device and requires_grad.

    Strides that have no effect do not count. If a size or stride of the fake one is a symbol, only dtype and device are
    compared.
    """
    if any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride())):
        pairs = {"dtype": (real.dtype, fake.dtype), "device": (real.device, fake.device)}
        return [f"{clause} {wrong}, really {right}" for clause, (right, wrong) in pairs.items() if right != wrong]
    differences = breaches(real, fake, Terms(strict=frozenset({"stride"})))
    return [f"{breach.clause} {breach.candidate}, really {breach.reference}" for breach in differences]


def _sizes(leaf: Any) -> Sizes:
    """Return the sizes of a fake tensor, with None for one that depends on data; None for any other value."""
    if not is_tensor(leaf):
        return None
    return tuple(None if fake_kernels.is_unknown(size) else int(size) for size in leaf.shape)


def remedy_of(message: str) -> str:
    """Return what to register or to change in an operator whose trace raised this message; empty if that is unknown.

    Messages about a missing fake kernel, returned memory of an argument, a missing gradient, and symbolic sizes are
    known.
    """
    if "no fake impl" in message or "register_fake" in message:
        return REGISTER_FAKE
    if "alias annotations" in message:
        return (
            "a traced operator of a library must not return memory of its arguments: declare only what it changes, "
            "and return nothing or a copy"
        )
    if "register_autograd" in message:
        return "register its gradient: torch.library.register_autograd(NAME, backward, setup_context=…)"
    if _SYMBOL.search(message):
        return SYMBOLS
    return ""


def _report_error(name: str, error: BaseException) -> Probe:
    """Return a probe, `name`, for a fake kernel that raised: INCONCLUSIVE if it could not have answered, else CRASHED.

    It could not if torch has no fake tensors of its inputs' kind, if there is no fake kernel, or if its results depend
    on data.
    """
    if fake_kernels.has_no_fake_tensor(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"torch has no fake tensors like its inputs ({first_line(error)}), so no fake kernel can be asked",
        )
    if fake_kernels.lacks_fake_kernel(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason="there is no fake kernel, so there is nothing to compare with the real one",
            remedy=REGISTER_FAKE,
        )
    if fake_kernels.depends_on_data(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"its results depend on data, which a fake kernel does not have ({describe_error(error)})",
        )
    return Probe(
        name=name,
        verdict=Verdict.CRASHED,
        reason=f"the fake kernel raises {describe_error(error)}",
        remedy=SYMBOLS
        if name.endswith("symbolic") and isinstance(error, Exception)
        else "mend the function given to register_fake",
    )


def _call_real(baseline: Baseline) -> Leaves:
    """Call the operator eagerly on copies of a baseline's inputs, and return its outputs by path.

    The outputs themselves are returned, because a copy may have other strides. Raise RaisedOnceMore if it raises.
    """
    with calling_once_more():
        return baseline.outputs()
