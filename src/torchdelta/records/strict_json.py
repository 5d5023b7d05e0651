"""Strict JSON, and files that are complete or absent: all data that torchdelta writes and reads back goes through here.

Strict means that any JSON reader accepts the text. JSON has no word for a number that is not finite, so such a number
is the string "nan", "inf" or "-inf". A text that is one of these words is written with a backslash in front, so that
reading it does not return a number:

    encode_float(math.nan)   ->  "nan"          encode_text("nan")   ->  "\\nan"
    encode_float(0.5)        ->  0.5            encode_text("sum")   ->  "sum"

A file of a kind that may change opens with its format and its version:

    {"format": "torchdelta graph", "graph_version": 1, …}

Start reading at `FileFormat`. `records.codec` turns records into JSON's own types; `storage.values` does so for values
of a graph.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchdelta.errors import ReportUnreadable, UsageError

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""The numbers that JSON cannot hold, by the words that stand for them."""
_ESCAPE = "\\"
_UNFINISHED = ".torchdelta-"


def to_text(data: Any, *, indent: int | None = None, is_compact: bool = False) -> str:
    """Return data as strict JSON, on one line unless `indent` is set; `is_compact` drops the spaces after `,` and `:`.

    Raise ValueError for a NaN, an infinity or a cycle, and TypeError for an object that JSON does not have.
    """
    separators = (",", ":") if is_compact else None
    return json.dumps(data, allow_nan=False, indent=indent, separators=separators)


def from_text(text: str | bytes) -> Any:
    """Return the data that strict JSON encodes; raise ValueError if the text is not strict JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def encode_float(number: float) -> float | str:
    """Return a float as JSON can hold it: the number, or its word if it is not finite."""
    return number if math.isfinite(number) else str(number)


def encode_text(text: str) -> str:
    """Return a text as it is written: with a backslash in front if it would be read as a number or as such an escape.

    That is the case for "nan", "inf" and "-inf", and for these behind backslashes. Any other text is returned itself.
    """
    return _ESCAPE + text if _is_word(text) else text


def decode_text(text: str) -> str:
    """Return the text from which `encode_text` made this one: without the backslash that it added, if it did."""
    return text.removeprefix(_ESCAPE) if _is_word(text) else text


def read_json(path: Path, *, remedy: str) -> Any:
    """Return the data of a JSON file; raise ReportUnreadable if it cannot be read or is not strict JSON.

    `remedy` ends the message about a file that is not JSON: how to get a new one.
    """
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportUnreadable(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ReportUnreadable(f"{path}: this is not JSON, or not all of it: {error}; {remedy}") from error


def write_json(path: Path, data: Any, *, indent: int | None = None) -> None:
    """Replace a file by strict JSON, compact unless `indent` is set; raise UsageError if it cannot be written.

    ValueError or TypeError if strict JSON cannot hold the data (`to_text`). After an error the file is as before.
    """
    write_file(path, to_text(data, indent=indent, is_compact=indent is None) + "\n")


def write_file(path: Path, text: str) -> None:
    """Replace a file by a text in one step; raise UsageError if it cannot be written. Then the file is as before."""
    try:
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file and move it to `path`: a reader sees the old content or all of the new.

    `write` gets the path of the new file, which does not exist yet. Errors are passed on; then the new file is removed,
    and the old content is still there. A link at `path` is replaced, not followed.
    """
    # not from `tempfile`, whose files are private: a report is as readable as any other file of the user
    unfinished = path.parent / f"{_UNFINISHED}{os.urandom(8).hex()}"
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Tell by its name whether a file is one that `replace_file` began and did not move yet.

    Its process may have been killed.
    """
    return re.fullmatch(rf"{re.escape(_UNFINISHED)}[0-9a-f]{{16}}", path.name) is not None


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A kind of JSON file: how its files are marked, and which version this torchdelta reads and writes."""

    kind: str
    """`graph`, `capture` or `recording`."""
    version: int
    remedy: str
    """How to replace a file that is damaged or older: `write the graph again`."""

    def write(self, path: Path, content: Mapping[str, Any], *, indent: int | None = None) -> None:
        """Write the content behind format and version; raise UsageError if the file cannot be written."""
        header = {"format": self._format, self._version_key: self.version}
        write_json(path, {**header, **content}, indent=indent)

    def read(self, path: Path) -> dict[str, Any]:
        """Return the dict that a file of this format holds, without the entries for format and version.

        Raise ReportUnreadable if it cannot be read, is not strict JSON, is of another format or has another version.
        """
        document = read_json(path, remedy=self.remedy)
        entries = document if isinstance(document, dict) else {}
        is_ours = entries.pop("format", None) == self._format
        version = entries.pop(self._version_key, None)
        # the first captures had a version and no format
        if (is_ours or type(version) is int) and version != self.version:
            is_newer = isinstance(version, int) and version > self.version
            remedy = "upgrade torchdelta to read it" if is_newer else self.remedy
            raise ReportUnreadable(
                f"{path}: it has version {version!r}, and this torchdelta reads {self.version}: {remedy}"
            )
        if not is_ours:
            raise ReportUnreadable(f"{path}: this is JSON, but not a {self.kind} that torchdelta wrote; {self.remedy}")
        return entries

    @property
    def _format(self) -> str:
        return f"torchdelta {self.kind}"

    @property
    def _version_key(self) -> str:
        return f"{self.kind}_version"


def _is_word(text: str) -> bool:
    """Tell whether a text is the word of a number, with any count of backslashes in front."""
    return text.lstrip(_ESCAPE) in NON_FINITE


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError, because JSON has no constant of that name, such as `NaN`."""
    raise ValueError(f"{name} is not JSON")
