"""The inner loops of noisy runs on float32, compiled by numba, so that each buffer is read once.

`exactness.py` and `noisy.py` do the same with torch operators, for other dtypes and small tensors. Start with
`step_beside`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_compile = cast(Callable[[Any], Any], numba.njit(nogil=True, cache=True, error_model="numpy"))
_LARGEST = np.float32(np.finfo(np.float32).max)


@_compile
def step(values: Array, factors: Array) -> None:
    """Multiply flat values by their factors in place, except those that would become infinite."""
    for i in range(values.size):
        moved = values[i] * factors[i]
        if abs(moved) <= _LARGEST:
            values[i] = moved


@_compile
def step_beside(values: Array, wide: Array, factors: Array) -> None:
    """Multiply flat values by their factors in place where they differ from their float64 values `wide`.

    A value that would become infinite stays as it is.
    """
    for i in range(values.size):
        if np.float64(values[i]) != wide[i]:
            moved = values[i] * factors[i]
            if abs(moved) <= _LARGEST:
                values[i] = moved


@_compile
def has_short_row(bits: Array, digits: int) -> bool:
    """Tell whether there is a row of floats, not all zero, in which no element has a bit of the mask `digits`.

    `bits` has the bits of the floats as integers, in three dimensions; a row lies along the last.
    """
    for batch in range(bits.shape[0]):
        for row in range(bits.shape[1]):
            is_zero = True
            is_short = True
            for i in range(bits.shape[2]):
                if bits[batch, row, i] & digits:
                    is_short = False
                    break
                if bits[batch, row, i] & 0x7FFFFFFF:
                    is_zero = False
            if is_short and not is_zero:
                return True
    return False
