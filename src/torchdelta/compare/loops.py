"""When the compiled loops are loaded: numba takes half a second, in which torch measures a thousand small tensors."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from torchdelta.compare.chunked import CPU_PIECE

_MANY = 1000
"""So many small tensors, measured without numba, have taken as long as it takes to load."""


class _Small:
    """How many small tensors were measured without numba."""

    measured = 0


def compiled(name: str, elements: int) -> ModuleType | None:
    """Return a module of compiled loops for that many elements; None where torch is as good, or numba is missing."""
    module = f"{__package__}.{name}"
    if module not in sys.modules and elements <= CPU_PIECE:
        _Small.measured += 1
        if _Small.measured <= _MANY:
            return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
