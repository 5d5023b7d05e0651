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
    square, larger, masked = _sums(truth, run, state[0], mask)
    largest = np.inf if larger else 0.0
    # NaN and Inf show in the sum of squares
    if masked or not np.isfinite(square):
        square, largest = _sums_of_finite(truth, run, mask, state)
    squares[block] = square / truth.size
    if largest > state[0]:
        _find_largest(truth, run, start, mask, state)


@_compile_sums
def _sums(truth: Array, run: Array, peak: float, mask: float) -> tuple[float, int, int]:
    """Return the sum of squared errors of a block, and how many errors exceed `peak` and how many truths `mask`.

    With NaN or Inf in the block the sum is not finite.
    """
    square = 0.0
    larger = 0
    masked = 0
    # to count what is larger than a number is faster than to find the largest
    for i in range(truth.size):
        error = abs(np.float64(run[i]) - truth[i])
        square += error * error
        larger += int(error > peak)
        masked += int(abs(truth[i]) > mask)
    return square, larger, masked


@_compile
def _find_largest(truth: Array, run: Array, start: int, mask: float, state: Array) -> None:
    """Write the largest error of a block and its index to `state`, if it is larger than the one in there.

    Elements that are not finite, or whose |truth| exceeds `mask`, do not count. `start` is the index of the block's
    first element.
    """
    for i in range(truth.size):
        value = np.float64(run[i])
        error = abs(value - truth[i])
        if error > state[0] and np.isfinite(value) and np.isfinite(truth[i]) and abs(truth[i]) <= mask:
            state[0] = error
            state[1] = start + i


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
