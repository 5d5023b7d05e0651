"""The file of a sweep: a line for what was asked, and one for each operator as soon as it is through."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.codec import decode, encode
from torchdelta.records.operators import SCHEMA_VERSION, Swept
from torchdelta.records.surroundings import environment

NAME = "swept.jsonl"
_TORCH = "torch"
_SCHEMA = "schema_version"


class SweepFile:
    """What a sweep in a directory has found so far; whoever begins it anew goes on behind that."""

    def __init__(self, directory: Path, words: Mapping[str, str], *, resume: bool) -> None:
        self._path = directory / NAME
        self._header = {_SCHEMA: SCHEMA_VERSION, _TORCH: environment().torch, "words": dict(words)}
        self.swept: dict[tuple[str, str], Swept] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > 0:
                self._go_on(resume=resume)
            else:
                self._append(self._header)
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror or error}; name another place") from error

    def add(self, swept: Swept) -> None:
        """Keep one more, whatever happens next."""
        self.swept[swept.op, swept.dtype] = swept
        self._append(encode(swept))

    def _append(self, data: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, allow_nan=False) + "\n")

    def _go_on(self, *, resume: bool) -> None:
        if not resume:
            raise UsageError(f"{self._path} has a sweep: go on with it by --resume, or name another directory")
        text = self._path.read_bytes()
        whole = text.rfind(b"\n") + 1
        lines = text[:whole].decode(errors="replace").splitlines()
        if not lines:
            raise UsageError(f"{self._path} is no sweep: name another directory")
        self._require_same(self._read(lines[0], 1))
        for number, line in enumerate(lines[1:], start=2):
            try:
                swept = decode(Swept, self._read(line, number), "swept")
            except ReportUnreadable as error:
                raise UsageError(f"{self._path}, line {number}: {error}; remove the line, or the file") from error
            self.swept[swept.op, swept.dtype] = swept
        # whoever was killed while writing left half a line: that operator is asked again
        os.truncate(self._path, whole)

    def _read(self, line: str, number: int) -> dict[str, Any]:
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{self._path}, line {number}, is not JSON: remove the line, or the file") from error
        if not isinstance(data, dict):
            raise UsageError(f"{self._path}, line {number}, is no record of a sweep: remove the line, or the file")
        return data

    def _require_same(self, header: Mapping[str, Any]) -> None:
        if header.get(_SCHEMA) != SCHEMA_VERSION or not isinstance(header.get("words"), dict):
            raise UsageError(f"{self._path} is no sweep that this torchdelta goes on with: name another directory")
        before, now = _asked(header), _asked(self._header)
        for name in dict.fromkeys([*now, *before]):
            if before.get(name) != now.get(name):
                was, is_now = before.get(name) or "none", now.get(name) or "none"
                raise UsageError(
                    f"{self._path} was asked with {name} {was}, not {is_now}: ask the same, or name another directory"
                )


def _asked(header: Mapping[str, Any]) -> dict[str, Any]:
    return {_TORCH: header.get(_TORCH), **header["words"]}
