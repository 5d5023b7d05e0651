"""Follow up a finding: run `torchdelta locate` or `diagnose` on its recording, in another process.

The command cannot harm the user's run there, and the run need not wait for it. Start with `Followup.begin` and
`Followup.wait_for`.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchdelta.errors import TorchDeltaError
from torchdelta.program.recordings import trust_flags
from torchdelta.records.codec import read_report
from torchdelta.records.guard import GuardedGraphRecord
from torchdelta.records.location import Location
from torchdelta.records.trust import workplace

LOCATION = "location.json"
DIAGNOSIS = "diagnosis"
WAIT_S = 600.0
"""How long the run waits for a command; the command goes on afterwards."""


@dataclass(frozen=True, kw_only=True)
class FollowupCommand:
    """A command about a recording: `locate` or `diagnose`."""

    directory: Path
    """Where the recording is, and where the answer goes."""
    command: str

    @property
    def log(self) -> Path:
        """The file with what the command printed."""
        return self.directory / f"{self.command}.log"

    @property
    def line(self) -> list[str]:
        """The program and the words of `torchdelta locate` or `diagnose` on the directory.

        The answer goes to `location.json` or to the folder `diagnosis` in that directory.
        """
        location = ["--json", str(self.directory / LOCATION)]
        answer = location if self.command == "locate" else ["--out", str(self.directory / DIAGNOSIS)]
        trusted = trust_flags(self.directory)  # the code that it names is that of this run
        return [sys.executable, "-m", "torchdelta", self.command, str(self.directory), *answer, *trusted]

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command in a new process, whose output goes to the log, and return the process.

        Raise OSError if the process cannot be started or the log cannot be opened.
        """
        with self.log.open("wb") as log:
            # in a session of its own, because a Ctrl-C is meant for the user's run
            return subprocess.Popen(
                self.line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=workplace() or self.directory,  # the script may have deleted its working directory
            )


@dataclass(kw_only=True)
class Followup:
    """Runs the commands about findings one after the other, in a thread of its own."""

    waiting: queue.SimpleQueue[FollowupCommand] = field(default_factory=queue.SimpleQueue, repr=False)
    ends: dict[FollowupCommand, threading.Event] = field(default_factory=dict)
    """For each command an event that is set when it has ended."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while a command is queued or started: several threads of a run may have their first findings at once."""
    is_interrupted: bool = False
    """Whether no command is started any more."""
    process: subprocess.Popen[bytes] | None = None
    """The process of the command that was started last."""

    def begin(self, record: GuardedGraphRecord, command: str) -> threading.Event:
        """Queue a command about a finding, unless it was queued before; return the event that is set when it has ended.

        `command` is `locate` or `diagnose`. The first call starts the thread that runs them. The record must have a
        directory.
        """
        assert record.directory is not None
        followup = FollowupCommand(directory=Path(record.directory), command=command)
        with self.lock:
            if not self.ends:
                # a daemon, because the end of the run does not wait for it: a command that has begun goes on by itself
                threading.Thread(target=self._run_all, daemon=True, name="torchdelta-followup").start()
            if followup not in self.ends:
                self.ends[followup] = threading.Event()
                self.waiting.put(followup)
            return self.ends[followup]

    def wait_for(self, record: GuardedGraphRecord, command: str, *, timeout_s: float = WAIT_S) -> GuardedGraphRecord:
        """Queue a command about a finding, unless that was done, wait for its end; return the record with its answer.

        The answer is the first culprit, and for `diagnose` also the path of a script. The record is returned unchanged
        if it has no directory, or if the command did not end within `timeout_s` or wrote no readable answer. A command
        that did not end goes on.
        """
        if record.directory is None or not self.begin(record, command).wait(timeout_s):
            return record
        read = _read_location if command == "locate" else _read_diagnosis
        return read(record, Path(record.directory))

    def interrupt(self) -> None:
        """End the command that is under way, as a Ctrl-C at its terminal would, and start no more.

        Do not wait for its end: it ends its own workers first. Without a command nothing is ended.
        """
        with self.lock:
            self.is_interrupted = True
            if self.process is not None and self.process.poll() is None:
                with suppress(ProcessLookupError):
                    self.process.send_signal(signal.SIGINT)

    def _start(self, followup: FollowupCommand) -> subprocess.Popen[bytes] | None:
        """Start a command, and keep and return its process; None if no command is started any more.

        Raises what `FollowupCommand.start` raises.
        """
        with self.lock:
            if self.is_interrupted:
                return None
            self.process = followup.start()
            return self.process

    def _run_all(self) -> None:
        """Run the queued commands one after the other, for as long as the process lives, and set the event of each.

        If a command cannot be started, its log says why, unless the directory of the log is gone. Its exit status is
        ignored.
        """
        while True:
            followup = self.waiting.get()
            try:
                if (process := self._start(followup)) is not None:
                    process.wait()
            except OSError as error:
                with suppress(OSError):  # the directory may be gone, which is then the reason
                    followup.log.write_text(f"the command could not be run: {error}\n", encoding="utf-8")
            finally:
                self.ends[followup].set()


def _read_location(record: GuardedGraphRecord, directory: Path) -> GuardedGraphRecord:
    """Return the record with the first culprit in the file that `locate` wrote, or with None if it names none.

    The record is returned unchanged if the file is missing or unreadable.
    """
    try:
        location = read_report(directory / LOCATION, Location)
    except TorchDeltaError:  # the log says why there is none
        return record
    return replace(record, culprit=next(iter(location.culprits), None))


def _read_diagnosis(record: GuardedGraphRecord, directory: Path) -> GuardedGraphRecord:
    """Return the record with the first culprit and the path of the script from the report of `diagnose`.

    Without a culprit there, the record's own stays; without a script, the path is None. The record is returned
    unchanged if the report cannot be read.
    """
    try:
        report = read_report(directory / DIAGNOSIS / "report.json")
    except TorchDeltaError:  # the log says why there is none
        return record
    repro = report.repro.path if report.repro is not None else None
    return replace(record, culprit=next(iter(report.culprits), record.culprit), repro=repro)
