"""Literal values as strict JSON and back, exactly: types, order and non-finite numbers included.

A list, a string, a number, a boolean and None are JSON's own. Every other value is an object with one entry, whose key
is a tag that names the type:

    (1, [2.5, nan])             ->  {"tuple": [1, [2.5, "nan"]]}
    {"dim": torch.float16}      ->  {"dict": [["dim", {"dtype": "float16"}]]}
    slice(None, 3)              ->  {"slice": [null, 3, null]}

A value may refer to something that is stored elsewhere: a node, a tensor, a callable. The caller writes and reads
references, under tags of its own: `Refer` when writing, `Fetch` when reading.

Start reading at `encode_value` and `decode_value`.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from torchdelta.errors import ReportUnreadable
from torchdelta.records.strict_json import NON_FINITE, decode_text, encode_float, encode_text

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
"""Returns the tagged reference that stands for a value, or None if the value is not one to refer to."""
Fetch = Callable[[str, Any, str], Any]
"""Returns the value of a reference, from its tag, its content and its place for the error message."""


class Unwritable(ValueError):
    """No file can hold this value; the message says why."""


def refer_to_nothing(_: Any) -> None:
    """Return None for every value: there are no references, so a value that `encode_value` gets must be plain data."""


def fetch_nothing(tag: str, _: Any, where: str) -> NoReturn:
    """Raise ReportUnreadable for every reference, because the value must be plain data."""
    raise ReportUnreadable(f"{where}: {tag!r} is not a kind of plain data")


def encode_value(value: Any, refer: Refer = refer_to_nothing) -> Any:
    """Return a value as JSON's own types; raise Unwritable if it, or a value inside it, has no encoding.

    `refer` is asked about every value but None and plain booleans, integers, floats and texts; a reference that it
    returns stands for the value. A subclass of tuple, list or dict is encoded as that. Sets, bytes, named tuples and
    most objects have no encoding.
    """
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        return encode_text(value)
    if type(value) is float:
        return encode_float(value)
    reference = refer(value)
    if reference is not None:
        return reference
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
    """Return the value that `encode_value` encoded as `data`; raise ReportUnreadable if `data` encodes no value.

    `fetch` is called for each object with an unknown tag, which is a reference, and returns its value; the default
    refuses all references. `where` is the place that messages name.
    """
    if data is None or isinstance(data, (bool, int, float)):
        return data
    if isinstance(data, str):
        return NON_FINITE[data] if data in NON_FINITE else decode_text(data)
    if isinstance(data, list):
        return [decode_value(item, f"{where}[{index}]", fetch) for index, item in enumerate(data)]
    if not isinstance(data, dict) or len(data) != 1:
        raise ReportUnreadable(f"{where}: {reprlib.repr(data)} is not a value")
    ((tag, content),) = data.items()
    if tag in _CONTAINERS:
        if not isinstance(content, list):
            raise ReportUnreadable(f"{where}: a {tag} has a list in it, not {reprlib.repr(content)}")
        try:
            return _CONTAINERS[tag](decode_value(content, where, fetch))
        except (TypeError, ValueError) as error:
            raise ReportUnreadable(f"{where}: {reprlib.repr(content)} does not make a {tag}: {error}") from error
    if tag in _CONSTANTS:
        if not isinstance(content, str) or content not in _CONSTANTS[tag]:
            raise ReportUnreadable(f"{where}: this torch has no {tag} {content!r}")
        return _CONSTANTS[tag][content]
    if tag == "ellipsis":
        return Ellipsis
    if tag == "device":
        return _decode_device(content, where)
    return fetch(tag, content, where)


def is_plain(value: Any) -> bool:
    """Tell whether a value is plain data: `encode_value` takes it, and every value inside it, without references."""
    try:
        encode_value(value)
    except Unwritable:
        return False
    return True


def expect(data: Any, kind: type, where: str) -> Any:
    """Return the data itself if it is of that kind; otherwise raise ReportUnreadable with its place `where`."""
    if not isinstance(data, kind):
        raise ReportUnreadable(f"{where}: expected a {kind.__name__}, found {reprlib.repr(data)}")
    return data


def _encode_atom(value: Any) -> dict[str, Any]:
    """Return an ellipsis, complex number, device, dtype, layout, memory format or qscheme as a tagged object.

    Raise Unwritable for a value of any other type.
    """
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
    role = "named tuple " if isinstance(value, tuple) else "member of " if isinstance(value, enum.Enum) else ""
    raise Unwritable(f"{reprlib.repr(value)} is a {role}{kind.__module__}.{kind.__qualname__}")


def _decode_dict(pairs: Sequence[Any]) -> dict[Any, Any]:
    """Return the dict of these [key, value] pairs; raise ValueError if a key comes twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key is there twice")
    return entries


def _decode_complex(parts: Sequence[Any]) -> complex:
    """Return the complex number of [real, imaginary]; raise TypeError or ValueError if these are not two numbers."""
    real, imaginary = parts
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise TypeError("its parts are not numbers")
    return complex(real, imaginary)


def _decode_device(content: Any, where: str) -> torch.device:
    """Return the device of that name; raise ReportUnreadable if it is not a text or this torch has no such device."""
    try:
        if isinstance(content, str):
            return torch.device(content)
    except RuntimeError:
        pass
    raise ReportUnreadable(f"{where}: this torch has no device {content!r}")


_CONTAINERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "tuple": tuple,
    "Size": torch.Size,
    "dict": _decode_dict,
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "complex": _decode_complex,
}
