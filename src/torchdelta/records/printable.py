r"""Texts of other people on a terminal: control characters are shown as escapes, and do nothing.

Names of programs, notes, messages of exceptions and saved reports may contain terminal escapes, which change titles,
hide text or make links. A renderer passes its record through `printable` first:

    printable("\x1b[8mhidden")        ->  "\\x1b[8mhidden"
    printable(report)                 ->  the same report, with such texts in it
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any, TypeVar

Printable = TypeVar("Printable")

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""


def printable(value: Printable) -> Printable:
    """Return a text, or a record, tuple, list or dict, with control characters in its texts written as escapes.

    Texts are found at any depth, also as keys of a dict. Tab and line feed stay. A value without such characters, and
    any other object (an enum member, for example), is returned itself. Nothing is changed in place.
    """
    result: Any = _escaped(value)
    return result  # type: ignore[no-any-return]


def _escaped(value: Any) -> Any:
    """Return a value with control characters escaped at any depth; the value itself if there are none in it."""
    if isinstance(value, enum.Enum):
        return value
    if isinstance(value, str):
        return _CONTROL.sub(_escape, value)
    if isinstance(value, (tuple, list)):
        items = [_escaped(item) for item in value]
        return value if all(map(_is_same, items, value)) else type(value)(items)
    if isinstance(value, dict):
        entries = {_escaped(key): _escaped(item) for key, item in value.items()}
        is_same = all(map(_is_same, entries.keys(), value)) and all(map(_is_same, entries.values(), value.values()))
        return value if is_same else entries
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
        changes = {name: new for name, item in fields.items() if not _is_same(new := _escaped(item), item)}
        return dataclasses.replace(value, **changes) if changes else value
    return value


def _is_same(new: Any, old: Any) -> bool:
    """Tell whether two values are one object, or equal texts."""
    return new is old or (isinstance(new, str) and new == old)


def _escape(match: re.Match[str]) -> str:
    """Return the escape of the matched character, as Python writes it in source code."""
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
