"""What the fake kernel of an operator says of its results, held against what the real one returns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from torchdelta import errors
from torchdelta._torch.modes.outside import dispatch_kept
from torchdelta._torch.operators import fake_kernels
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_leaves
from torchdelta.check.baseline import Baseline
from torchdelta.compare.contract import Terms, breaches
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.program.sides import Side
from torchdelta.records.operators import Probe
from torchdelta.records.verdict import Verdict

REGISTER_FAKE = (
    "register a fake kernel: @torch.library.register_fake(NAME) on a function of the same arguments that returns empty "
    "tensors of the right sizes, strides and dtypes"
)
SYMBOLS = "let its fake kernel take sizes that are no numbers: ask them only what a torch.SymInt answers"
_SYMBOL = re.compile(r"\bSym(Int|Float|Bool)s?\b(?!\??\[|\?| \w+[,=)])|symbolic (sizes|shapes|strides|ints?)\b")
"""In what torch says of a symbol; a schema names the same types."""


def fake(name: str, baseline: Baseline) -> Probe:
    """Hold what the fake kernel says of the results against what the real one returned."""
    side = Side.copied_from(baseline.program)
    with runtime.preserved_generators(), dispatch_kept():
        try:
            returned = fake_kernels.call_faked(side.call, side.args, side.kwargs)
        except errors.caught_from_user_code() as error:  # a fake kernel is the user's code
            return _failed(name, error)
    said = leaves_of(returned, "outputs")
    return _compared(name, _outputs(baseline), said, {path: _sizes(leaf) for path, leaf in said.items()})


def symbolic(name: str, given: Baseline, other: Baseline) -> Probe | str:
    """Run the fake kernel with sizes that are symbols, and put other numbers in their place; or say why not."""
    side = Side.copied_from(given.program)
    tensors = [leaf for leaf in tree_leaves((other.program.args, dict(other.program.kwargs))) if _is_tensor(leaf)]
    with runtime.preserved_generators(), dispatch_kept():
        try:
            made = fake_kernels.Symbolic(side.call, side.args, side.kwargs)
            is_elsewhere = made.goes_other_ways_for(tensors)
        except errors.caught_from_user_code() as error:  # a fake kernel is the user's code
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
    said = leaves_of(made.returned(tensors), "outputs")
    sizes = {path: made.sizes(leaf, tensors) if _is_tensor(leaf) else None for path, leaf in said.items()}
    return _compared(name, _outputs(other), said, sizes)


Sizes = tuple[int | None, ...] | None


def _compared(name: str, real: Leaves, said: Leaves, sizes: dict[str, Sizes]) -> Probe:
    wrong = [f"{path} is missing" for path in real if path not in said]
    wrong += [f"{path} does not exist" for path in said if path not in real]
    for path, leaf in said.items():
        partner, size = real.get(path), sizes[path]
        if not _is_tensor(leaf) or not _is_tensor(partner):
            if path in real and _is_tensor(leaf) != _is_tensor(partner):
                wrong.append(f"{path} is no tensor")
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
        wrong += [f"{path} has {each}" for each in _other_breaches(partner, leaf)]
    if wrong:
        return Probe(
            name=name,
            verdict=Verdict.DIVERGED,
            reason=f"the fake kernel says: {'; '.join(wrong)}",
            remedy="mend the function given to register_fake: sizes, strides and dtypes follow from its arguments'",
        )
    return Probe(name=name, verdict=Verdict.EQUIVALENT, reason="the fake kernel says what the real one does")


def _is_other_number(said: Any, real: Any) -> bool:
    is_plain = isinstance(said, (bool, int, float, complex, str)) and isinstance(real, (bool, int, float, complex, str))
    are_nan = said != said and real != real
    return is_plain and said != real and not are_nan


def _other_breaches(real: torch.Tensor, said: torch.Tensor) -> Iterable[str]:
    if any(isinstance(size, torch.SymInt) for size in (*said.shape, *said.stride())):
        pairs = {"dtype": (real.dtype, said.dtype), "device": (real.device, said.device)}
        return [f"{clause} {told}, really {true}" for clause, (true, told) in pairs.items() if true != told]
    found = breaches(real, said, Terms(strict=frozenset({"stride"})))
    return [f"{each.clause} {each.candidate}, really {each.reference}" for each in found]


def _sizes(leaf: Any) -> Sizes:
    if not _is_tensor(leaf):
        return None
    return tuple(None if fake_kernels.is_unknown(size) else int(size) for size in leaf.shape)


def remedy_of(message: str) -> str:
    """Return what to register where a trace raised this."""
    if "no fake impl" in message or "register_fake" in message:
        return REGISTER_FAKE
    if "alias annotations" in message:
        return (
            "an operator of a library that is traced returns no memory of its arguments: declare only what it changes, "
            "and return nothing or a copy"
        )
    if "register_autograd" in message:
        return "register its gradient: torch.library.register_autograd(NAME, backward, setup_context=…)"
    if _SYMBOL.search(message):
        return SYMBOLS
    return ""


def _failed(name: str, error: BaseException) -> Probe:
    if fake_kernels.has_no_fake_tensor(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"torch has no fake tensors like its inputs ({_line(error)}), so no fake kernel can be asked",
        )
    if fake_kernels.lacks_fake_kernel(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason="there is no fake kernel, so there is nothing to hold against the real one",
            remedy=REGISTER_FAKE,
        )
    if fake_kernels.depends_on_data(error):
        return Probe(
            name=name,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"without data nothing can be told of what it returns ({type(error).__name__}: {_line(error)})",
        )
    return Probe(
        name=name,
        verdict=Verdict.CRASHED,
        reason=f"the fake kernel raises {type(error).__name__}: {_line(error)}",
        remedy=SYMBOLS
        if name.endswith("symbolic") and isinstance(error, Exception)
        else "mend the function given to register_fake",
    )


def _outputs(baseline: Baseline) -> Leaves:
    """Return what the real kernel returns itself: a copy of it may be laid out otherwise."""
    return baseline.outputs()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
