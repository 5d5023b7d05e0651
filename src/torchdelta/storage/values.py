"""Literal values as strict JSON and back, exactly: types, order and non-finite numbers included.

A list, a string, a number, a boolean and None are JSON's own; all else is an object with one entry, whose key says
what it is. What a value refers to (a node, a tensor, a callable) is written and read by the caller.
"""

from __future__ import annotations

import enum
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from torchdelta.errors import ReportUnreadable

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ESCAPE = "\\"
_CONSTANT_KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "qscheme": torch.qscheme,
}
_CONSTANTS: dict[str, dict[str, Any]] = {
    tag: {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, kind)}
    for tag, kind in _CONSTANT_KINDS.items()
}

Refer = Callable[[Any], dict[str, Any] | None]
"""Writes down what a value refers to; None of what it cannot."""
Fetch = Callable[[str, Any, str], Any]
"""Finds what was written under a tag, given what was written and where."""


class Unwritable(ValueError):
    """A value that has no place in a file."""


def refer_to_nothing(_: Any) -> None:
    """Refuse every reference: the value must be plain data."""


def fetch_nothing(tag: str, _: Any, where: str) -> NoReturn:
    """Refuse every reference: the value must be plain data."""
    raise ReportUnreadable(f"{where}: {tag!r} is no kind of plain data")


def encode_value(value: Any, refer: Refer = refer_to_nothing) -> Any:
    """Return a value as JSON's own types; Unwritable says what cannot be."""
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        return _ESCAPE + value if _reads_as_number(value) else value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    referred = refer(value)
    if referred is not None:
        return referred
    if isinstance(value, torch.Size):
        return {"Size": [encode_value(size, refer) for size in value]}
    if isinstance(value, tuple) and not hasattr(value, "_fields") and not hasattr(value, "n_fields"):
        return {"tuple": [encode_value(item, refer) for item in value]}
    if isinstance(value, list):
        return [encode_value(item, refer) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode_value(key, refer), encode_value(item, refer)] for key, item in value.items()]}
    if isinstance(value, (slice, range)):
        return {type(value).__name__: [encode_value(part, refer) for part in (value.start, value.stop, value.step)]}
    return _encode_atom(value)


def decode_value(data: Any, where: str, fetch: Fetch = fetch_nothing) -> Any:
    """Return the value that was encoded; `where` is its place, for the error."""
    if data is None or isinstance(data, (bool, int, float)):
        return data
    if isinstance(data, str):
        return _NON_FINITE[data] if data in _NON_FINITE else unescaped(data)
    if isinstance(data, list):
        return [decode_value(item, f"{where}[{index}]", fetch) for index, item in enumerate(data)]
    if not isinstance(data, dict) or len(data) != 1:
        raise ReportUnreadable(f"{where}: {reprlib.repr(data)} is no value")
    ((tag, content),) = data.items()
    if tag in _CONTAINERS:
        if not isinstance(content, list):
            raise ReportUnreadable(f"{where}: a {tag} has a list in it, not {reprlib.repr(content)}")
        try:
            return _CONTAINERS[tag](decode_value(content, where, fetch))
        except (TypeError, ValueError) as error:
            raise ReportUnreadable(f"{where}: {reprlib.repr(content)} makes no {tag}: {error}") from error
    if tag in _CONSTANTS:
        if not isinstance(content, str) or content not in _CONSTANTS[tag]:
            raise ReportUnreadable(f"{where}: this torch has no {tag} {content!r}")
        return _CONSTANTS[tag][content]
    if tag == "ellipsis":
        return Ellipsis
    if tag == "device":
        return _device(content, where)
    return fetch(tag, content, where)


def unescaped(text: str) -> str:
    """Return text as it was before it was told apart from a number that is not finite."""
    return text.removeprefix(_ESCAPE) if _reads_as_number(text) else text


def _encode_atom(value: Any) -> dict[str, Any]:
    if value is Ellipsis:
        return {"ellipsis": None}
    if type(value) is complex:
        return {"complex": [encode_value(value.real), encode_value(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, kind in _CONSTANT_KINDS.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    kind = type(value)
    what = "named tuple " if isinstance(value, tuple) else "member of " if isinstance(value, enum.Enum) else ""
    raise Unwritable(f"{reprlib.repr(value)} is a {what}{kind.__module__}.{kind.__qualname__}")


def _decode_dict(pairs: Sequence[Any]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def _decode_complex(parts: Sequence[Any]) -> complex:
    real, imaginary = parts
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise TypeError("its parts are no numbers")
    return complex(real, imaginary)


def _device(content: Any, where: str) -> torch.device:
    try:
        if isinstance(content, str):
            return torch.device(content)
    except RuntimeError:
        pass
    raise ReportUnreadable(f"{where}: this torch has no device {content!r}")


def _reads_as_number(text: str) -> bool:
    return text.lstrip(_ESCAPE) in _NON_FINITE


_CONTAINERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "tuple": tuple,
    "Size": torch.Size,
    "dict": _decode_dict,
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "complex": _decode_complex,
}
