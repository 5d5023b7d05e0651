"""Other common rules for comparing two tensors, applied to the same values: each says whether a leaf passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo.utils import same

from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import Leaves

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
"""Returns whether a leaf passes; takes reference, candidate and the reference in float64."""


def _is_asserted_close(reference: torch.Tensor, candidate: torch.Tensor, _: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(candidate, reference, equal_nan=True)
    except AssertionError:
        return False
    return True


def _is_all_close(reference: torch.Tensor, candidate: torch.Tensor, _: torch.Tensor) -> bool:
    return torch.allclose(reference, candidate, rtol=1e-4, atol=1e-4, equal_nan=True)


def _is_same_within(tol: float) -> Rule:
    def is_same(reference: torch.Tensor, candidate: torch.Tensor, wide: torch.Tensor) -> bool:
        return bool(same(reference, candidate, fp64_ref=wide, tol=tol, equal_nan=True, log_error=lambda *_: None))

    return is_same


def _has_sqnr_of(least_db: float) -> Rule:
    def has_sqnr(reference: torch.Tensor, candidate: torch.Tensor, _: torch.Tensor) -> bool:
        seen = measure(reference, candidate)
        if not reference.is_floating_point():
            return seen.mismatches == 0
        return seen.misplaced == 0 and seen.sqnr_db >= least_db

    return has_sqnr


OTHER_RULES: dict[str, Rule] = {
    "`assert_close` defaults": _is_asserted_close,
    "`allclose(1e-4, 1e-4)`": _is_all_close,
    "`same` with fp64, tol 1e-4": _is_same_within(1e-4),
    "`same` with fp64, tol 1e-2": _is_same_within(1e-2),
    "SQNR < 20": _has_sqnr_of(20.0),
    "SQNR < 40": _has_sqnr_of(40.0),
}


def flagged_by_others(reference: Leaves, candidate: Leaves, wide: Leaves) -> list[str]:
    """Return the rules that a stage of the candidate does not pass; `wide` is the reference in float64."""
    if not _has_same_form(reference, candidate):
        return list(OTHER_RULES)
    differing = differing_leaves(reference, candidate)
    return [
        name
        for name, passes in OTHER_RULES.items()
        if not all(passes(_plain(reference[path]), _plain(candidate[path]), _plain(wide[path])) for path in differing)
    ]


def differing_leaves(reference: Leaves, candidate: Leaves) -> list[str]:
    """Return the paths of the tensors in which two runs differ in any bit; both runs must have the same leaves."""
    return [
        path
        for path, leaf in reference.items()
        if isinstance(leaf, torch.Tensor)
        and leaf is not candidate[path]
        and measure(_plain(leaf), _plain(candidate[path])).mismatches
    ]


def is_identical(first: Leaves, second: Leaves) -> bool:
    """Return whether two runs have the same leaves with the same bits."""
    return _has_same_form(first, second) and not differing_leaves(first, second)


def _has_same_form(reference: Leaves, candidate: Leaves) -> bool:
    return reference.keys() == candidate.keys() and all(
        _form(leaf) == _form(candidate[path]) for path, leaf in reference.items()
    )


def _form(leaf: object) -> object:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf)


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach()
