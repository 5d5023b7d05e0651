"""The distances of a run from the truth, block by block: a block shows an error that a norm of the whole tensor hides.

A block is a run of trailing dimensions with at least `_ENOUGH` elements, so that its mean square is an estimate and not
one draw. Elements that are not finite on both sides, and mask constants, have no distance; they are counted. Start with
`spreads`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
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
_SPAN = 2**22
"""Elements that one thread scans, for all runs."""
_TILE = 2**16
"""Elements of the truth that stay in the cache while they are compared with one run after the other."""
_SAMPLED = 2**14
_NATIVE = (torch.float64, torch.float32, torch.bfloat16)


_Scanned = tuple[float, int, int, int]
"""The largest distance, its flat index, and how many elements are not finite, and masked."""


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
    """Return the distances of one run from the truth, as `spreads` does."""
    return spreads(truth, (run,), mask)[0]


def sizes(truth: torch.Tensor, mask: float = MASK) -> Spread:
    """Return the distances of the truth from zero: the mean squares of its blocks, and its largest |element|.

    Elements beyond `mask` and those that are not finite count as zero.
    """
    return spreads(truth, (None,), mask)[0]


def spreads(truth: torch.Tensor, runs: Sequence[torch.Tensor | None], mask: float = MASK) -> list[Spread]:
    """Return the distances of each run from the truth: mean squares by block, the largest with its index, two counts.

    None is a run of zeros. The counts are those of elements that are NaN or infinite on at least one side, and of other
    elements at which |truth| is beyond `mask`; all of these have a distance of zero. Of complex tensors the components
    are elements. ValueError if the shapes differ or only one of both is complex.
    """
    for run in runs:
        if run is not None and (truth.shape != run.shape or truth.is_complex() != run.is_complex()):
            raise ValueError(
                f"a run of {run.dtype} {tuple(run.shape)} does not lie around a truth of {truth.dtype} "
                f"{tuple(truth.shape)}"
            )
    flat_truth, length = _flat(truth).double(), _length(truth)
    flat_runs = [None if run is None else _flat(run) for run in runs]
    squares = [np.zeros(max(flat_truth.numel() // max(length, 1), 1)) for _ in runs]
    if not flat_truth.numel():
        return [Spread(of_run, 0.0, -1, 0, 0) for of_run in squares]
    scan = _scan(flat_truth.numel())
    tile = max(_TILE // length, 1)
    zeros = torch.zeros(min(tile * length, flat_truth.numel()), dtype=torch.float32, device="cpu")

    def scan_blocks(blocks: range) -> list[list[_Scanned]]:
        """Write the mean squares of these blocks to `squares`; return, for each run, the results of its tiles.

        All runs are scanned a tile at a time, so that the truth is read from memory once.
        """
        scanned: list[list[_Scanned]] = [[] for _ in runs]
        for start in blocks[::tile]:
            stop = min(start + tile, blocks.stop)
            first, end = start * length, stop * length
            part = flat_truth[first:end]
            for run, of_run, results in zip(flat_runs, squares, scanned, strict=True):
                elements = zeros[: end - first] if run is None else run[first:end]
                peak, at, skipped, masked = scan(part, elements, length, mask, of_run[start:stop])
                results.append((peak, at + first, skipped, masked))
        return scanned

    every = range(squares[0].size)
    step = max(_SPAN // length, 1)
    spans = [every[start : start + step] for start in every[::step]]
    if len(spans) == 1:
        scans = [scan_blocks(every)]
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            scans = list(pool.map(scan_blocks, spans))
    of_runs = (itertools.chain(*of_run) for of_run in zip(*scans, strict=True))
    return [_joined(of_run, list(scanned)) for of_run, scanned in zip(squares, of_runs, strict=True)]


def _joined(squares: Array, scanned: Sequence[_Scanned]) -> Spread:
    """Return the spread of a run from the results of its scans; of two largest distances the first counts."""
    peak, at = max((peak, -at) for peak, at, _, _ in scanned)
    skipped, masked = (sum(numbers) for numbers in zip(*(rest for _, _, *rest in scanned), strict=True))
    return Spread(squares, peak, -at if peak else -1, skipped, masked)


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether no element of a tensor of floats is NaN or infinite."""
    flat = _flat(tensor)
    return not flat.numel() or all(math.isfinite(float(end)) for end in torch.aminmax(flat))


def quartile_distances(truth: torch.Tensor, runs: Iterable[torch.Tensor]) -> list[float]:
    """Return, for each run, the upper quartile of |run − truth| over finite elements at which the truth is not zero.

    Without any such element it is 0. Of many elements, about `_SAMPLED` that are evenly spread tell it. An element that
    jumps, because rounding decided a comparison or a `floor`, moves every mean, but not the quartile. The median would
    be too low: a noisy run leaves half of its elements as they are.
    """
    flat_truth = _flat(truth)
    every = slice(None, None, max(flat_truth.numel() // _SAMPLED, 1))
    values = flat_truth[every].double()
    counts = (values != 0.0).numpy()
    return [_quartile((_flat(run)[every].double() - values).abs().numpy()[counts]) for run in runs]


def _quartile(distances: Array) -> float:
    """Return the upper quartile of the finite distances, or 0 without any."""
    finite = distances[np.isfinite(distances)]
    place = 3 * finite.size // 4
    return float(np.partition(finite, place)[place]) if finite.size else 0.0


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
