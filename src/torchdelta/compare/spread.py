"""The distances of a run from the truth, block by block: a block shows an error that a norm of the whole tensor hides.

A block is a run of trailing dimensions with at least `_ENOUGH` elements, so that its mean square is an estimate and not
one draw. Elements that are not finite on both sides, and mask constants, have no distance; they are counted. Start with
`spread`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchdelta.compare import kernels

Array = npt.NDArray[np.float64]

MASK = 1e30
"""A value beyond this among smaller ones is a mask constant, and says nothing about their scale."""

_ENOUGH = 32
_SPAN = 2**20
_SAMPLED = 2**14
_NATIVE = (torch.float64, torch.float32, torch.bfloat16)


class Spread(NamedTuple):
    """The distances of one run from the truth."""

    squares: Array
    """The mean square of run − truth, by block."""
    peak: float
    at: int
    """The flat index of the largest distance; −1 without any."""
    skipped: int
    """Elements that are not finite in the run or in the truth."""
    masked: int
    """Elements where the truth is a mask constant."""

    @property
    def rms(self) -> float:
        """The root mean square over the whole tensor; the peak where squares are more than float64 can hold."""
        mean = float(self.squares.mean())
        return math.sqrt(mean) if math.isfinite(mean) else self.peak


def block_length(shape: torch.Size) -> int:
    """Return how many elements a block of a tensor of this shape has: trailing dimensions until there are `_ENOUGH`.

    A tensor with fewer elements is one block.
    """
    length = 1
    for size in reversed(shape):
        if length >= _ENOUGH:
            break
        length *= size
    return length


def spread(truth: torch.Tensor, run: torch.Tensor, mask: float = MASK) -> Spread:
    """Return the distances of a run from the truth: mean squares by block, the largest with its index, and two counts.

    The counts are those of elements that are NaN or infinite on at least one side, and of other elements at which
    |truth| is beyond `mask`; all of these have a distance of zero. Of complex tensors the components are elements.
    ValueError if the shapes differ or only one of both is complex.
    """
    if truth.shape != run.shape or truth.is_complex() != run.is_complex():
        raise ValueError(
            f"a run of {run.dtype} {tuple(run.shape)} does not lie around a truth of {truth.dtype} {tuple(truth.shape)}"
        )
    flat_truth, flat_run, length = _flat(truth).double(), _flat(run), _length(truth)
    squares = np.zeros(max(flat_truth.numel() // max(length, 1), 1))
    if not flat_truth.numel():
        return Spread(squares, 0.0, -1, 0, 0)
    scan = _scan(flat_truth.numel())
    step = max(_SPAN // length, 1)

    def scan_blocks(start: int) -> tuple[float, int, int, int]:
        elements = slice(start * length, (start + step) * length)
        peak, at, skipped, masked = scan(
            flat_truth[elements], flat_run[elements], length, mask, squares[start : start + step]
        )
        return peak, at + start * length, skipped, masked

    starts = range(0, squares.size, step)
    if len(starts) == 1:
        scans = [scan_blocks(0)]
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            scans = list(pool.map(scan_blocks, starts))
    peak, at = max((peak, -at) for peak, at, _, _ in scans)
    skipped, masked = (sum(numbers) for numbers in zip(*(rest for _, _, *rest in scans), strict=True))
    return Spread(squares, peak, -at if peak else -1, skipped, masked)


def quartile_distance(truth: torch.Tensor, run: torch.Tensor) -> float:
    """Return the upper quartile of |run − truth| over finite elements at which the truth is not zero; 0 without any.

    Of many elements, about `_SAMPLED` that are evenly spread tell it. An element that jumps, because rounding decided
    a comparison or a `floor`, moves every mean, but not the quartile. The median would be too low: a noisy run leaves
    half of its elements as they are.
    """
    flat_truth, flat_run = _flat(truth), _flat(run)
    every = slice(None, None, max(flat_truth.numel() // _SAMPLED, 1))
    values = flat_truth[every].double()
    distances = (flat_run[every].double() - values).abs()[values != 0.0]
    finite = distances[distances.isfinite()].sort().values
    return float(finite[3 * finite.numel() // 4]) if finite.numel() else 0.0


def sizes(truth: torch.Tensor, mask: float = MASK) -> Spread:
    """Return the distances of the truth from zero: the mean squares of its blocks, and its largest |element|.

    Elements beyond `mask` and those that are not finite count as zero.
    """
    nothing = torch.zeros((), dtype=torch.complex64 if truth.is_complex() else torch.float32, device=truth.device)
    return spread(truth, nothing.expand(truth.shape), mask)


def lost_masks(truth: torch.Tensor, reference: torch.Tensor, candidate: torch.Tensor, floor: float = 0.0) -> int:
    """Return the number of values beyond `MASK` in the truth that differ between reference and candidate.

    Two values at the end of the dtype's range, beyond a quarter of its largest number, only need the same sign. Others
    have to agree up to 64 eps of their size, or `floor` if that is more; NaN equals NaN. Of complex tensors the
    components are values.
    """
    is_mask = _wide(truth).abs() > MASK
    ours, theirs = _wide(reference)[is_mask], _wide(candidate)[is_mask]
    end = torch.finfo(reference.dtype).max / 4
    at_end = (ours.abs() >= end) & (theirs.abs() >= end) & (ours.sign() == theirs.sign())
    same = (theirs - ours).abs() <= max(64 * torch.finfo(reference.dtype).eps, floor) * ours.abs()
    return int((~(at_end | same | (ours.isnan() & theirs.isnan()))).sum())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor in float64; a complex one as its components along a new last dimension."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _length(tensor: torch.Tensor) -> int:
    """Return how many flat elements a block of a tensor has; the components of a complex tensor are elements."""
    return block_length(tensor.shape) * (2 if tensor.is_complex() else 1)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as flat real numbers on the CPU, in float32 unless it is float64, float32 or bfloat16.

    Of a complex tensor these are its components.
    """
    real = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(real) if real.is_complex() else real
    real = real.cpu() if real.dtype in _NATIVE else real.float().cpu()
    return real.contiguous().view(-1)


Scan = Callable[[torch.Tensor, torch.Tensor, int, float, Array], tuple[float, int, int, int]]


def _scan(elements: int) -> Scan:
    """Return the function that scans tensors of so many elements: numba's, or torch's if numba is not loaded."""
    fused = kernels.compiled("numba_spread", elements)
    return scan_with_torch if fused is None else fused.scan


def scan_with_torch(
    truth: torch.Tensor, run: torch.Tensor, length: int, mask: float, squares: Array
) -> tuple[float, int, int, int]:
    """Write the mean square of run − truth in each block of `length` elements to `squares`; return four numbers.

    They are the largest distance, its index (0 if there is no distance), the number of elements that are NaN or
    infinite on at least one side, and the number of other elements at which |truth| is beyond `mask`. The elements of
    both counts have a distance of zero. Both tensors are flat.
    """
    wide = run.double()
    is_finite = truth.isfinite() & wide.isfinite()
    is_mask = is_finite & (truth.abs() > mask)
    error = (wide - truth).where(is_finite & ~is_mask, 0.0).abs()
    squares[:] = error.square().view(-1, length).mean(-1).numpy()
    at = int(error.argmax())
    return float(error[at]), at, int((~is_finite).sum()), int(is_mask.sum())
