"""The elements of a tensor as source text: the shortest that Python and torch read back to the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from torchdelta.repro.literals import write_complex, write_float

_NUMPY = {torch.float16: np.float16, torch.float32: np.float32}
_INFERRED = (torch.float32, torch.int64, torch.bool)
"""What torch makes of a Python number that comes without a dtype."""
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_BY_BYTES = "torch.tensor({bytes}, dtype=torch.uint8).view({dtype}).reshape({shape})"


def write_contiguous(tensor: torch.Tensor) -> str:
    """Return an expression of a contiguous tensor of these elements on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    if not plain.numel():
        return f"torch.empty({tuple(plain.shape)}, dtype={plain.dtype})"
    try:
        written = _write_constant(plain) if plain.numel() > 1 and _is_constant(plain) else _write_elements(plain)
        if _is_same(_read(written), plain):
            return written
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        pass  # a dtype that torch only stores has no numbers, and its bytes have
    # the payload of a NaN has no other text
    return _BY_BYTES.format(
        bytes=plain.reshape(-1).view(torch.uint8).tolist(), dtype=plain.dtype, shape=tuple(plain.shape)
    )


def is_trivial(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is nothing but zeros or ones, which are nobody's data."""
    if not tensor.numel():
        return True
    try:
        return bool((tensor == 0).all() or (tensor == 1).all())
    except (NotImplementedError, RuntimeError):
        return False


def is_constant(tensor: torch.Tensor) -> bool:
    """Tell whether all elements have the same bits, so that they take one number however many they are."""
    return tensor.numel() < 2 or _is_constant(tensor.detach().cpu().contiguous())


def _is_constant(plain: torch.Tensor) -> bool:
    cells = plain.reshape(-1, 1).view(torch.uint8)
    return bool((cells == cells[0]).all())


def _write_constant(plain: torch.Tensor) -> str:
    shape, keyword = tuple(plain.shape), _keyword(plain.dtype)
    (text,) = _texts(plain.reshape(-1)[:1])
    if text in ("0.0", "1.0") or (text in ("0", "1") and plain.dtype is not torch.int64):
        return f"torch.{'zeros' if text in ('0', '0.0') else 'ones'}({shape}{keyword})"
    return f"torch.full({shape}, {text}{keyword})"


def _write_elements(plain: torch.Tensor) -> str:
    return f"torch.tensor({_nested(_texts(plain.reshape(-1)), plain.shape)}{_keyword(plain.dtype)})"


def _keyword(dtype: torch.dtype) -> str:
    return "" if dtype in _INFERRED else f", dtype={dtype}"


def _nested(texts: Sequence[str], shape: Sequence[int]) -> str:
    if not shape:
        return texts[0]
    step = len(texts) // shape[0]
    rows = (texts[index * step : (index + 1) * step] for index in range(shape[0]))
    return f"[{', '.join(_nested(row, shape[1:]) for row in rows)}]"


def _texts(flat: torch.Tensor) -> list[str]:
    if flat.dtype.is_complex:
        real = _REAL[flat.dtype]
        parts = torch.view_as_real(flat).to(torch.float64).tolist()
        return [write_complex(complex(_shortened(x, real), _shortened(y, real))) for x, y in parts]
    if flat.dtype.is_floating_point:
        return [write_float(_shortened(value, flat.dtype)) for value in flat.to(torch.float64).tolist()]
    return [repr(value) for value in flat.tolist()]


def _shortened(value: float, dtype: torch.dtype) -> float:
    """Return the float with the shortest text that the dtype rounds to the same number."""
    if dtype is torch.float64 or not math.isfinite(value) or value == 0.0:
        return value
    if dtype in _NUMPY:
        shorter = float(str(_NUMPY[dtype](value)))
        return shorter if float(torch.tensor(shorter, dtype=dtype)) == value else value
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if float(torch.tensor(shorter, dtype=dtype)) == value:
            return shorter
    return value


def _read(expression: str) -> torch.Tensor:
    # it was written a moment ago, of numbers alone
    made = eval(expression, {"torch": torch})
    assert isinstance(made, torch.Tensor)
    return made


def _is_same(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    if (made.dtype, made.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(made.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
