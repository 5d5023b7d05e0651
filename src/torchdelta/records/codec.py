"""Records to strict JSON and back, driven by the records' own type hints.

`encode` turns a record into JSON's own types and `decode` builds it again, so a new field needs no code here:

    encode(UnmatchedLeaf(path="outputs[1]", side="candidate", what="tensor"))
    ->  {"path": "outputs[1]", "side": "candidate", "what": "tensor"}

`decode` refuses unknown fields, missing fields and values of another type, and names the place: a file of another
version is never read halfway. `strict_json` has the text of JSON and the files.

Start reading at `write_report` and `read_report`, the files that a command writes and `torchdelta show` shows.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import reprlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, cast, overload

from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.audit import Audit
from torchdelta.records.location import Location
from torchdelta.records.operators import OpReport, Sweep
from torchdelta.records.passes import Pipeline
from torchdelta.records.report import Report
from torchdelta.records.sensitivity import Sensitivity
from torchdelta.records.strict_json import (
    NON_FINITE,
    decode_text,
    encode_float,
    encode_text,
    from_text,
    replace_file,
    to_text,
)

Saved = Report | Audit | Location | OpReport | Pipeline | Sensitivity | Sweep
"""The records that a command writes and `torchdelta show` shows."""
_Saved = TypeVar("_Saved", Report, Audit, Location, OpReport, Pipeline, Sensitivity, Sweep)


# the JSON of a report has no `kind`, because reports are older than the other kinds
_REPORT = "report"
_KINDS: dict[str, type[Saved]] = {
    _REPORT: Report,
    "audit": Audit,
    "location": Location,
    "operator": OpReport,
    "pipeline": Pipeline,
    "sensitivity": Sensitivity,
    "sweep": Sweep,
}
_REMEDIES = {
    _REPORT: "run the check again",
    "audit": "run the audit again",
    "location": "locate again",
    "operator": "check the operator again",
    "pipeline": "check the pipeline again",
    "sensitivity": "locate with --sensitivity again",
    "sweep": "sweep again",
}


def to_json(report: Saved) -> str:
    """Return a report, an audit or any other saved record as strict JSON, indented and with a line break at the end.

    The key `kind` comes first and says which record it is; a report has none.
    """
    name = _name_of(type(report))
    kind = {} if name == _REPORT else {"kind": name}
    return to_text({**kind, **encode(report)}, indent=2) + "\n"


@overload
def from_json(text: str) -> Report: ...
@overload
def from_json(text: str, kind: type[_Saved]) -> _Saved: ...
@overload
def from_json(text: str, kind: None) -> Saved: ...
def from_json(text: str, kind: Any = Report) -> Saved:
    """Return the record of the class `kind` that `to_json` turned into `text`; None reads any kind of record.

    Raise ReportUnreadable if the text is damaged, or of another kind or schema version.
    """
    try:
        data = from_text(text)
    except json.JSONDecodeError as error:
        raise ReportUnreadable(f"this is not JSON (line {error.lineno}: {error.msg})") from error
    except ValueError as error:
        raise ReportUnreadable(f"this is not a torchdelta report: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise ReportUnreadable("this is JSON but not a torchdelta report: it has no schema_version")
    name = data.pop("kind", _REPORT)
    record = _KINDS.get(name) if isinstance(name, str) else None
    if record is None:
        raise ReportUnreadable(f"this is of kind {reprlib.repr(name)}, which this torchdelta does not read: upgrade it")
    if kind not in (None, record):
        raise ReportUnreadable(f"this is a torchdelta {name}, not a {_name_of(kind)}: `torchdelta show` shows it")
    reads = record.schema_version
    if version != reads:
        remedy = "upgrade torchdelta to read it" if version > reads else _REMEDIES[name]
        raise ReportUnreadable(f"this {name} has schema {version}, and this torchdelta reads {reads}: {remedy}")
    saved = decode(record, data, name)
    assert isinstance(saved, record)
    return saved


def write_report(report: Saved, path: str | os.PathLike[str]) -> None:
    """Write a saved record to a file as JSON, in one step: a reader never sees a part of it.

    A link stays, and the file that it points to is replaced. A pipe or a device is written to directly. Raise
    UsageError if the file cannot be written.
    """
    text = to_json(report)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # a pipe or a device is written to, because replacing /dev/null would take it from the whole machine
            Path(path).write_text(text, encoding="utf-8")
        else:
            # a link stays a link: the file that it points to is replaced
            replace_file(Path(os.path.realpath(path)), lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


@overload
def read_report(path: str | os.PathLike[str]) -> Report: ...
@overload
def read_report(path: str | os.PathLike[str], kind: type[_Saved]) -> _Saved: ...
@overload
def read_report(path: str | os.PathLike[str], kind: None) -> Saved: ...
def read_report(path: str | os.PathLike[str], kind: Any = Report) -> Saved:
    """Return the record of the class `kind` in a file that `write_report` wrote; None reads any kind of record.

    Raise ReportUnreadable, with the name of the file, if it cannot be read or holds no such record.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportUnreadable(f"cannot read {os.fspath(path)}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return cast(Saved, from_json(text, kind))
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{os.fspath(path)}: {error}") from error


def _name_of(record: type[Saved]) -> str:
    """Return the kind of a class of saved records as its JSON names it, such as `audit`."""
    return next(name for name, known in _KINDS.items() if known is record)


def encode(value: Any) -> Any:
    """Return a record, or any value that a record holds, as JSON's own types.

    A record or mapping becomes a dict with text as keys, a tuple a list, an enum member its value. A float that is not
    finite becomes its word, such as "nan"; a text that is such a word gets a backslash. Other values stay. Values
    within a record, mapping, tuple or list are encoded too, at any depth; keys get no backslash.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, str):
        return encode_text(value)
    return value


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return the value of type `hint` that `data`, as `encode` returned it, encodes.

    Raise ReportUnreadable if `data` encodes no such value; `where` is the place that the message names, such as
    `report.stages[0]`.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, data, where)
    if origin is tuple:
        items = _expect(list, data, where)
        return tuple(decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        items = _expect(dict, data, where)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in items.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_record(hint, _expect(dict, data, where), where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            _refuse(data, hint.__name__, where)
    if hint is Any:
        return _decode_plain(data)
    if hint is float:
        return _decode_float(data, where)
    if hint is str:
        return decode_text(_expect(str, data, where))
    return _expect(hint, data, where)


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    """Return the value that `data` encodes of an optional type (`X | None`) or of a `Scalar` (also `Scalar | None`).

    `members` are the types of the union. In a `Scalar` the words "nan", "inf" and "-inf" are floats. Raise
    ReportUnreadable if `data` encodes a value of none of the types.
    """
    if data is None and type(None) in members:
        return None
    others = [member for member in members if member is not type(None)]
    if len(others) == 1:
        return decode(others[0], data, where)
    # a union of several is a Scalar: JSON keeps its types apart, except for floats that are not finite
    kind = float if isinstance(data, str) and data in NON_FINITE else type(data)
    if kind not in others:
        _refuse(data, " or ".join(member.__name__ for member in others), where)
    return decode(kind, data, where)


def _decode_plain(data: Any) -> Any:
    """Return the value that `data` encodes where the type hint is `Any`: dicts and lists stay, at any depth.

    The words "nan", "inf" and "-inf" become floats, and the backslash that `encode_text` added is removed.
    """
    if isinstance(data, dict):
        return {key: _decode_plain(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_decode_plain(item) for item in data]
    if isinstance(data, str):
        return NON_FINITE[data] if data in NON_FINITE else decode_text(data)
    return data


def _decode_float(data: Any, where: str) -> float:
    """Return a number, or the word of one ("nan", "inf", "-inf"), as a float; raise ReportUnreadable for other data."""
    if isinstance(data, str) and data in NON_FINITE:
        return NON_FINITE[data]
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        _refuse(data, "number", where)
    try:
        return float(data)
    except OverflowError:
        _refuse(data, "number that fits a float", where)


def _decode_record(record: Any, data: dict[str, Any], where: str) -> Any:
    """Return an instance of the dataclass `record` from a dict with exactly its fields, each decoded by its type hint.

    Raise ReportUnreadable if a field is unknown, missing (even one with a default) or of another type, or if the
    dataclass itself refuses the values with a UsageError.
    """
    hints = _hints(record)
    names = [field.name for field in dataclasses.fields(record)]
    if unknown := [name for name in data if name not in names]:
        raise ReportUnreadable(f"{where}: unknown {', '.join(unknown)}")
    if missing := [name for name in names if name not in data]:
        raise ReportUnreadable(f"{where}: {', '.join(missing)} missing")
    decoded = {name: decode(hints[name], data[name], f"{where}.{name}") for name in names}
    try:
        return record(**decoded)
    except UsageError as error:
        raise ReportUnreadable(f"{where}: {error}") from error


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    """Return the evaluated type hints of a record class by field; they are kept for later calls."""
    return typing.get_type_hints(record)


def _expect(kind: type, data: Any, where: str) -> Any:
    """Return the data if it is of that kind; raise ReportUnreadable otherwise. A bool is not an int here."""
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        _refuse(data, kind.__name__, where)
    return data


def _refuse(data: Any, expected: str, where: str) -> NoReturn:
    """Raise ReportUnreadable: at the place `where`, `expected` was expected, and `data` was found."""
    text = f"a {type(data).__name__}" if isinstance(data, (dict, list)) else reprlib.repr(data)
    raise ReportUnreadable(f"{where}: expected {expected}, found {text}")
