"""Hold every leaf of one value against its partner in the other: contract first, then values, each with evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        comparisons += [compare_alone(leaf) for leaf in unmatched]
        return comparisons, unmatched

    def _compare_pair(self, pair: Pair, aliases: tuple[Aliases, Aliases]) -> Comparison:
        reference, candidate = as_tensor(pair.reference), as_tensor(pair.candidate)
        if reference is None or candidate is None or not is_same_class(pair.reference, pair.candidate):
            return compare_objects(pair, self.terms)
        broken = (*breaches(reference, candidate, self.terms), *self._aliasing(pair.path, aliases))
        return self._compare_tensors(pair, reference, candidate, broken)

    def _compare_tensors(
        self, pair: Pair, reference: torch.Tensor, candidate: torch.Tensor, broken: tuple[Breach, ...]
    ) -> Comparison:
        seen = worst = None
        if reference.shape != candidate.shape:
            judged = Judgement(verdict=Verdict.DIVERGED, reason="there are no pairs of elements to compare")
        elif not (tensors.has_own_buffer(reference) and tensors.has_own_buffer(candidate)):
            judged = Judgement(verdict=Verdict.INCONCLUSIVE, reason="a tensor without values cannot be compared")
        elif pair.reference is pair.candidate:
            judged = Judgement(
                verdict=Verdict.EQUIVALENT, reason="the same tensor on both sides", error=0.0, allowed=0.0, resolution=0.0
            )
        else:
            truth = _usable_truth(pair, reference)
            rtol, atol = self._tolerance(reference, candidate)
            seen = measure(reference, candidate, rtol=rtol, atol=atol)
            worst, at_worst = _worst(seen, reference, candidate, truth)
            if is_inexact(reference.dtype) and is_inexact(candidate.dtype):
                judged = self.policy.judge(
                    Sample(
                        reference=reference,
                        candidate=candidate,
                        truth=truth,
                        measurement=seen,
                        rtol=rtol,
                        atol=atol,
                        lowered_to=self.terms.lowered_to,
                    )
                )
            ...
