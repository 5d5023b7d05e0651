"""Records to strict JSON and back, driven by their own type hints.

Strict means that any JSON reader takes it: a number that is not finite is the string "nan", "inf" or "-inf". Text that
is one of these words itself is written with a backslash in front, so that nothing is read back as what it was not.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
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

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ESCAPE = "\\"

Saved = Report | Audit | Location | OpReport | Pipeline | Sensitivity | Sweep
"""What a command writes, and `torchdelta show` shows."""
_Saved = TypeVar("_Saved", Report, Audit, Location, OpReport, Pipeline, Sensitivity, Sweep)


# a report says nothing of its kind: it was there first
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
_AGAIN = {
    _REPORT: "run the check again",
    "audit": "run the audit again",
    "location": "locate again",
    "operator": "check the operator again",
    "pipeline": "check the pipeline again",
    "sensitivity": "locate with --sensitivity again",
    "sweep": "sweep again",
}


def to_json(report: Saved) -> str:
    """Return a report, an audit or a location as strict JSON."""
    name = _name_of(type(report))
    kind = {} if name == _REPORT else {"kind": name}
    return json.dumps({**kind, **encode(report)}, indent=2, allow_nan=False) + "\n"


@overload
def from_json(text: str) -> Report: ...
@overload
def from_json(text: str, kind: type[_Saved]) -> _Saved: ...
@overload
def from_json(text: str, kind: None) -> Saved: ...
def from_json(text: str, kind: Any = Report) -> Saved:
    """Read a report back, exactly as it was; ReportUnreadable says where it is not one.

    `kind` is the class of what is expected instead; with None any of them is read.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ReportUnreadable(f"this is not JSON (line {error.lineno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise ReportUnreadable(f"this is not a torchdelta report: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise ReportUnreadable("this is JSON but not a torchdelta report: it has no schema_version")
    name = data.pop("kind", _REPORT)
    found = _KINDS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ReportUnreadable(f"this is of kind {reprlib.repr(name)}, which this torchdelta does not read: upgrade it")
    if kind not in (None, found):
        raise ReportUnreadable(f"this is a torchdelta {name}, not a {_name_of(kind)}: `torchdelta show` shows it")
    reads = found.schema_version
    if version != reads:
        remedy = "upgrade torchdelta to read it" if version > reads else _AGAIN[name]
        raise ReportUnreadable(f"this {name} has schema {version}, and this torchdelta reads {reads}: {remedy}")
    saved = decode(found, data, name)
    assert isinstance(saved, found)
    return saved


def write_report(report: Saved, path: str | os.PathLike[str]) -> None:
    """Write a report, an audit or a location whole or not at all: a reader never sees half of one."""
    text = to_json(report)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # a pipe or a device is written to: replacing it would take /dev/null from the whole machine
            Path(path).write_text(text, encoding="utf-8")
        else:
            replace_file(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


@overload
def read_report(path: str | os.PathLike[str]) -> Report: ...
@overload
def read_report(path: str | os.PathLike[str], kind: type[_Saved]) -> _Saved: ...
@overload
def read_report(path: str | os.PathLike[str], kind: None) -> Saved: ...
def read_report(path: str | os.PathLike[str], kind: Any = Report) -> Saved:
    """Read a report from a file, or what else `kind` says; the error names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportUnreadable(f"cannot read {os.fspath(path)}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return cast(Saved, from_json(text, kind))
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{os.fspath(path)}: {error}") from error


def _name_of(record: type[Saved]) -> str:
    return next(name for name, known in _KINDS.items() if known is record)


def encode(value: Any) -> Any:
    """Return the value as JSON's own types."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and _reads_as_number(value):
        return _ESCAPE + value
    return value


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return the value of that type which `data` encodes; `where` is its place, for the error."""
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
        text = _expect(str, data, where)
        return text.removeprefix(_ESCAPE) if _reads_as_number(text) else text
    return _expect(hint, data, where)


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in members:
        return None
    others = [member for member in members if member is not type(None)]
    if len(others) == 1:
        return decode(others[0], data, where)
    # a union of several is a Scalar: JSON keeps its types apart, except for floats that are not finite
    kind = float if isinstance(data, str) and data in _NON_FINITE else type(data)
    if kind not in others:
        _refuse(data, " or ".join(member.__name__ for member in others), where)
    return decode(kind, data, where)


def _decode_plain(data: Any) -> Any:
    """Return what JSON's own types stand for where nobody said more."""
    if isinstance(data, dict):
        return {key: _decode_plain(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_decode_plain(item) for item in data]
    if isinstance(data, str):
        return _NON_FINITE[data] if data in _NON_FINITE else decode(str, data, "")
    return data


def _decode_float(data: Any, where: str) -> float:
    if isinstance(data, str) and data in _NON_FINITE:
        return _NON_FINITE[data]
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        _refuse(data, "number", where)
    try:
        return float(data)
    except OverflowError:
        _refuse(data, "number that fits a float", where)


def _decode_record(record: Any, data: dict[str, Any], where: str) -> Any:
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
    return typing.get_type_hints(record)


def _expect(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        _refuse(data, kind.__name__, where)
    return data


def _refuse(data: Any, expected: str, where: str) -> NoReturn:
    found = f"a {type(data).__name__}" if isinstance(data, (dict, list)) else reprlib.repr(data)
    raise ReportUnreadable(f"{where}: expected {expected}, found {found}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _reads_as_number(text: str) -> bool:
    return text.lstrip(_ESCAPE) in _NON_FINITE


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader sees what was there before, or all of the text."""
    # not from `tempfile`, whose files are private: a report is as readable as any other file of the user
    unfinished = path.parent / f".torchdelta-{os.urandom(8).hex()}"
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
