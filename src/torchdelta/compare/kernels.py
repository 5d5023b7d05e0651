"""Measure two tensors: every number of a `Measurement` from one pass over both, on all cores and with little memory.

Large tensors are cut into spans, which threads measure. A span goes to the compiled loops of `numba_measure`; without
numba, on other devices and for small tensors it goes to the torch operators of `torch_kernels`. Loading numba takes
half a second, in which torch measures a thousand small tensors, so `compiled` loads it late. Start with `measure`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch

from torchdelta.compare import torch_kernels
from torchdelta.compare.torch_kernels import CPU_PIECE
from torchdelta.records.comparison import Measurement

_MANY = 1000
"""Measuring so many small tensors without numba takes as long as loading it."""


class _Small:
    """The number of small tensors that this process measured without numba."""

    measured = 0


def compiled(name: str, elements: int) -> ModuleType | None:
    """Import and return a module of compiled loops, or None if numba is missing or torch is fast enough for `elements`.

    `name` is that of a module of this package. While it is not loaded, calls for at most `CPU_PIECE` elements return
    None, until there were `_MANY` of them in the process, which are counted here.
    """
    module = f"{__package__}.{name}"
    if module not in sys.modules and elements <= CPU_PIECE:
        _Small.measured += 1
        if _Small.measured <= _MANY:
            return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


SpanMeasure = Callable[[torch.Tensor, torch.Tensor, float, float], Measurement]

_SPAN = 2**22
"""Elements that one thread measures at a time: some milliseconds, above which starting threads pays."""

_MEASURABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.complex128,
        torch.complex64,
        torch.complex32,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    }
)


def measure(reference: torch.Tensor, candidate: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0) -> Measurement:
    """Return the measurement of two dense tensors of the same shape, element by element; nothing is broadcast.

    Dtypes and devices may differ. `rtol` and `atol` only decide which elements count as `beyond`. Of complex tensors
    the components are measured, but `worst` is the flat index of a whole element. ValueError if the shapes differ,
    TypeError if a tensor is quantized, sparse or of a dtype without arithmetic.
    """
    if reference.shape != candidate.shape:
        raise ValueError(
            f"a reference of shape {tuple(reference.shape)} cannot be measured against a candidate of shape "
            f"{tuple(candidate.shape)}: nothing is broadcast, so give both the same shape first"
        )
    for side in (reference, candidate):
        if side.dtype not in _MEASURABLE or side.layout != torch.strided:
            raise TypeError(
                f"a tensor of {side.dtype} in the layout {side.layout} has no elements to measure one by one: "
                "dequantize it, or make it dense, first"
            )
    if reference.numel() == 0:
        return _empty_measurement(reference, candidate)
    measurement = _measure_spans(reference.detach(), candidate.detach(), rtol, atol)
    if reference.is_complex() or candidate.is_complex():
        return dataclasses.replace(measurement, worst=measurement.worst // 2)
    return measurement


def _measure_spans(reference: torch.Tensor, candidate: torch.Tensor, rtol: float, atol: float) -> Measurement:
    """Return the measurement of two tensors that are not empty; large ones on the CPU are measured by several threads.

    `worst` of complex tensors is the flat index of a component, not of an element.
    """
    on_cpu = reference.is_cpu and candidate.is_cpu
    measure_span = _cpu_measure(reference.numel()) if on_cpu else torch_kernels.measure_span
    if reference.numel() <= _SPAN or not on_cpu:
        return measure_span(reference, candidate, rtol, atol)
    if reference.is_contiguous() and candidate.is_contiguous():
        reference, candidate = reference.view(-1), candidate.view(-1)
    # a pool for each call, because the threads of a lasting pool are missing after a fork
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        spans = pool.map(
            lambda index: measure_span(reference[index], candidate[index], rtol, atol),
            torch_kernels.pieces(reference.shape, _SPAN),
        )
        return functools.reduce(torch_kernels.join, spans)


def _cpu_measure(elements: int) -> SpanMeasure:
    """Return the function that measures CPU tensors of so many elements: numba's, or torch's if `compiled` has none."""
    fused = compiled("numba_measure", elements)
    return torch_kernels.measure_span if fused is None else fused.measure_span


def _empty_measurement(reference: torch.Tensor, candidate: torch.Tensor) -> Measurement:
    """Return the measurement of two tensors without elements: zeros, and −1 as `worst`.

    `max_ulp` is 0 if both have the same floating-point or complex dtype, and otherwise None.
    """
    return Measurement(
        numel=0,
        finite=0,
        mismatches=0,
        misplaced=0,
        nan_reference=0,
        nan_candidate=0,
        inf_reference=0,
        inf_candidate=0,
        max_abs=0.0,
        max_rel=0.0,
        square_error=0.0,
        square_reference=0.0,
        square_candidate=0.0,
        dot=0.0,
        max_ulp=0 if torch_kernels.has_ulps(reference, candidate) else None,
        beyond=0,
        worst=-1,
    )
