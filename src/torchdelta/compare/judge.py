"""Compare two values leaf by leaf: the contract first, then the values, each with its evidence.

A `Judge` has a policy and the terms of the contract. It pairs the leaves by path, measures each pair once, and lets
the policy judge floating-point values; integers have to be equal. Start with `Judge.compare`.
"""

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
from torchdelta.compare.policy import IDENTICAL, Judgement, Policy, Sample, default_tolerance, largest_error
from torchdelta.records.comparison import Breach, Comparison, Measurement, Scalar, UnmatchedLeaf, Worst
from torchdelta.records.verdict import Verdict

Aliases = Mapping[str, frozenset[str]]
"""Which other values share memory with the leaf at a path."""
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A policy and the terms of the contract: the same for every leaf of a case."""

    policy: Policy
    terms: Terms = field(default_factory=Terms)
    is_stepped: bool = False
    """Whether the values come from optimizer steps."""
    measures_identical: bool = True
    """Whether tensors with the same bits and an unbroken contract are measured, and judged by the policy, too."""

    def compare(
        self,
        reference: Leaves,
        candidate: Leaves,
        truth: Leaves | None = None,
        aliases: tuple[Aliases, Aliases] = ({}, {}),
        noisy: Sequence[Leaves] = (),
    ) -> tuple[list[Comparison], list[UnmatchedLeaf]]:
        """Return the comparisons of the leaves, path by path, and the leaves that only one side has.

        A leaf without a partner has a comparison too, which is DIVERGED; two containers of one kind, with their keys in
        one order, have none. `truth` and `noisy` have the leaves of the float64 run and of the noisy runs, which may
        lack some. `aliases` says, for the reference and for the candidate, with which other values the leaf at a path
        shares memory; a difference is a breach.
        """
        pairs, unmatched = align(reference, candidate, truth, noisy)
        comparisons = [self._compare_pair(pair, aliases) for pair in pairs]
        comparisons += [compare_alone(leaf) for leaf in unmatched]
        return comparisons, unmatched

    def _compare_pair(self, pair: Pair, aliases: tuple[Aliases, Aliases]) -> Comparison:
        """Return the comparison of two leaves: of contract and values if both hold numbers, or else as objects.

        Leaves of different classes are compared as objects. Values are INCONCLUSIVE if the shapes differ or a side is a
        meta or fake tensor, and EQUIVALENT if both leaves are the same tensor, or need not be measured because they are
        identical. Otherwise the policy judges floats, and integers have to be equal unless the policy judges them too.
        A broken clause that the terms do not excuse makes it DIVERGED.
        """
        reference, candidate = as_tensor(pair.reference), as_tensor(pair.candidate)
        if reference is None or candidate is None or not is_same_class(pair.reference, pair.candidate):
            return compare_objects(pair, self.terms)
        broken = breaches(reference, candidate, self.terms)
        sample = None
        if broken and any(breach.clause == "shape" for breach in broken):
            judgement = Judgement(verdict=Verdict.INCONCLUSIVE, reason="elements of two shapes make no pairs")
        elif not (tensors.has_values(reference) and tensors.has_values(candidate)):
            judgement = Judgement(verdict=Verdict.INCONCLUSIVE, reason="a tensor without values cannot be compared")
        elif reference is candidate:
            judgement = _UNTOUCHED
        elif not (self.measures_identical or broken) and tensors.has_same_bits(reference, candidate):
            judgement = _UNMEASURED
        else:
            sample = self._sample(reference, candidate, as_tensor(pair.truth), pair.noisy)
            judgement = self._judge(sample)
        contract = broken + self._aliasing(pair.path, aliases) + judgement.breaches
        verdict, reason = judgement.verdict, judgement.reason
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
            error=judgement.error,
            noise=judgement.noise,
            allowed=judgement.allowed,
            resolution=judgement.resolution,
            worst=sample.worst if sample else None,
            measurement=sample.measurement if sample else None,
            details=judgement.details or {},
        )

    def _sample(
        self, reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor | None, noisy: tuple[Any, ...]
    ) -> Sample:
        """Measure two tensors; return them with the measurement, its worst element, their truth and their noisy runs.

        A truth or noisy run that has another shape than the reference, or no values, or is complex where the reference
        is real, is left out. The tolerances are the policy's, or torch.testing's for the two dtypes if one of the
        policy's is None.
        """
        reference, candidate = tensors.resolve(reference), tensors.resolve(candidate)
        truth = tensors.resolve(truth) if truth is not None and _is_like(truth, reference) else None
        rtol, atol = self.policy.rtol, self.policy.atol
        if rtol is None or atol is None:
            rtol, atol = default_tolerance(reference.dtype, candidate.dtype)
        measurement = measure(reference, candidate, rtol=rtol, atol=atol)
        return Sample(
            reference=reference,
            candidate=candidate,
            truth=truth,
            measurement=measurement,
            worst=_worst(measurement, reference, candidate, truth),
            rtol=rtol,
            atol=atol,
            lowered_to=self.terms.lowered_to,
            noisy=tuple(
                tensors.resolve(run) for run in map(as_tensor, noisy) if run is not None and _is_like(run, reference)
            ),
            is_stepped=self.is_stepped,
        )

    def _judge(self, sample: Sample) -> Judgement:
        """Return the policy's judgement if both are floats or the policy judges integers, or else `_judge_exact`'s.

        Under a policy that needs a truth, a real and a complex tensor that differ are INCONCLUSIVE.
        """
        are_inexact = is_inexact(sample.reference.dtype) and is_inexact(sample.candidate.dtype)
        are_apart = sample.reference.is_complex() != sample.candidate.is_complex()
        if are_inexact and are_apart and self.policy.needs_truth and sample.measurement.mismatches:
            return Judgement(
                verdict=Verdict.INCONCLUSIVE,
                reason="one side is real and the other complex, so they have no noise in common",
                error=largest_error(sample.measurement),
            )
        if are_inexact or self.policy.judges_integers:
            return self.policy.judge(sample)
        return self._judge_exact(sample.measurement)

    def _judge_exact(self, pair: Measurement) -> Judgement:
        """Return the judgement of two tensors that are not both floats: DIVERGED if an element differs, or EQUIVALENT.

        If the terms excuse the clause `integers`, a difference is EQUIVALENT too, and the judgement has the excused
        breach. The error is the largest difference.
        """
        verdict, reason = Verdict.EQUIVALENT, "identical"
        broken: tuple[Breach, ...] = ()
        if pair.mismatches:
            verdict = Verdict.DIVERGED
            reason = f"{pair.mismatches} of {pair.numel} elements differ, and integers have no rounding noise"
            if self.terms.excuses("integers"):
                broken = (self.terms.breach("integers", "exact", reason),)
                verdict, reason = Verdict.EQUIVALENT, f"ignored: {reason}"
        return Judgement(
            verdict=verdict, reason=reason, error=pair.max_abs, allowed=0.0, resolution=0.0, breaches=broken
        )

    def _aliasing(self, path: str, aliases: tuple[Aliases, Aliases]) -> tuple[Breach, ...]:
        """Return the breach of a leaf that shares memory with other values than in the reference, or an empty tuple.

        The terms may excuse it.
        """
        of_reference, of_candidate = aliases[0].get(path, _NONE), aliases[1].get(path, _NONE)
        if of_reference == of_candidate:
            return ()
        return (self.terms.breach("aliasing", _partners(of_reference), _partners(of_candidate)),)


_UNTOUCHED = Judgement(
    verdict=Verdict.EQUIVALENT, reason="left as it was on both sides", error=0.0, allowed=0.0, resolution=0.0
)

_UNMEASURED = _UNTOUCHED._replace(reason=IDENTICAL)


def is_inexact(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is floating-point or complex, so that its values are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def _is_like(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    """Tell whether a tensor has the reference's shape, is complex only if that is, and has values: it is not meta."""
    is_alike = tensor.shape == reference.shape and tensor.is_complex() == reference.is_complex()
    return is_alike and tensors.has_values(tensor)


