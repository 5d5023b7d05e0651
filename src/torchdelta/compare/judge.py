"""Hold every leaf of one value against its partner in the other: contract first, then values, each with evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torchdelta._torch import tensors
from torchdelta.compare.contract import Terms, breaches
from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import Container, Leaves, Pair, align, describe
from torchdelta.compare.policy import Policy, Sample, default_tolerance
from torchdelta.records.comparison import Breach, Comparison, Measurement, Scalar, Unmatched, Worst
from torchdelta.records.verdict import Verdict

Aliases = Mapping[str, frozenset[str]]
"""Which other values share memory with the leaf at a path."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A policy and the terms of the contract: the same for every leaf of a case."""

    policy: Policy
    terms: Terms = field(default_factory=Terms)

    def compare(
        self,
        reference: Leaves,
        candidate: Leaves,
        truth: Leaves | None = None,
        aliases: tuple[Aliases, Aliases] = ({}, {}),
    ) -> tuple[list[Comparison], list[Unmatched]]:
        """Compare two values leaf by leaf; a leaf without a partner is a comparison that diverged, and is named."""
        pairs, unmatched = align(reference, candidate, truth)
        comparisons = [self._compare_pair(pair, aliases) for pair in pairs]
        comparisons += [_alone(leaf) for leaf in unmatched]
        return comparisons, unmatched

    def _compare_pair(self, pair: Pair, aliases: tuple[Aliases, Aliases]) -> Comparison:
        reference, candidate = as_tensor(pair.reference), as_tensor(pair.candidate)
        if reference is None or candidate is None or _kind(pair.reference) is not _kind(pair.candidate):
            return _compare_objects(pair)
        return self._compare_tensors(pair, reference, candidate, aliases)

    def _compare_tensors(
        self, pair: Pair, reference: torch.Tensor, candidate: torch.Tensor, aliases: tuple[Aliases, Aliases]
    ) -> Comparison:
        broken = (*breaches(reference, candidate, self.terms), *self._aliasing(pair.path, aliases))
        facts: dict[str, Any] = {
            "path": pair.path,
            "dtype": tensors.dtype_name(reference),
            "shape": tuple(reference.shape),
            "contract": broken,
        }
        decisive = next((breach for breach in broken if not breach.excused), None)
        if reference.shape != candidate.shape:
            assert decisive is not None
            return Comparison(verdict=Verdict.DIVERGED, reason=str(decisive), **facts)
        if reference is candidate:
            return Comparison(verdict=Verdict.EQUIVALENT, reason="left as it was on both sides", error=0.0, **facts)
        if not (tensors.has_own_buffer(reference) and tensors.has_own_buffer(candidate)):
            verdict = Verdict.DIVERGED if decisive else Verdict.INCONCLUSIVE
            reason = str(decisive) if decisive else f"a tensor on {reference.device} has no values to compare"
            return Comparison(verdict=verdict, reason=reason, **facts)

        truth = as_tensor(pair.truth)
        if truth is not None and (truth.shape != reference.shape or not tensors.has_own_buffer(truth)):
            truth = None
        found = self._judge_values(reference, candidate, truth, facts)
        if decisive and found.verdict is not Verdict.DIVERGED:
            return replace(found, verdict=Verdict.DIVERGED, reason=str(decisive))
        return found

    def _judge_values(
        self, reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor | None, facts: dict[str, Any]
    ) -> Comparison:
        rtol, atol = default_tolerance(reference.dtype, candidate.dtype)
        rtol = self.policy.rtol if self.policy.rtol is not None else rtol
        atol = self.policy.atol if self.policy.atol is not None else atol
        seen = measure(reference, candidate, rtol=rtol, atol=atol)
        facts = {**facts, "measurement": seen, "worst": _worst(seen, reference, candidate, truth)}
        if not is_inexact(reference.dtype) or not is_inexact(candidate.dtype):
            return self._judge_exact(seen, facts)
        judged = self.policy.judge(
            Sample(
                reference=reference,
                candidate=candidate,
                truth=truth,
                measurement=seen,
                lowered_to=self.terms.lowered_to,
            )
        )
        return Comparison(
            verdict=judged.verdict,
            reason=judged.reason,
            error=judged.error,
            noise=judged.noise,
            allowed=judged.allowed,
            resolution=judged.resolution,
            details=judged.details,
            **facts,
        )

    def _judge_exact(self, seen: Measurement, facts: dict[str, Any]) -> Comparison:
        facts = {**facts, "error": seen.max_abs, "allowed": 0.0, "resolution": 0.0}
        if not seen.mismatches:
            return Comparison(verdict=Verdict.EQUIVALENT, reason="identical", **facts)
        reason = f"{seen.mismatches} of {seen.numel} elements differ, and integers have no rounding noise"
        if self.terms.excuses("integers"):
            breach = Breach(clause="integers", reference="exact", candidate=reason, excused=True)
            facts["contract"] = (*facts["contract"], breach)
            return Comparison(verdict=Verdict.EQUIVALENT, reason=f"ignored: {reason}", **facts)
        return Comparison(verdict=Verdict.DIVERGED, reason=reason, **facts)

    def _aliasing(self, path: str, aliases: tuple[Aliases, Aliases]) -> tuple[Breach, ...]:
        of_reference, of_candidate = (side.get(path, frozenset()) for side in aliases)
        if of_reference == of_candidate:
            return ()
        return (
            Breach(
                clause="aliasing",
                reference=_partners(of_reference),
                candidate=_partners(of_candidate),
                excused=self.terms.excuses("aliasing"),
            ),
        )


