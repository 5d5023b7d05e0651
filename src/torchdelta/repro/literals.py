"""Values as source text, exactly: what Python reads back is the same to the last bit."""

from __future__ import annotations

import enum
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

import torch

from torchdelta._torch import targets
from torchdelta.errors import ReproUnwritable

Refer = Callable[[Any], str | None]
"""Names what a value refers to; None of what it does not know."""
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_INDEXED = re.compile(r"\.(\d+)(?=\.|$)")


def write_value(value: Any, refer: Refer = lambda _: None) -> str:
    """Return an expression of the value; ReproUnwritable says what has none."""
    if (referred := refer(value)) is not None:
        return referred
    if type(value) is str:
        return write_text(value)
    if value is None or value is Ellipsis or type(value) in (bool, int, bytes):
        return "..." if value is Ellipsis else repr(value)
    if type(value) is float:
        return write_float(value)
    if type(value) is complex:
        return write_complex(value)
    if isinstance(value, torch.Size):
        return f"torch.Size([{_joined(value, refer)}])"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({_joined(value, refer)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{_joined(value, refer)}]"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}([{', '.join(sorted(write_value(item, refer) for item in value))}])"
    if isinstance(value, dict):
        entries = (f"{write_value(key, refer)}: {write_value(item, refer)}" for key, item in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, (slice, range)):
        return f"{type(value).__name__}({_joined((value.start, value.stop, value.step), refer)})"
    return _write_atom(value)


def write_text(value: str) -> str:
    """Return a string in double quotes, where Python has the same in them."""
    return repr(value) if any(char in value for char in "\"'\\") or not value.isprintable() else f'"{value}"'


def write_float(value: float) -> str:
    """Return a float; torch has names for those that Python has no literal of."""
    if math.isfinite(value):
        return repr(value)
    return "torch.nan" if math.isnan(value) else "torch.inf" if value > 0 else "-torch.inf"


def write_complex(value: complex) -> str:
    """Return a complex number by its parts: a literal loses the sign of a zero."""
    return f"complex({write_float(value.real)}, {write_float(value.imag)})"


def write_index(index: Any, refer: Refer) -> str:
    """Return what stands between the brackets of an index, as a person writes it."""
    parts = index if type(index) is tuple and index else (index,)
    written = ", ".join(
        _write_slice(part, refer) if isinstance(part, slice) else write_value(part, refer) for part in parts
    )
    return f"{written}," if type(index) is tuple and len(index) == 1 else written


def write_callable(target: Any, imports: set[str] | None = None) -> str:
    """Return the name of a callable as a script writes it; what must be imported for it is added to `imports`."""
    name = getattr(target, "__name__", "")
    for place, home in (("torch.nn.functional", torch.nn.functional), ("torch", torch)):
        if name.isidentifier() and getattr(home, name, None) is target:
            return f"{place}.{name}"
    try:
        kind, _, rest = targets.name_target(target).partition(" ")
    except ValueError as error:
        raise ReproUnwritable(f"a script cannot call {reprlib.repr(target)}: {error}") from error
    if kind in ("operator", "packet"):
        return "torch.ops." + rest.replace("::", ".") + ("" if kind == "packet" or "." in rest else ".default")
    if kind == "higher_order":
        return f"torch.ops.higher_order.{rest.partition(' ')[0]}"
    module, _, path = rest.partition(":")
    module = "operator" if module == "_operator" else module
    if module == "builtins":
        return path
    if imports is not None and not module.startswith("torch"):
        imports.add(module)
    return f"{module}.{path}"


def attribute_path(base: str, target: str) -> str:
    """Return how a dotted name of a module's part is reached: a number is no name, but an index."""
    return base + _INDEXED.sub(r"[\1]", f".{target}")


def _write_slice(part: slice, refer: Refer) -> str:
    start, stop, step = (
        "" if edge is None else write_value(edge, refer) for edge in (part.start, part.stop, part.step)
    )
    return f"{start}:{stop}{f':{step}' if step else ''}"


def _write_atom(value: Any) -> str:
    if isinstance(value, _TORCH_CONSTANTS):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, enum.Enum):
        return f"{write_callable(type(value))}.{value.name}"
    if callable(value) and not isinstance(value, (torch.Tensor, torch.nn.Module)):
        return write_callable(value)
    kind = type(value)
    raise ReproUnwritable(
        f"{reprlib.repr(value)} is a {kind.__module__}.{kind.__qualname__}, which has no literal: "
        "make it an input of the graph"
    )


def _joined(values: Any, refer: Refer) -> str:
    return ", ".join(write_value(value, refer) for value in values)
