"""What a tensor promises besides its values: dtype, shape, device, requires_grad, strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchdelta._torch import tensors
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
        return clause in self.ignore or (clause == "stride" and "stride" not in self.strict)


def breaches(reference: torch.Tensor, candidate: torch.Tensor, terms: Terms) -> tuple[Breach, ...]:
    """Return every clause that the candidate breaks, excused ones included."""
    if reference is candidate:
        return ()
    return tuple(_breaches(reference, candidate, terms))


def _breaches(reference: torch.Tensor, candidate: torch.Tensor, terms: Terms) -> Iterator[Breach]:
    if reference.dtype != candidate.dtype:
        lowered = terms.lowered_to == candidate.dtype and reference.is_floating_point()
        yield Breach(
            clause="dtype",
            reference=tensors.dtype_name(reference),
            candidate=tensors.dtype_name(candidate),
            excused=lowered or terms.excuses("dtype"),
        )
    if reference.shape != candidate.shape:
        yield Breach(clause="shape", reference=str(tuple(reference.shape)), candidate=str(tuple(candidate.shape)))
    if reference.device != candidate.device:
        yield Breach(
            clause="device",
            reference=str(reference.device),
            candidate=str(candidate.device),
            excused=terms.excuses("device"),
        )
    if reference.requires_grad != candidate.requires_grad:
        yield Breach(
            clause="requires_grad",
            reference=str(reference.requires_grad),
            candidate=str(candidate.requires_grad),
            excused=terms.excuses("requires_grad"),
        )
    if reference.shape == candidate.shape and _strides(reference) != _strides(candidate):
        yield Breach(
            clause="stride",
            reference=str(reference.stride()),
            candidate=str(candidate.stride()),
            excused=terms.excuses("stride"),
        )


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    # the stride of a dimension with fewer than two elements is never stepped along: any number there means the same
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
