"""What is done about a finding, in a process of its own: the user's run is not held up, and cannot be harmed by it."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchdelta.errors import TorchDeltaError
from torchdelta.records.codec import read_report
from torchdelta.records.guard import GuardedGraphRecord
from torchdelta.records.location import Location

LOCATION = "location.json"
DIAGNOSIS = "diagnosis"
PATIENCE_S = 600.0
"""So long somebody waits; what was not found by then is left to who asks again."""


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """A command about a recording: `locate` or `diagnose`."""

    place: Path
    command: str

    @property
    def log(self) -> Path:
        """What the command printed."""
        return self.place / f"{self.command}.log"

    def run(self) -> None:
        """Run the command as a user would."""
        names_file = ["--json", str(self.place / LOCATION)]
        answer = names_file if self.command == "locate" else ["--out", str(self.place / DIAGNOSIS)]
        with self.log.open("wb") as log:
            # a session of its own: a Ctrl-C is meant for the user's run
            subprocess.run(
                [sys.executable, "-m", "torchdelta", self.command, str(self.place), *answer],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
            )


@dataclass(kw_only=True)
class Followup:
    """Looks into findings, one after the other."""

    waiting: queue.SimpleQueue[Inquiry] = field(default_factory=queue.SimpleQueue, repr=False)
    ended: dict[Inquiry, threading.Event] = field(default_factory=dict)

    def begin(self, seen: GuardedGraphRecord, command: str) -> threading.Event:
        """Look into a finding while the run goes on; what comes back is set when that has ended."""
        assert seen.directory is not None
        inquiry = Inquiry(place=Path(seen.directory), command=command)
        if not self.ended:
            # nobody waits for it at the end of the run: what has begun by then goes on by itself
            threading.Thread(target=self._answer_all, daemon=True, name="torchdelta-aftermath").start()
        if inquiry not in self.ended:
            self.ended[inquiry] = threading.Event()
            self.waiting.put(inquiry)
        return self.ended[inquiry]

    def learn(self, seen: GuardedGraphRecord, command: str, *, patience_s: float = PATIENCE_S) -> GuardedGraphRecord:
        """Wait for what a command finds out, and return that with the finding."""
        if seen.directory is None or not self.begin(seen, command).wait(patience_s):
            return seen
        return _located(seen, Path(seen.directory)) if command == "locate" else _diagnosed(seen, Path(seen.directory))

    def _answer_all(self) -> None:
        while True:
            inquiry = self.waiting.get()
            try:
                inquiry.run()
            except OSError as error:
                inquiry.log.write_text(f"nothing could be found out: {error}\n", encoding="utf-8")
            finally:
                self.ended[inquiry].set()


def _located(seen: GuardedGraphRecord, place: Path) -> GuardedGraphRecord:
    try:
        location = read_report(place / LOCATION, Location)
    except TorchDeltaError:  # the log says why there is none
        return seen
    return replace(seen, culprit=next(iter(location.culprits), None))


def _diagnosed(seen: GuardedGraphRecord, place: Path) -> GuardedGraphRecord:
    try:
        report = read_report(place / DIAGNOSIS / "report.json")
    except TorchDeltaError:  # the log says why there is none
        return seen
    repro = report.repro.path if report.repro is not None else None
    return replace(seen, culprit=next(iter(report.culprits), seen.culprit), repro=repro)
