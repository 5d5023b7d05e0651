"""Measure two tensors with plain torch operators, piece by piece, on any device.

A piece is a run of elements in flat order, small enough that its temporary copies take little memory. The measurements
of neighbouring pieces are joined into one. `numba_measure` computes the same numbers faster on the CPU.

Start with `measure_span`, then `_measure_piece`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchdelta.records.comparison import Measurement

CPU_PIECE = 2**14
"""Elements of a piece on the CPU, whose copies stay in the L2 cache. Above 2**15 elements torch splits an operator over
OpenMP threads. They compete with our own threads for the cores, and a forked child does not have them, so that its main
thread would hang or abort."""
_DEVICE_PIECE = 2**18
"""Elements of a piece on other devices: some 15 float64 copies of it stay under 64 MB."""
_LOWEST = -(2**63)
Index = tuple[int | slice, ...]


def measure_span(reference: torch.Tensor, candidate: torch.Tensor, rtol: float, atol: float) -> Measurement:
    """Return the measurement of two tensors of the same shape, which have elements.

    Only `beyond` depends on `rtol` and `atol`. Of complex tensors the components are elements, and `worst` is the flat
    index of a component.
    """
    by_value = not has_ulps(reference, candidate)
    measurements = (_measure_piece(*piece, by_value, rtol, atol) for piece in paired_pieces(reference, candidate))
    return functools.reduce(join, measurements)


def has_ulps(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Tell whether elements are compared by bits too: both tensors have the same floating-point or complex dtype."""
    return reference.dtype == candidate.dtype and (reference.is_floating_point() or reference.is_complex())


def join(first: Measurement, second: Measurement) -> Measurement:
    """Return the measurement of two neighbouring pieces together; `first` comes before `second` in flat order.

    The worst element is the first misplaced one, or that of the largest difference if none is misplaced; its index
    counts from the start of `first`. `max_ulp` is None if either piece has none.
    """
    if first.misplaced or (not second.misplaced and first.max_abs >= second.max_abs):
        worst = first.worst
    else:
        worst = first.numel + second.worst
    return Measurement(
        numel=first.numel + second.numel,
        finite=first.finite + second.finite,
        mismatches=first.mismatches + second.mismatches,
        misplaced=first.misplaced + second.misplaced,
        nan_reference=first.nan_reference + second.nan_reference,
        nan_candidate=first.nan_candidate + second.nan_candidate,
        inf_reference=first.inf_reference + second.inf_reference,
        inf_candidate=first.inf_candidate + second.inf_candidate,
        max_abs=max(first.max_abs, second.max_abs),
        max_rel=max(first.max_rel, second.max_rel),
        square_error=first.square_error + second.square_error,
        square_reference=first.square_reference + second.square_reference,
        square_candidate=first.square_candidate + second.square_candidate,
        dot=first.dot + second.dot,
        max_ulp=None if first.max_ulp is None or second.max_ulp is None else max(first.max_ulp, second.max_ulp),
        beyond=first.beyond + second.beyond,
        worst=worst,
    )


