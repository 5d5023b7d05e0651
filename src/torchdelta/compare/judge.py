"""Hold every leaf of one value against its partner in the other: contract first, then values, each with evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.compare.contract import Terms, breaches
from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import Leaves, Pair, align
from torchdelta.compare.objects import as_tensor, compare_alone, compare_objects, is_same_class
from torchdelta.compare.policy import Judgement, Policy, Sample, default_tolerance
from torchdelta.records.comparison import Breach, Comparison, Measurement, Scalar, Unmatched, Worst
from torchdelta.records.verdict import Verdict

Aliases = Mapping[str, frozenset[str]]
"""Which other values share memory with the leaf at a path."""
_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A policy and the terms of the contract: the same for every leaf of a case."""

    policy: Policy
    terms: Terms = field(default_factory=Terms)
    is_stepped: bool = False
    """Whether an optimizer made what is compared."""

    def compare(
        self,
        reference: Leaves,
        candidate: Leaves,
        truth: Leaves | None = None,
        aliases: tuple[Aliases, Aliases] = ({}, {}),
        noisy: Sequence[Leaves] = (),
    ) -> tuple[list[Comparison], list[Unmatched]]:
        """Compare two values leaf by leaf; a leaf without a partner is a comparison that diverged, and is named."""
        pairs, unmatched = align(reference, candidate, truth, noisy)
        comparisons = [self._compare_pair(pair, aliases) for pair in pairs]
        comparisons += [compare_alone(leaf) for leaf in unmatched]
        return comparisons, unmatched

    def _compare_pair(self, pair: Pair, aliases: tuple[Aliases, Aliases]) -> Comparison:
        reference, candidate = as_tensor(pair.reference), as_tensor(pair.candidate)
        if reference is None or candidate is None or not is_same_class(pair.reference, pair.candidate):
            return compare_objects(pair, self.terms)
        broken = breaches(reference, candidate, self.terms)
        sample = None
        if broken and any(breach.clause == "shape" for breach in broken):
            judged = Judgement(verdict=Verdict.INCONCLUSIVE, reason="elements of two shapes make no pairs")
        elif not (tensors.has_values(reference) and tensors.has_values(candidate)):
            judged = Judgement(verdict=Verdict.INCONCLUSIVE, reason="a tensor without values cannot be compared")
        elif reference is candidate:
            judged = _UNTOUCHED
        else:
            sample = self._sample(reference, candidate, as_tensor(pair.truth), pair.noisy)
            judged = self._judge(sample)
        contract = broken + self._aliasing(pair.path, aliases) + judged.breaches
        verdict, reason = judged.verdict, judged.reason
        if contract and verdict is not Verdict.DIVERGED:
            decisive = [str(breach) for breach in contract if not breach.excused]
            verdict, reason = (Verdict.DIVERGED, "; ".join(decisive)) if decisive else (verdict, reason)
        return Comparison(
            path=pair.path,
            verdict=verdict,
            reason=reason,
            dtype=tensors.dtype_name(reference.dtype),
            shape=tuple(reference.shape),
            contract=contract,
            error=judged.error,
            noise=judged.noise,
            allowed=judged.allowed,
            resolution=judged.resolution,
            worst=sample.worst if sample else None,
            measurement=sample.measurement if sample else None,
            details=judged.details or {},
        )

    def _sample(
        self, reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor | None, noisy: tuple[Any, ...]
    ) -> Sample:
        reference, candidate = tensors.resolve(reference), tensors.resolve(candidate)
        truth = tensors.resolve(truth) if truth is not None and _is_like(truth, reference) else None
        rtol, atol = self.policy.rtol, self.policy.atol
        if rtol is None or atol is None:
            rtol, atol = default_tolerance(reference.dtype, candidate.dtype)
        seen = measure(reference, candidate, rtol=rtol, atol=atol)
        return Sample(
            reference=reference,
            candidate=candidate,
            truth=truth,
            measurement=seen,
            worst=_worst(seen, reference, candidate, truth),
            rtol=rtol,
            atol=atol,
            lowered_to=self.terms.lowered_to,
            noisy=tuple(
                tensors.resolve(run) for run in noisy if isinstance(run, torch.Tensor) and _is_like(run, reference)
            ),
            is_stepped=self.is_stepped,
        )

    def _judge(self, sample: Sample) -> Judgement:
        are_inexact = is_inexact(sample.reference.dtype) and is_inexact(sample.candidate.dtype)
        if are_inexact or self.policy.judges_integers:
            return self.policy.judge(sample)
        return self._judge_exact(sample.measurement)

    def _judge_exact(self, seen: Measurement) -> Judgement:
        verdict, reason = Verdict.EQUIVALENT, "identical"
        broken: tuple[Breach, ...] = ()
        if seen.mismatches:
            verdict = Verdict.DIVERGED
            reason = f"{seen.mismatches} of {seen.numel} elements differ, and integers have no rounding noise"
            if self.terms.excuses("integers"):
                broken = (self.terms.breach("integers", "exact", reason),)
                verdict, reason = Verdict.EQUIVALENT, f"ignored: {reason}"
        return Judgement(
            verdict=verdict, reason=reason, error=seen.max_abs, allowed=0.0, resolution=0.0, breaches=broken
        )

    def _aliasing(self, path: str, aliases: tuple[Aliases, Aliases]) -> tuple[Breach, ...]:
        of_reference, of_candidate = aliases[0].get(path, _NOBODY), aliases[1].get(path, _NOBODY)
        if of_reference == of_candidate:
            return ()
        return (self.terms.breach("aliasing", _partners(of_reference), _partners(of_candidate)),)


_UNTOUCHED = Judgement(
    verdict=Verdict.EQUIVALENT, reason="left as it was on both sides", error=0.0, allowed=0.0, resolution=0.0
)


def is_inexact(dtype: torch.dtype) -> bool:
    """Tell whether values of the dtype are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def _is_like(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    return tensor.shape == reference.shape and tensors.has_values(tensor)


def _partners(paths: frozenset[str]) -> str:
    return f"shares memory with {', '.join(sorted(paths))}" if paths else "has memory of its own"


def _worst(
    seen: Measurement, reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor | None
) -> Worst | None:
    if seen.worst < 0:
        return None
    index = _unravel(seen.worst, reference.shape)
    return Worst(
        index=index,
        reference=_scalar(reference, index),
        candidate=_scalar(candidate, index),
        truth=_scalar(truth, index) if truth is not None else None,
    )


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: tuple[int, ...] = ()
    for size in reversed(shape):
        flat, step = divmod(flat, size)
        index = (step, *index)
    return index


def _scalar(tensor: torch.Tensor, index: tuple[int, ...]) -> Scalar:
    value = tensors.element(tensor, index)
    return str(value) if isinstance(value, complex) else value
