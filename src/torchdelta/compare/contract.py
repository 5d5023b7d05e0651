"""The contract of a tensor: dtype, shape, device, requires_grad and strides, besides its values.

`breaches` returns the clauses that a candidate breaks; `Terms` say which of them a case excuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchdelta._torch import tensors
from torchdelta.records.case import STRICT
from torchdelta.records.comparison import Breach


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Which clauses are relaxed or held strictly, and which dtype changes are the transform's purpose."""

    ignore: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()
    lowered_to: torch.dtype | None = None
    """Floating-point leaves of the candidate may have this dtype: the transform lowers precision on purpose."""

    def excuses(self, clause: str) -> bool:
        """Tell whether a breach of this clause is only reported, and does not make a candidate diverge.

        So are clauses in `ignore`, `casts` and `stride` unless they are in `strict`, and `aliasing` if precision is
        lowered.
        """
        if clause == "aliasing" and self.lowered_to is not None:
            return True  # a cast to another dtype copies, and a cast to the same dtype does not
        return clause in self.ignore or (clause in STRICT and clause not in self.strict)

    def breach(self, clause: str, reference: object, candidate: object) -> Breach:
        """Return the breach of a clause, excused if these terms excuse it."""
        return Breach(clause=clause, reference=str(reference), candidate=str(candidate), excused=self.excuses(clause))

    def breach_of_dtype(self, reference: torch.dtype, candidate: torch.dtype) -> Breach:
        """Return the breach of the clause `dtype`, for a candidate whose dtype differs from the reference's.

        It is excused if the terms excuse every difference of dtypes, or if the reference is floating-point and the
        candidate has the dtype `lowered_to`.
        """
        return Breach(
            clause="dtype",
            reference=tensors.dtype_name(reference),
            candidate=tensors.dtype_name(candidate),
            excused=self.excuses("dtype") or (candidate == self.lowered_to and reference.is_floating_point),
        )


def breaches(reference: torch.Tensor, candidate: torch.Tensor, terms: Terms) -> tuple[Breach, ...]:
    """Return a breach for each of dtype, shape, stride, device and requires_grad that differs, excused ones included.

    Strides are compared only if the shapes agree, and only in dimensions of two or more elements, because other strides
    have no effect. The tuple is empty if nothing differs.
    """
    broken = []
    if reference.dtype != candidate.dtype:
        broken.append(terms.breach_of_dtype(reference.dtype, candidate.dtype))
    if reference.shape != candidate.shape:
        broken.append(terms.breach("shape", tuple(reference.shape), tuple(candidate.shape)))
    elif reference.stride() != candidate.stride() and _used_strides(reference) != _used_strides(candidate):
        broken.append(terms.breach("stride", reference.stride(), candidate.stride()))
    if reference.device != candidate.device:
        broken.append(terms.breach("device", reference.device, candidate.device))
    if reference.requires_grad != candidate.requires_grad:
        broken.append(terms.breach("requires_grad", reference.requires_grad, candidate.requires_grad))
    return tuple(broken)


def _used_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the dimensions with two or more elements; none for a tensor without elements."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
