"""The ledger of a guarded run: every graph that was seen, what came of it, and an index of it all on disk."""

from __future__ import annotations

import contextlib
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
PATIENCE_S = 600.0
PREFIX = "torchdelta-run-"


@dataclass(kw_only=True)
class GuardFindings:
    """What the guards of one run have in common. Graphs may come from several threads."""

    out: Path | None = None
    """Where everything is written; None is a new directory, made when there is something to write."""
    command: str = "locate"
    """What is asked about each finding when the run has ended: `locate` or `diagnose`."""
    seen: dict[int, GuardedGraphRecord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """What checks have cost so far."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    checking: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Held by who checks: two checks at a time would rewind each other's random numbers."""

    def __post_init__(self) -> None:
        self.aftermath = Followup()
        self.has_warned = False
        if self.out is not None:
            self._require_place(self.out)

    def enter(self, seen: GuardedGraphRecord) -> GuardedGraphRecord:
        """Take a graph in; it gets its number."""
        with self.lock:
            numbered = replace(seen, number=len(self.seen) + 1)
            self.seen[numbered.number] = numbered
            return numbered

    def settle(self, seen: GuardedGraphRecord) -> None:
        """Keep what is known about a graph from now on."""
        with self.lock:
            self.seen[seen.number] = seen
            if self.out is not None:
                self._index(seen)

    def directory_for(self, seen: GuardedGraphRecord) -> Path:
        """Return the directory of a graph, made if need be."""
        with self.lock:
            if self.out is None:
                self.out = Path(tempfile.mkdtemp(prefix=PREFIX, dir=Path.cwd()))
                for earlier in self.seen.values():
                    self._index(earlier)
            again = f"-{seen.call}" if seen.call > 1 else ""
            directory = self.out / f"{seen.number:04d}-{seen.level}{again}"
            directory.mkdir(exist_ok=True)
            return directory

    def warn_once(self, text: str) -> None:
        """Warn of the first thing that the run survived; all of them are in the summary."""
        with self.lock:
            is_first, self.has_warned = not self.has_warned, True
        if not is_first:
            return
        # who makes warnings errors wants his own to be; this run is to go on
        with contextlib.suppress(Warning):
            warnings.warn(
                f"torchdelta: {text}. Its recording is in {self.out}, and so are those of others", stacklevel=2
            )

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Be the only one who checks, and count what that costs; Unchecked where another check does not end."""
        # whoever compiles in one thread while another checks may be what that one waits for
        if not self.checking.acquire(timeout=PATIENCE_S):
            raise UncheckedCall("a check in another thread did not end")
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.checking.release()

    def note(self, text: str) -> None:
        """Say something about the run as a whole, once."""
        with self.lock:
            if text not in self.notes:
                self.notes.append(text)

    def finish(self, *, tell: Callable[[str], None] = lambda _: None) -> None:
        """Name the culprit of each finding, and wait for what was begun in the background."""
        for seen in self._findings():
            # who raised says so himself; only where values differ is there somebody to look for
            if self.command == "diagnose" or (seen.verdict is Verdict.DIVERGED and seen.culprit is None):
                tell(f"{self.command}: graph {seen.number}")
                self.settle(self.aftermath.learn(seen, self.command))

    def summary(self) -> GuardSummary:
        """Return what came of it so far."""
        with self.lock:
            known = list(self.seen.values())
            checked = [seen for seen in known if seen.verdict is not None]
            return GuardSummary(
                graphs=len(known),
                checked=len(checked),
                verdicts=dict(Counter(seen.verdict.value for seen in checked if seen.verdict is not None)),
                unchecked=dict(Counter(seen.unchecked for seen in known if seen.verdict is None)),
                findings=tuple(self._findings()),
                out=str(self.out) if self.out is not None else None,
                notes=tuple(self.notes),
                seconds=self.seconds,
            )

    def _findings(self) -> list[GuardedGraphRecord]:
        with self.lock:
            return [seen for seen in self.seen.values() if seen.verdict is not None and seen.verdict.is_failure]

    def _index(self, seen: GuardedGraphRecord) -> None:
        assert self.out is not None
        # one line for each thing that was learnt: whoever is killed leaves the lines that are there
        try:
            with (self.out / INDEX).open("a", encoding="utf-8") as index:
                index.write(to_text(encode(seen)) + "\n")
        except OSError as error:
            self.note(f"the index could not be written: {error}")

    @staticmethod
    def _require_place(out: Path) -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {out}: {error.strerror or error}; name another place") from error
