"""The findings of a guarded run: a record of every graph, and an index of them on disk.

All guards of a run share one `GuardFindings`. A record is added when its graph is compiled, and updated whenever a
check or a command has an answer. `summary` counts them for the report.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchdelta.errors import UsageError
from torchdelta.guard.followup import Followup
from torchdelta.passes.real_calls import UncheckedCall
from torchdelta.records.codec import encode
from torchdelta.records.guard import GuardedGraphRecord, GuardSummary
from torchdelta.records.strict_json import to_text
from torchdelta.records.verdict import Verdict

INDEX = "index.jsonl"
LOCK_WAIT_S = 600.0
"""How long a check waits for a check in another thread, before it gives up."""
PREFIX = "torchdelta-run-"


@dataclass(kw_only=True)
class GuardFindings:
    """The records that the guards of one run share. Graphs may come from several threads."""

    out: Path | None = None
    """Where everything is written; None is a new directory, made when there is something to write."""
    workplace: Path = field(default_factory=Path.cwd)
    """Where that new directory is made: the script may leave its working directory, or delete it."""
    command: str = "locate"
    """The command that is run on each finding when the run has ended: `locate` or `diagnose`."""
    records: dict[int, GuardedGraphRecord] = field(default_factory=dict)
    """The latest record of each graph, by its number."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """How long all checks took so far."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    checking: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Held during a check, because two checks at a time would rewind each other's random numbers."""

    def __post_init__(self) -> None:
        """Make the directory `out`, if one is given; UsageError if it cannot be made."""
        self.followup = Followup()
        self.has_warned = False
        self._directories: dict[str, Path] = {}
        if self.out is not None:
            self._require_directory(self.out)

    def add(self, record: GuardedGraphRecord) -> GuardedGraphRecord:
        """Keep a copy of the record of a new graph with the next number, from 1, and return it; nothing is written."""
        with self.lock:
            numbered = replace(record, number=len(self.records) + 1)
            self.records[numbered.number] = numbered
            return numbered

    def update(self, record: GuardedGraphRecord) -> None:
        """Replace the record of the graph with the same number; append it to the index if there is a directory."""
        with self.lock:
            self.records[record.number] = record
            if self.out is not None:
                self._write_to_index(record)

    def directory_for(self, record: GuardedGraphRecord) -> Path:
        """Return the directory for the recording of a graph's call, within `out`, and make it the first time.

        Its name has the graph's number and level, and the call's number from the second call on. If another guard, run
        or process made one of that name, a number follows, because its recording and reports stay. Without `out`, a new
        directory in `workplace` becomes `out`, or one among the temporary files if that is gone; all earlier records
        are written to its index. OSError if a directory cannot be made.
        """
        with self.lock:
            if self.out is None:
                workplace = self.workplace if self.workplace.is_dir() else None
                self.out = Path(tempfile.mkdtemp(prefix=PREFIX, dir=workplace))
                for earlier in self.records.values():
                    self._write_to_index(earlier)
            again = f"-{record.call}" if record.call > 1 else ""
            name = f"{record.number:04d}-{record.level}{again}"
            if name not in self._directories:
                self._directories[name] = _make_new_directory(self.out, name)
            self._directories[name].mkdir(exist_ok=True)  # the script may have removed it since
            return self._directories[name]

    def warn_once(self, text: str) -> None:
        """Warn of a failure that the run survived, if it is the first of the run; otherwise do nothing.

        It says where the recordings are, if there are any. A warning that the script's filters turn into an exception
        is dropped.
        """
        with self.lock:
            is_first, self.has_warned = not self.has_warned, True
        if not is_first:
            return
        # a script that turns warnings into errors means its own; this run is to go on
        with contextlib.suppress(Warning):
            where = f". Its recording is in {self.out}, and so are those of others" if self.out is not None else ""
            warnings.warn(f"torchdelta: {text}{where}", stacklevel=2)

    @contextmanager
    def exclusive_check(self) -> Iterator[None]:
        """Let no other thread check while the context is open, and add its duration to `seconds`.

        A check in another thread is waited for. Raise UncheckedCall if it does not end within `LOCK_WAIT_S`.
        """
        # a timeout, because the check in the other thread may itself wait for this thread's compilation
        if not self.checking.acquire(timeout=LOCK_WAIT_S):
            raise UncheckedCall("a check in another thread did not end")
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.checking.release()

    def note(self, text: str) -> None:
        """Add a note about the run as a whole, unless it is there already."""
        with self.lock:
            if text not in self.notes:
                self.notes.append(text)

    def finish(self, *, tell: Callable[[str], None] = lambda _: None) -> None:
        """Run `self.command` on each failure that needs it, wait for the answer, and update the record with it.

        `diagnose` runs on every failure; `locate` only on a graph that diverged and has no culprit yet. A command that
        was begun earlier is not run again, only waited for. `tell` gets a line before each command. A record without a
        recording, or without a readable answer within `followup.WAIT_S`, stays as it is.
        """
        for record in self._failures():
            # an exception names its own culprit; only different values need a search
            if self.command == "diagnose" or (record.verdict is Verdict.DIVERGED and record.culprit is None):
                tell(f"{self.command}: graph {record.number}")
                self.update(self.followup.wait_for(record, self.command))

    def summary(self) -> GuardSummary:
        """Return the summary so far: counts of graphs, in all and by verdict, failures, notes, and seconds of checks.

        Graphs without a verdict are counted by the reason that their record has.
        """
        with self.lock:
            records = list(self.records.values())
            checked = [record for record in records if record.verdict is not None]
            return GuardSummary(
                graphs=len(records),
                checked=len(checked),
                verdicts=dict(Counter(record.verdict.value for record in checked if record.verdict is not None)),
                unchecked=dict(Counter(record.unchecked for record in records if record.verdict is None)),
                findings=tuple(self._failures()),
                out=str(self.out) if self.out is not None else None,
                notes=tuple(self.notes),
                seconds=self.seconds,
            )

    def _failures(self) -> list[GuardedGraphRecord]:
        """Return the records of the graphs whose verdict is a failure: diverged, crashed or timed out."""
        with self.lock:
            records = self.records.values()
            return [record for record in records if record.verdict is not None and record.verdict.is_failure]

    def _write_to_index(self, record: GuardedGraphRecord) -> None:
        """Append a record to the index file in `out` as one line of JSON; an OSError becomes a note."""
        assert self.out is not None
        # a line for every update, because a process that is killed leaves the lines that are there
        try:
            with (self.out / INDEX).open("a", encoding="utf-8") as index:
                index.write(to_text(encode(record)) + "\n")
        except OSError as error:
            self.note(f"the index could not be written: {error}")

    @staticmethod
    def _require_directory(out: Path) -> None:
        """Make a directory and its parents, unless it is there; UsageError if it cannot be made."""
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {out}: {error.strerror or error}; name another place") from error


def _make_new_directory(parent: Path, name: str) -> Path:
    """Make a directory of that name, or of `NAME.2`, `NAME.3`, … if there is one already, and return its path.

    OSError if it cannot be made.
    """
    for place in itertools.count(1):
        directory = parent / (name if place == 1 else f"{name}.{place}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError("unreachable")