def _partners(paths: frozenset[str]) -> str:
    """Return the words for with which of these paths a leaf shares memory; without any, that it has its own."""
    return f"shares memory with {', '.join(sorted(paths))}" if paths else "has memory of its own"


def _worst(
    measurement: Measurement, reference: torch.Tensor, candidate: torch.Tensor, truth: torch.Tensor | None
) -> Worst | None:
    """Return the index of the worst element and its values in reference, candidate and truth, or None if there is none.

    There is none in empty tensors. Without a truth its value there is None. Complex values are strings.
    """
    if measurement.worst < 0:
        return None
    index = _unravel(measurement.worst, reference.shape)
    return Worst(
        index=index,
        reference=_scalar(reference, index),
        candidate=_scalar(candidate, index),
        truth=_scalar(truth, index) if truth is not None else None,
    )


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """Return a flat index as one index for each dimension, outermost first."""
    index: tuple[int, ...] = ()
    for size in reversed(shape):
        flat, step = divmod(flat, size)
        index = (step, *index)
    return index


def _scalar(tensor: torch.Tensor, index: tuple[int, ...]) -> Scalar:
    """Return the element at an index as a Python number; a complex one as a text."""
    value = tensors.element(tensor, index)
    return str(value) if isinstance(value, complex) else value