def is_inexact(dtype: torch.dtype) -> bool:
    """Tell whether values of the dtype are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return numbers and numeric arrays as a tensor; None of everything else."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return torch.as_tensor(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value)
        except TypeError:
            return None
    if isinstance(value, (bool, int)):
        return torch.tensor(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, (float, complex)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    return None


def _kind(value: Any) -> type:
    # a parameter that comes back as a plain tensor is no change of structure
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _compare_objects(pair: Pair) -> Comparison:
    reference, candidate = pair.reference, pair.candidate
    facts: dict[str, Any] = {"path": pair.path, "kind": "structure" if isinstance(reference, Container) else "object"}
    if type(reference) is not type(candidate) or isinstance(reference, Container):
        breach = Breach(clause="structure", reference=describe(reference), candidate=describe(candidate))
        return Comparison(verdict=Verdict.DIVERGED, reason=str(breach), contract=(breach,), **facts)
    try:
        same = reference is candidate or bool(np.all(reference == candidate))
    except Exception as error:
        reason = f"two {type(reference).__name__} cannot be compared: {type(error).__name__}: {error}"
        return Comparison(verdict=Verdict.INCONCLUSIVE, reason=reason, **facts)
    if same:
        return Comparison(verdict=Verdict.EQUIVALENT, reason="equal", **facts)
    if "__eq__" not in {name for kind in type(reference).__mro__[:-1] for name in vars(kind)}:
        reason = f"two {type(reference).__name__} cannot be compared: the class does not say what equal means"
        return Comparison(verdict=Verdict.INCONCLUSIVE, reason=reason, **facts)
    breach = Breach(clause="value", reference=describe(reference), candidate=describe(candidate))
    return Comparison(verdict=Verdict.DIVERGED, reason=str(breach), contract=(breach,), **facts)


def _alone(leaf: Unmatched) -> Comparison:
    other = "candidate" if leaf.side == "reference" else "reference"
    sides = {leaf.side: leaf.what, other: "nothing"}
    breach = Breach(clause="structure", reference=sides["reference"], candidate=sides["candidate"])
    return Comparison(
        path=leaf.path, verdict=Verdict.DIVERGED, reason=str(breach), kind="structure", contract=(breach,)
    )


def _partners(paths: frozenset[str]) -> str:
    return f"shares memory with {', '.join(sorted(paths))}" if paths else "has memory of its own"


def _worst(
    seen: Measurement, reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor | None
) -> Worst | None:
    if seen.worst < 0:
        return None
    index = tuple(int(step) for step in np.unravel_index(seen.worst, tuple(reference.shape)))
    sides = (reference, candidate, truth)
    values = [None if side is None else _scalar(side.detach()[index].item()) for side in sides]
    return Worst(index=index, reference=values[0], candidate=values[1], truth=values[2])


def _scalar(value: bool | int | float | complex) -> Scalar:
    return str(value) if isinstance(value, complex) else value
