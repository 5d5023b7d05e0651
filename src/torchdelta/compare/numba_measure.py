"""Measure two CPU tensors in one pass over their memory, with loops that numba compiles.

The tensors are read in blocks that stay in the cache, so that a second look at a block is cheap. A common block is
finite and has no larger error than the blocks before. It costs two or three loops without branches, which the compiler
vectorises. Rare cases take a second look: a block with NaN or Inf is cleaned and summed again, and a block with a new
largest error is searched for it.

Numba compiles the loops for float32, float64 and bfloat16. Tensors of other dtypes are widened, a piece at a time, to
float32 or float64, which represent their values exactly. `torch_kernels` measures the same numbers without numba.

Start with `measure_span`, then `_scan_block`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch

from torchdelta.compare import torch_kernels
from torchdelta.records.comparison import Measurement

Function = TypeVar("Function", bound=Callable[..., Any])
Array = npt.NDArray[Any]
ArrayPair = tuple[Array, Array]
"""An array of the reference, and the same of the candidate."""

_FIELDS = [field.name for field in dataclasses.fields(Measurement)]
_NUMPY_TYPES = {"int": np.int64, "float": np.float64, "int | None": np.uint64}
_TALLY_DTYPE = np.dtype([(field.name, _NUMPY_TYPES[str(field.type)]) for field in dataclasses.fields(Measurement)])
"""A `Measurement` in progress, as one numpy record."""

_BLOCK = 4096
"""Elements of a block: few enough for the L2 cache, and enough to hide the fixed cost of a block."""

_LITTLE = 1e-300
"""More than the last bit of a subnormal number. A subnormal number itself would make the loop thirty times as slow."""

_IN_PLACE_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128})
"""Dtypes that are read without a copy; a complex tensor is read as a float tensor of its components."""

_FLOAT64_DTYPES = frozenset({torch.float64, torch.int32, torch.uint32, torch.int64, torch.uint64})
"""Dtypes that are widened to float64, because float32 does not represent all their values."""

_compile = cast(Callable[[Function], Function], numba.njit(nogil=True, cache=True))
# a wrapper and a cache file are needed only for functions that Python calls
_INNER_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
_compile_inner = cast(Callable[[Function], Function], numba.njit(**_INNER_OPTIONS))
# reassoc lets sums be vectorised; nnan and ninf would let the compiler drop the tests for NaN and Inf
_compile_sums = cast(
    Callable[[Function], Function], numba.njit(**_INNER_OPTIONS, fastmath={"reassoc", "contract", "nsz"})
)


def measure_span(reference: torch.Tensor, candidate: torch.Tensor, rtol: float, atol: float) -> Measurement:
    """Return the measurement of two CPU tensors of the same shape, with elements, computed on this thread.

    Only `beyond` depends on `rtol` and `atol`. Of complex tensors the components are elements, and `worst` is the flat
    index of a component. `max_ulp` is None unless both have the same floating-point or complex dtype.
    """
    if _has_huge_integers(reference) or _has_huge_integers(candidate):
        return torch_kernels.measure_span(reference, candidate, rtol, atol)
    tally = np.zeros(1, _TALLY_DTYPE)
    by_value = not torch_kernels.has_ulps(reference, candidate)
    if _can_read_in_place(reference, candidate):
        if reference.is_complex():
            reference, candidate = torch.view_as_real(reference), torch.view_as_real(candidate)
        ulp_shift = _scan_contiguous(reference, candidate, by_value, rtol, atol, tally)
    else:
        for piece in torch_kernels.paired_pieces(reference, candidate):
            ulp_shift = _scan_contiguous(*piece, by_value, rtol, atol, tally)
    numbers = dict(zip(_FIELDS, tally.tolist()[0], strict=True))
    numbers["max_ulp"] = None if by_value else numbers["max_ulp"] >> ulp_shift
    return Measurement.of(numbers)


def _can_read_in_place(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Tell whether both tensors can be scanned as a whole: without a copy, or small enough to be widened at once.

    Both have to be contiguous and without a conjugate or negative bit. Then tensors of one dtype of `_IN_PLACE_DTYPES`
    need no copy, and other real tensors may have up to `CPU_PIECE` elements.
    """
    for side in (reference, candidate):
        if not side.is_contiguous() or side.is_conj() or side.is_neg():
            return False
    if reference.dtype == candidate.dtype and reference.dtype in _IN_PLACE_DTYPES:
        return True
    return reference.numel() <= torch_kernels.CPU_PIECE and not (reference.is_complex() or candidate.is_complex())


