"""The journal of a reduction on disk: after an interruption, `--resume` continues from the smallest graph so far.

    out/journal.json                          the wanted signature, the budget spent, the known answers
    out/best-1f09a2c3/graph.json, inputs.json the smallest subject that fails, as `storage.graphs` writes it
    out/twin/graph.json, inputs.json          a neighbour of it that passes

A new best subject is written to a directory of its own before the journal names it. So an interruption leaves the old
state or the new one. Which program the journal is about is in `run.json` (`storage.run_directory`), and which graphs in
the journal itself. Start reading at `Journal.write`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchdelta._torch.graphs.nodes import op_name
from torchdelta.errors import ReportUnreadable
from torchdelta.minify.subject import Draw, Subject
from torchdelta.records.codec import decode, encode
from torchdelta.records.failure import Signature
from torchdelta.records.strict_json import read_json, to_text, write_json

_FILE = "journal.json"
_BEST = re.compile(r"best-[0-9a-f]{8}")


def new_best() -> str:
    """Return a new name for the directory of a best subject."""
    return f"best-{os.urandom(4).hex()}"


def graphs_hash(subjects: Sequence[Subject]) -> str:
    """Return a hash of the calls in a program's graphs, by level and operation; weights and sizes do not count."""
    calls = [[subject.origin, *(op_name(node) for node in subject.nodes)] for subject in subjects]
    return hashlib.sha256(to_text(calls).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The state of a reduction."""

    wanted: Signature
    level: str
    """The level of the graph that was captured: `dynamo` or `aot`."""
    graphs: str
    """A hash of the calls in the program's graphs: a program that was edited since has another one."""
    nodes_before: int
    queries: int
    seconds: float
    best: str
    """The directory of the best subject, beside the journal."""
    drawn: dict[str, Draw]
    known: dict[str, bool] = field(default_factory=dict)
    keeps_names: bool = False
    """Whether the failure shows only if the graph keeps the names that the capture gave."""


@dataclass(kw_only=True)
class Journal:
    """The directory of one reduction."""

    directory: Path

    @property
    def is_there(self) -> bool:
        """Whether the directory has a reduction that can be continued."""
        return (self.directory / _FILE).is_file()

    def write(self, subject: Subject, entry: Entry) -> None:
        """Write the best subject, then the journal with the entry that names it, and remove older subjects.

        The subject's directory, `entry.best`, must be new.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        place = self.directory / entry.best
        place.mkdir()
        subject.write(place)
        write_json(self.directory / _FILE, encode(entry), indent=1)
        for other in self.directory.iterdir():
            if other != place and _BEST.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)

    def write_twin(self, subject: Subject) -> None:
        """Write a neighbour of the best subject that passes, in place of an earlier one."""
        place = self.directory / "twin"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        subject.write(place)

    def read(self, *, allow: Sequence[str] = ()) -> tuple[Subject, Entry]:
        """Return the best subject and the entry; raise ReportUnreadable if the files are missing or damaged.

        `allow` names the modules whose functions the subject may call.
        """
        path = self.directory / _FILE
        try:
            entry = decode(Entry, read_json(path, remedy="minify again without --resume"), _FILE)
        except ReportUnreadable as error:
            raise ReportUnreadable(f"{path} has no reduction to continue: {error}") from error
        subject = Subject.read(self.directory / entry.best, allow=allow)
        return Subject(graph=subject.graph, inputs=subject.inputs, drawn=entry.drawn), entry
