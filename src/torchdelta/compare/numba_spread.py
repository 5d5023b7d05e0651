"""The loop of `spread`, compiled: one read of both buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Found = tuple[float, int, int, int]

_compile = cast(Callable[[Any], Any], numba.njit(nogil=True, cache=True, error_model="numpy"))
_compile_lanes = cast(
    Callable[[Any], Any],
    numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}),
)


def scan(truth: torch.Tensor, run: torch.Tensor, length: int, mask: float, squares: Array) -> Found:
    """As `spread.scan_with_torch`."""
    if run.dtype == torch.bfloat16:
        found = _scan_bfloat16(truth.numpy(), run.view(torch.int16).numpy(), length, mask, squares)
    else:
        found = _scan(truth.numpy(), run.numpy(), length, mask, squares)
    return cast(Found, found)


@_compile
def _scan(truth: Array, run: Array, length: int, mask: float, squares: Array) -> Found:
    state = np.zeros(4)
    state[1] = -1.0
    for block in range(squares.size):
        start = block * length
        _scan_block(truth[start : start + length], run[start : start + length], start, mask, squares, block, state)
    return state[0], int(state[1]), int(state[2]), int(state[3])


@_compile
def _scan_bfloat16(truth: Array, run: Array, length: int, mask: float, squares: Array) -> Found:
    """As `_scan`: a bfloat16 is the upper half of the float32 of the same value."""
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
    square, largest, highest = _sums(truth, run)
    # a value that is not finite shows in the sum of squares, a mask constant in the largest truth
    if not np.isfinite(square) or highest > mask:
        square, largest = _sums_with_care(truth, run, mask, state)
    squares[block] = square / truth.size
    if largest > state[0]:
        state[0] = largest
        for i in range(truth.size):
            if abs(np.float64(run[i]) - truth[i]) == largest and abs(truth[i]) <= mask:
                state[1] = start + i
                break


@_compile_lanes
def _sums(truth: Array, run: Array) -> tuple[float, float, float]:
    square = 0.0
    largest = 0.0
    highest = 0.0
    for i in range(truth.size):
        error = abs(np.float64(run[i]) - truth[i])
        square += error * error
        largest = error if error > largest else largest
        size = abs(truth[i])
        highest = size if size > highest else highest
    return square, largest, highest


@_compile
def _sums_with_care(truth: Array, run: Array, mask: float, state: Array) -> tuple[float, float]:
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
