"""What a tensor promises besides its values: dtype, shape, device, requires_grad, strides."""

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
        """Tell whether a breach of this clause is only reported."""
        if clause == "aliasing" and self.lowered_to is not None:
            return True  # a cast to another dtype is a copy, where one to the same dtype is none
        return clause in self.ignore or (clause in STRICT and clause not in self.strict)

    def breach(self, clause: str, reference: object, candidate: object) -> Breach:
        """Return the breach of a clause that these terms may excuse."""
        return Breach(clause=clause, reference=str(reference), candidate=str(candidate), excused=self.excuses(clause))

    def breach_of_dtype(self, reference: torch.dtype, candidate: torch.dtype) -> Breach:
        """Return the breach of a dtype, excused where the transform lowers precision on purpose."""
        return Breach(
            clause="dtype",
            reference=tensors.dtype_name(reference),
            candidate=tensors.dtype_name(candidate),
            excused=self.excuses("dtype") or (candidate == self.lowered_to and reference.is_floating_point),
        )


def breaches(reference: torch.Tensor, candidate: torch.Tensor, terms: Terms) -> tuple[Breach, ...]:
    """Return every clause that the candidate breaks, excused ones included."""
    found = []
    if reference.dtype != candidate.dtype:
        found.append(terms.breach_of_dtype(reference.dtype, candidate.dtype))
    if reference.shape != candidate.shape:
        found.append(terms.breach("shape", tuple(reference.shape), tuple(candidate.shape)))
    elif reference.stride() != candidate.stride() and _steps(reference) != _steps(candidate):
        found.append(terms.breach("stride", reference.stride(), candidate.stride()))
    if reference.device != candidate.device:
        found.append(terms.breach("device", reference.device, candidate.device))
    if reference.requires_grad != candidate.requires_grad:
        found.append(terms.breach("requires_grad", reference.requires_grad, candidate.requires_grad))
    return tuple(found)


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    # the stride of a dimension with fewer than two elements is never stepped along: any number there means the same
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
