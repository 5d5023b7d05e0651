"""The inner loop of `spread`, compiled by numba, so that both buffers are read once.

`scan` returns the same as `spread.scan_with_torch`: the largest error of a run against the truth with its position, the
number of elements that are not finite or masked, and the mean square error of each block. Start with `_scan_block`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
ScanResult = tuple[float, int, int, int]
"""The largest error, its position (-1 if there is none), and how many elements are not finite, and masked."""

_compile = cast(Callable[[Any], Any], numba.njit(nogil=True, cache=True, error_model="numpy"))
_compile_sums = cast(
    Callable[[Any], Any],
    numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}),
)


def scan(truth: torch.Tensor, run: torch.Tensor, length: int, mask: float, squares: Array) -> ScanResult:
    """Write the mean square error of each block of `length` elements to `squares`; return a `ScanResult`.

    That is the largest |run − truth|, its index or -1 if there is no error, how many elements are not finite on at
    least one side, and for how many others |truth| exceeds `mask`. Elements of both counts have an error of zero. Both
    tensors are flat and on the CPU; the truth is float64, and the run float32, float64 or bfloat16.
    """
    if run.dtype == torch.bfloat16:
        result = _scan_bfloat16(truth.numpy(), run.view(torch.int16).numpy(), length, mask, squares)
    else:
        result = _scan(truth.numpy(), run.numpy(), length, mask, squares)
    return cast(ScanResult, result)


@_compile
def _scan(truth: Array, run: Array, length: int, mask: float, squares: Array) -> ScanResult:
    """Write the mean square error of each block to `squares`; return the `ScanResult` of the whole run, as `scan` does.

    The run is an array of float32 or float64.
    """
    state = np.zeros(4)
    state[1] = -1.0
    for block in range(squares.size):
        start = block * length
        _scan_block(truth[start : start + length], run[start : start + length], start, mask, squares, block, state)
    return state[0], int(state[1]), int(state[2]), int(state[3])


@_compile
def _scan_bfloat16(truth: Array, run: Array, length: int, mask: float, squares: Array) -> ScanResult:
    """Write the mean square error of each block to `squares`; return the `ScanResult` of the whole run, as `scan` does.

    The run is an array of bfloat16, given as int16: its bits are the upper half of a float32 with the same value.
    """
    state = np.zeros(4)
    state[1] = -1.0
    wide = np.empty(length, np.int32)
    values = wide.view(np.float32)
    for block in range(squares.size):
        start = block * length
        for i in range(length):
            wide[i] = np.int32(run[start + i]) << 16
        _scan_block(truth[start : start + length], values, start, mask, squares, block, state)
    return state[0], int(state[1]), int(state[2]), int(state[3])


@_compile
def _scan_block(truth: Array, run: Array, start: int, mask: float, squares: Array, block: int, state: Array) -> None:
    """Write the mean square error of one block to `squares[block]`, and update the `ScanResult` in `state`.

    `truth` and `run` are the elements of the block, and `start` is the index of the first one. Elements that are not
    finite on at least one side, or whose |truth| exceeds `mask`, count as errors of zero.
    """
    square, largest, largest_truth = _sums(truth, run)
    # NaN and Inf show in the sum of squares, a mask constant in the largest truth
    if not np.isfinite(square) or largest_truth > mask:
        square, largest = _sums_of_finite(truth, run, mask, state)
    squares[block] = square / truth.size
    if largest > state[0]:
        state[0] = largest
        for i in range(truth.size):
            if abs(np.float64(run[i]) - truth[i]) == largest and abs(truth[i]) <= mask:
                state[1] = start + i
                break


@_compile_sums
def _sums(truth: Array, run: Array) -> tuple[float, float, float]:
    """Return the sum of squared errors, the largest absolute error, and the largest absolute truth of a block.

    With NaN or Inf in the block the sum is not finite.
    """
    square = 0.0
    largest = 0.0
    largest_truth = 0.0
    for i in range(truth.size):
        error = abs(np.float64(run[i]) - truth[i])
        square += error * error
        largest = error if error > largest else largest
        size = abs(truth[i])
        largest_truth = size if size > largest_truth else largest_truth
    return square, largest, largest_truth


@_compile
def _sums_of_finite(truth: Array, run: Array, mask: float, state: Array) -> tuple[float, float]:
    """Return the sum of squared errors and the largest absolute error without elements that are not finite or masked.

    Those that are not finite on one side or both are counted in `state[2]`, and others whose |truth| exceeds `mask` in
    `state[3]`.
    """
    square = 0.0
    largest = 0.0
    for i in range(truth.size):
        value = np.float64(run[i])
        if not (np.isfinite(value) and np.isfinite(truth[i])):
            state[2] += 1
        elif abs(truth[i]) > mask:
            state[3] += 1
        else:
            error = abs(value - truth[i])
            square += error * error
            largest = max(largest, error)
    return square, largest
