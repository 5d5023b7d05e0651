"""Records to strict JSON and back, driven by their own type hints.

Strict means that any JSON reader takes it: a number that is not finite is the string "nan", "inf" or "-inf".
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.report import SCHEMA_VERSION, Report

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(report: Report) -> str:
    """Return the report as strict JSON."""
    return json.dumps(encode(report), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> Report:
    """Read a report back, exactly as it was; ReportUnreadable says where it is not one."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ReportUnreadable(f"this is not JSON (line {error.lineno}: {error.msg})") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise ReportUnreadable("this is JSON but not a torchdelta report: it has no schema_version")
    if version != SCHEMA_VERSION:
        remedy = "upgrade torchdelta to read it" if version > SCHEMA_VERSION else "run the check again"
        raise ReportUnreadable(
            f"this report has schema {version}, and this torchdelta reads {SCHEMA_VERSION}: {remedy}"
        )
    report = decode(Report, data, "report")
    assert isinstance(report, Report)
    return report


def write_report(report: Report, path: Path) -> None:
    """Write the report whole or not at all: a reader never sees half of one."""
    text = to_json(report)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp makes files private; a report is as readable as any other file of the user
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def read_report(path: Path) -> Report:
    """Read a report from a file; the error names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportUnreadable(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return from_json(text)
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{path}: {error}") from error


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
        except ValueError as error:
            raise ReportUnreadable(f"{where}: {data!r} is not a {hint.__name__}") from error
    if hint is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return float(data)
        raise ReportUnreadable(f"{where}: {data!r} is not a number")
    return _expect(hint, data, where)


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in members:
        return None
    others = [member for member in members if member is not type(None)]
    if len(others) == 1:
        return decode(others[0], data, where)
    # a union of several is a Scalar: JSON keeps its types apart, except for floats that are not finite
    if float in others and isinstance(data, str) and data in _NON_FINITE:
        return _NON_FINITE[data]
    if type(data) not in others:
        raise ReportUnreadable(f"{where}: {data!r} is none of {', '.join(member.__name__ for member in others)}")
    return data


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _decode_record(record: Any, data: dict[str, Any], where: str) -> Any:
    hints = _hints(record)
    fields = {field.name: field for field in dataclasses.fields(record)}
    if unknown := sorted(data.keys() - fields.keys()):
        raise ReportUnreadable(f"{where}: unknown {', '.join(unknown)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ReportUnreadable(f"{where}: {', '.join(missing)} missing")
    return record(**{name: decode(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _expect(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ReportUnreadable(f"{where}: expected {kind.__name__}, found {data!r}")
    return data


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