def paired_pieces(reference: torch.Tensor, candidate: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (reference, candidate) pairs of contiguous real pieces, in flat order, on the device that measures them.

    If one of both tensors is complex, both pieces have the real and imaginary components along a new last dimension.
    """
    # MPS has no float64, which all sums need
    device = torch.device("cpu") if reference.device.type == "mps" else reference.device
    as_complex = reference.is_complex() or candidate.is_complex()
    if reference.is_contiguous() and candidate.is_contiguous():
        reference, candidate = reference.view(-1), candidate.view(-1)
    for index in pieces(reference.shape, CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE):
        yield _real(reference[index].to(device), as_complex), _real(candidate[index].to(device), as_complex)


def pieces(shape: torch.Size, limit: int) -> Iterator[Index]:
    """Yield indices that cut a tensor of this shape into runs of at most `limit` elements, in flat order.

    The only index is `()`, the whole tensor, if it has no more elements than that.
    """
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield ()
        return
    axis -= 1
    step = limit // inner
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, start + step))


def _real(tensor: torch.Tensor, as_complex: bool) -> torch.Tensor:
    """Return the tensor as contiguous real numbers; a complex one with its two components along a new last dimension.

    With `as_complex` a real tensor gets that dimension too, with zeros as the second component, and floats become
    float64. Otherwise a contiguous real tensor is returned itself.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    elif as_complex:
        if tensor.is_floating_point():
            tensor = tensor.double()  # not every float has a zero: float8_e8m0fnu has none
        return torch.stack((tensor, torch.zeros_like(tensor)), dim=-1)
    return tensor.contiguous()


def _measure_piece(
    reference: torch.Tensor, candidate: torch.Tensor, by_value: bool, rtol: float, atol: float
) -> Measurement:
    """Return the measurement of two real tensors of one shape; without `by_value` their bits are compared too.

    With `by_value` elements mismatch if their values differ, and `max_ulp` is None. Elements that are NaN or infinite
    on at least one side are left out of the sums and of the largest errors; those that disagree count as misplaced and
    as beyond the tolerance.
    """
    r, r_rest = _as_float64(reference)
    c, c_rest = _as_float64(candidate)
    r_nan, c_nan, r_inf, c_inf = r.isnan(), c.isnan(), r.isinf(), c.isinf()
    finite = r.isfinite() & c.isfinite()
    misplaced = (r_nan != c_nan) | ((r_inf | c_inf) & (r != c))
    error = ((c - r) + (c_rest - r_rest)).where(finite, 0.0)
    r, c = (r + r_rest).where(finite, 0.0), (c + c_rest).where(finite, 0.0)
    distance, size = error.abs(), r.abs()
    if by_value:
        differs = (distance > 0.0) | misplaced
        ulps = torch.full_like(r, _LOWEST, dtype=torch.int64)
    else:
        is_number = ~(r_nan | c_nan)
        differs = (is_number & (_bits(reference) != _bits(candidate))) | (r_nan != c_nan)
        ulps = _lowered_ulps(reference, candidate).where(is_number, _LOWEST)
    beyond = ~(distance <= atol + rtol * size) | misplaced
    ratio = (distance / size).where(distance > 0.0, 0.0)
    integers = _fetch(
        {
            "finite": finite.sum(),
            "mismatches": differs.sum(),
            "misplaced": misplaced.sum(),
            "nan_reference": r_nan.sum(),
            "nan_candidate": c_nan.sum(),
            "inf_reference": r_inf.sum(),
            "inf_candidate": c_inf.sum(),
            "beyond": beyond.sum(),
            "max_ulp": ulps.max(),
            "worst": torch.where(misplaced.any(), misplaced.to(torch.uint8).argmax(), distance.argmax()),
        }
    )
    floats = _fetch(
        {
            "max_abs": distance.max(),
            "max_rel": ratio.max(),
            "square_error": error.square().sum(),
            "square_reference": r.square().sum(),
            "square_candidate": c.square().sum(),
            "dot": (r * c).sum(),
        }
    )
    integers["max_ulp"] = None if by_value else integers["max_ulp"] - _LOWEST
    return Measurement(numel=reference.numel(), **integers, **floats)


def _fetch(numbers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return numbers of one dtype as Python numbers, copied from their device in one transfer."""
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def _as_float64(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return two float64 summands whose exact sum is the tensor, because float64 alone would round 64-bit integers.

    The first is a tensor. The second is the number 0.0 for every dtype but int64 and uint64.
    """
    if tensor.dtype == torch.int64:
        rest = tensor.fmod(2048)
        return (tensor - rest).double(), rest.double()
    if tensor.dtype == torch.uint64:
        # torch has no arithmetic on uint64, but its upper 53 bits and its lower 11 bits each fit in int64
        word = tensor.view(torch.int64)
        return ((word >> 11) & (2**53 - 1)).double() * 2048.0, (word & 2047).double()
    return tensor.double(), 0.0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats as int64: those of a signed integer of their size, except of float8_e8m0fnu."""
    if tensor.dtype == torch.float8_e8m0fnu:
        return tensor.view(torch.uint8).long()  # it has no sign
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).long()


def _lowered_ulps(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return the distances in representable numbers minus 2**63, because they fill an unsigned 64-bit integer."""
    magnitude = 2 ** (8 * reference.itemsize - 1) - 1
    ordinals = [bits.where(bits >= 0, -(bits & magnitude)) for bits in map(_bits, (reference, candidate))]
    return torch.maximum(*ordinals) - torch.minimum(*ordinals) + _LOWEST