def _has_huge_integers(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of 64-bit integers and has one beyond ±2**53, which float64 may round."""
    if tensor.dtype not in (torch.int64, torch.uint64):
        return False
    values = tensor.numpy()
    return bool(values.max() > 2**53 or values.min() < -(2**53))


def _scan_contiguous(
    reference: torch.Tensor, candidate: torch.Tensor, by_value: bool, rtol: float, atol: float, tally: Array
) -> int:
    """Add two contiguous real tensors to the tally; return by how many bits its `max_ulp` is shifted to the left.

    Tensors of different dtypes, or not of floats, need `by_value`: then only values are compared, and `max_ulp` means
    nothing. Without it the bits of both are read as the reference's dtype. The shift is 0 unless the bits of a narrow
    float were widened. Tensors of dtypes for which there is no loop are widened to float32 or float64.
    """
    dtype = reference.dtype
    if dtype == torch.bfloat16 and not by_value:
        _scan_bfloat16(_flat(reference.view(torch.int16)), _flat(candidate.view(torch.int16)), rtol, atol, tally)
        return 16
    lane = torch.float64 if dtype in _FLOAT64_DTYPES or candidate.dtype in _FLOAT64_DTYPES else torch.float32
    r = _flat(reference if dtype == lane else reference.to(lane))
    c = _flat(candidate if candidate.dtype == lane else candidate.to(lane))
    if by_value or dtype == lane:
        integer = np.int64 if lane == torch.float64 else np.int32
        ulp_shift, bits = 0, (r.view(integer), c.view(integer))
    else:
        # float8_e8m0fnu has no sign bit, so it is shifted by one bit less
        ulp_shift = 32 - 8 * dtype.itemsize - (dtype == torch.float8_e8m0fnu)
        bits = _shifted_bits(reference, ulp_shift), _shifted_bits(candidate, ulp_shift)
    _scan((r, c), bits, by_value, rtol, atol, tally)
    return ulp_shift


def _flat(tensor: torch.Tensor) -> Array:
    """Return a contiguous CPU tensor as a flat array that shares its memory."""
    return tensor.numpy().reshape(-1)


def _shifted_bits(tensor: torch.Tensor, shift: int) -> Array:
    """Return the bits of a narrow float as int32, shifted so that its sign bit is that of int32."""
    raw = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.uint16)
    return (_flat(raw).astype(np.uint32) << shift).view(np.int32)


@_compile
def _scan(values: ArrayPair, bits: ArrayPair, by_value: bool, rtol: float, atol: float, tally: Any) -> None:
    """Add two arrays to the tally, block by block; without `by_value` their bits are compared too.

    `values` and `bits` are pairs: first the reference's array, then the candidate's. `bits` has the bits of the same
    elements as signed integers; those of narrow floats are shifted to the left. `tally` is an array of one record,
    which is changed.
    """
    for start in range(0, values[0].size, _BLOCK):
        block = slice(start, start + _BLOCK)
        block_values = values[0][block], values[1][block]
        _scan_block(block_values, (bits[0][block], bits[1][block]), by_value, rtol, atol, tally[0])


@_compile
def _scan_bfloat16(reference: Array, candidate: Array, rtol: float, atol: float, tally: Any) -> None:
    """Add two arrays of bfloat16, given as int16, to the record `tally[0]`, block by block; compare values and bits.

    Both are compared as a float32 that has these bits as its upper half, so the record's `max_ulp` is shifted left by
    16 bits.
    """
    wide_reference = np.empty(_BLOCK, np.int32)
    wide_candidate = np.empty(_BLOCK, np.int32)
    for start in range(0, reference.size, _BLOCK):
        r_bits = _widen_bfloat16(reference[start : start + _BLOCK], wide_reference)
        c_bits = _widen_bfloat16(candidate[start : start + _BLOCK], wide_candidate)
        values = r_bits.view(np.float32), c_bits.view(np.float32)
        _scan_block(values, (r_bits, c_bits), False, rtol, atol, tally[0])


@_compile_inner
def _widen_bfloat16(narrow: Array, wide: Array) -> Array:
    """Write bfloat16 bits to the upper half of int32, and return the part of `wide` that was written."""
    for i in range(narrow.size):
        wide[i] = np.int32(narrow[i]) << 16
    return wide[: narrow.size]


@_compile_inner
def _scan_block(values: ArrayPair, bits: ArrayPair, by_value: bool, rtol: float, atol: float, tally: Any) -> None:
    """Update every number of the tally, a `Measurement` in progress, by one block of elements.

    Elements that are NaN or Inf are counted and then taken for zeros. With `by_value`, elements mismatch if their
    values differ, and `max_ulp` means nothing; otherwise they mismatch if their bits differ.
    """
    tally.finite += values[0].size
    sums = _sums(values[0], values[1], tally.max_abs, tally.max_rel)
    # squares of finite float32 never overflow in float64; those of float64 may, which only costs a second look
    if not np.isfinite(sums[1] + sums[2]):
        values, bits = _split_off_non_finite(values, bits, tally)
        sums = _sums(values[0], values[1], tally.max_abs, tally.max_rel)
    reference, candidate = values
    square_error, square_reference, square_candidate, dot, records = sums
    tally.square_error += square_error
    tally.square_reference += square_reference
    tally.square_candidate += square_candidate
    tally.dot += dot
    if records > 0:
        _find_records(reference, candidate, tally)
    if by_value:
        unequal = mismatches = _count_beyond(reference, candidate, 0.0, 0.0)
    else:
        mismatches, crosses_zero, is_farther = _compare_bits(bits[0], bits[1], tally.max_ulp)
        if crosses_zero or is_farther:
            tally.max_ulp = max(tally.max_ulp, _max_ulp(bits[0], bits[1]))
        # 0.0 and -0.0 are equal in value and differ in bits; no other numbers do
        unequal = _count_beyond(reference, candidate, 0.0, 0.0) if crosses_zero else mismatches
    tally.mismatches += mismatches
    if rtol == 0.0 and atol == 0.0:
        tally.beyond += unequal
    elif tally.max_abs > atol:
        tally.beyond += _count_beyond(reference, candidate, rtol, atol)
    tally.numel += reference.size


@_compile_sums
def _sums(reference: Array, candidate: Array, max_abs: float, max_rel: float) -> tuple[float, float, float, float, int]:
    """Return four sums over a block, and how many elements may have a larger error than those before.

    The sums are those of squared errors, of the reference's squares, of the candidate's squares, and of the products.
    `max_abs` and `max_rel` are the largest absolute and relative error before.
    """
    square_error = 0.0
    square_reference = 0.0
    square_candidate = 0.0
    dot = 0.0
    records = 0
    for i in range(reference.size):
        r = np.float64(reference[i])
        c = np.float64(candidate[i])
        error = c - r
        square_error += error * error
        square_reference += r * r
        square_candidate += c * c
        dot += r * c
        # a subnormal product may have been rounded up to the difference, so a little is subtracted
        bar = max_rel * abs(r) - _LITTLE
        bar = np.float64(0.0) if bar < 0.0 else bar
        records += int(abs(error) > (bar if bar < max_abs else max_abs))
    return square_error, square_reference, square_candidate, dot, records


@_compile_inner
def _find_records(reference: Array, candidate: Array, tally: Any) -> None:
    """Search a block for larger absolute and relative errors than the tally has, and write them to the tally.

    `worst` becomes the place of a new largest absolute error, unless a misplaced element was found before. The relative
    error is infinite where only the reference is zero.
    """
    max_abs = tally.max_abs
    max_rel = tally.max_rel
    for i in range(reference.size):
        r = np.float64(reference[i])
        distance = abs(np.float64(candidate[i]) - r)
        # the same bound as in `_sums` avoids most divisions
        if distance > max(0.0, max_rel * abs(r) - _LITTLE):
            max_rel = max(max_rel, distance / abs(r))
        if distance > max_abs:
            max_abs = distance
            if tally.misplaced == 0:
                tally.worst = tally.numel + i
    tally.max_abs = max_abs
    tally.max_rel = max_rel


@_compile_inner
def _count_beyond(reference: Array, candidate: Array, rtol: float, atol: float) -> int:
    """Return the number of elements with |candidate − reference| > atol + rtol·|reference|; both arrays are finite."""
    beyond = 0
    for i in range(reference.size):
        r = np.float64(reference[i])
        beyond += not (abs(np.float64(candidate[i]) - r) <= atol + rtol * abs(r))
    return beyond


@_compile_inner
def _compare_bits(reference: Array, candidate: Array, max_ulp: Any) -> tuple[int, bool, bool]:
    """Return how many pairs of bits differ, if any pair has different signs, and if any is more than `max_ulp` apart.

    A pair is the bits of an element in the reference and in the candidate. The last answer is valid only if all signs
    agree.
    """
    integer = reference.dtype.type
    lowest = np.iinfo(reference.dtype).min
    # unsigned, d + limit > 2 * limit exactly if |d| > limit; both sides are lowered to fit in a signed integer
    limit = np.int64(min(max_ulp, np.uint64(np.iinfo(reference.dtype).max)))
    mismatches = integer(0)
    signs = integer(0)
    farthest = integer(lowest)
    for i in range(reference.size):
        r = reference[i]
        c = candidate[i]
        mismatches = integer(mismatches + (r != c))
        signs = integer(signs | (r ^ c))
        farthest = max(farthest, integer(r - c + integer(limit + lowest)))
    return int(mismatches), signs < 0, farthest > integer(2 * limit + lowest)


@_compile_inner
def _max_ulp(reference: Array, candidate: Array) -> np.uint64:
    """Return the largest distance between reference and candidate at one place, in representable numbers.

    Both arrays are the bits of floats, as signed integers. 0.0 and -0.0 are no distance apart.
    """
    integer = reference.dtype.type
    # distances need an unsigned integer; lowered by this they fit in a signed one, in the same order
    lowest = np.iinfo(reference.dtype).min
    largest = integer(lowest)
    for i in range(reference.size):
        # sign and magnitude to two's complement, where both zeros are 0
        r = integer(lowest - reference[i] if reference[i] < 0 else reference[i])
        c = integer(lowest - candidate[i] if candidate[i] < 0 else candidate[i])
        largest = max(largest, integer(max(r, c) - min(r, c) + lowest))
    return np.uint64(np.int64(largest) - lowest)


@_compile_inner
def _split_off_non_finite(values: ArrayPair, bits: ArrayPair, tally: Any) -> tuple[ArrayPair, ArrayPair]:
    """Count the NaN and Inf of each side of a block in the tally; return copies of values and bits without them.

    Where an element is NaN or Inf on one side or both, both sides have zeros in the copies, and the tally's `finite` is
    one less. Two NaNs, or two equal infinities, agree; any other such element counts as misplaced, as a mismatch and as
    beyond, and the first one becomes `worst`. If neither side of it is NaN, its distance counts for `max_ulp` too.
    """
    finite_values = np.zeros_like(values[0]), np.zeros_like(values[1])
    finite_bits = np.zeros_like(bits[0]), np.zeros_like(bits[1])
    for i in range(values[0].size):
        r = values[0][i]
        c = values[1][i]
        if np.isfinite(r) and np.isfinite(c):
            finite_values[0][i] = r
            finite_values[1][i] = c
            finite_bits[0][i] = bits[0][i]
            finite_bits[1][i] = bits[1][i]
            continue
        tally.finite -= 1
        tally.nan_reference += np.isnan(r)
        tally.nan_candidate += np.isnan(c)
        tally.inf_reference += np.isinf(r)
        tally.inf_candidate += np.isinf(c)
        if r == c or (np.isnan(r) and np.isnan(c)):
            continue
        if tally.misplaced == 0:
            tally.worst = tally.numel + i
        tally.misplaced += 1
        tally.mismatches += 1
        tally.beyond += 1
        if not (np.isnan(r) or np.isnan(c)):
            tally.max_ulp = max(tally.max_ulp, _max_ulp(bits[0][i : i + 1], bits[1][i : i + 1]))
    return finite_values, finite_bits
