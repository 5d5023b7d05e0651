"""The journal of a reduction on disk: whenever it is interrupted, the best so far is there and can be gone on from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchdelta.errors import ReportUnreadable
from torchdelta.minify.subject import Draw, Subject
from torchdelta.records.codec import decode, encode
from torchdelta.records.failure import Signature

_FILE = "journal.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a reduction stands."""

    wanted: Signature
    level: str
    """Of the graph that was captured."""
    nodes_before: int
    queries: int
    seconds: float
    best: str
    """The directory of the best subject, beside the journal."""
    drawn: dict[str, Draw]
    known: dict[str, bool] = field(default_factory=dict)


@dataclass(kw_only=True)
class Journal:
    """A directory of one reduction."""

    directory: Path

    @property
    def is_there(self) -> bool:
        """Tell whether there is something to go on from."""
        return (self.directory / _FILE).is_file()

    def write(self, subject: Subject, entry: Entry) -> None:
        """Write the best subject, then the entry that points to it: a reader sees the old state or the new."""
        self.directory.mkdir(parents=True, exist_ok=True)
        place = self.directory / entry.best
        place.mkdir()
        subject.write(place)
        self._point_to(entry)
        for other in self.directory.glob("best-*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)

    def write_twin(self, subject: Subject) -> None:
        """Write a neighbour of the best that passes."""
        place = self.directory / "twin"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        subject.write(place)

    def _point_to(self, entry: Entry) -> None:
        unfinished = self.directory / f".{_FILE}"
        unfinished.write_text(json.dumps(encode(entry), allow_nan=False, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.directory / _FILE)

    def read(self, *, allow: Sequence[str] = ()) -> tuple[Subject, Entry]:
        """Return where it stands; ReportUnreadable says what is wrong with the files."""
        path = self.directory / _FILE
        try:
            entry = decode(Entry, json.loads(path.read_text(encoding="utf-8")), _FILE)
        except (OSError, ValueError) as error:
            raise ReportUnreadable(f"{path}: there is no reduction to go on with: {error}") from error
        subject = Subject.read(self.directory / entry.best, allow=allow)
        return Subject(graph=subject.graph, inputs=subject.inputs, drawn=entry.drawn), entry
