"""Watch one worker until its query has an outcome, and end a worker that hangs or exceeds another limit.

`supervise` waits for the answer's file or the worker's end. Meanwhile `_breach` checks the limits: cancellation,
deadline, output, memory. On a breach the worker's group gets SIGTERM and then SIGKILL; if it is still there after
`_PATIENCE_S`, the zygote that should have ended it is killed too. `_WorkerEnd` then turns the files and the exit status
into an `Outcome`: an answer, or a failure with the evidence.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torchdelta import errors
from torchdelta.isolate import process_groups
from torchdelta.isolate.directories import FILES_LOST, QueryDirectory, QueryTraces
from torchdelta.isolate.protocol import Message, message_in
from torchdelta.isolate.starters import Worker
from torchdelta.records.case import require_positive
from torchdelta.records.codec import decode
from torchdelta.records.failure import Failure

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a query: either an answer or a failure. Callers use `read`, which decodes or explains it."""

    answer: dict[str, Any] | None = None
    failure: Failure | None = None
    output: str = ""
    """The end of what the worker and its children printed."""
    parts: tuple[str, ...] = ()
    """The parts that the task reported, such as `candidate`, in their order."""
    has_begun: bool = True
    """Whether the task began: the worker was ready for it."""
    seconds: float = 0.0
    error: str | None = None
    """The name of the class, if the task raised one of torchdelta's own errors."""

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one of `answer` and `failure` is set."""
        if (self.answer is None) == (self.failure is None):
            raise ValueError("an outcome is either an answer or a failure")

    def read(
        self,
        kind: type[Answer],
        field: str,
        *,
        program: str,
        candidate_parts: Collection[str] | None = None,
    ) -> Answer | Failure:
        """Return the answer's `field`, decoded as a `kind`, or the failure that ended the worker.

        The failure's traceback is what the worker printed. `program` is the name for messages. `candidate_parts` are
        the parts in which the candidate runs; None means that it always does. Raises:
        - the TorchDeltaError that the task raised;
        - RuntimeError if the task raised anything else, because a task catches what a candidate raises;
        - ProgramError if memory ran out and the part that was reported last is not one of `candidate_parts`, or if the
          worker ended otherwise, but not by a timeout, and no reported part is one of them;
        - ReportUnreadable if the field encodes no `kind`.
        """
        if self.answer is not None:
            answer: Answer = decode(kind, self.answer[field], field)
            return answer
        failure = self.failure
        assert failure is not None
        if self.error is not None:
            error: type[errors.TorchDeltaError] = getattr(errors, self.error)
            raise error(failure.message)
        if failure.kind == "exception":
            raise RuntimeError(f"{program}: {failure.message}\n{failure.traceback}")
        where = f"in its part {self.part!r}" if self.part else "while it was loaded"
        if failure.kind == "memory" and not self.is_in(candidate_parts):
            # a limit of ours, which says nothing about the candidate
            raise errors.ProgramError(
                f"{program} needs too much memory by itself, {where}: {failure.message}; allow it more"
            )
        if failure.kind != "timeout" and not self._has_run(candidate_parts):
            raise errors.ProgramError(f"{program} fails when run eagerly, {where}: {failure.message}{self.last_words}")
        return replace(failure, traceback=self.output)

    @property
    def part(self) -> str:
        """The part that the task reported last; empty if it reported none."""
        return self.parts[-1] if self.parts else ""

    def is_in(self, candidate_parts: Collection[str] | None) -> bool:
        """Tell whether the part that the task reported last is one of these; True if `candidate_parts` is None."""
        return candidate_parts is None or self.part in candidate_parts

    def _has_run(self, candidate_parts: Collection[str] | None) -> bool:
        """Tell whether the task reported any of these parts; True if `candidate_parts` is None."""
        # memory that the candidate damaged may end the process only later
        return candidate_parts is None or any(part in candidate_parts for part in self.parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings that the task returned with its answer, as texts; empty if the task did not answer."""
        return tuple((self.answer or {}).get("warnings", ()))

    @property
    def last_words(self) -> str:
        """The text `; the last line that it printed: …`, for the end of a message; empty if the worker printed nothing.

        Blank lines, and Python's list of extension modules after a crash, do not count.
        """
        # Python ends its report of a crash with the names of all loaded libraries
        lines = [
            line for line in self.output.splitlines() if line.strip() and not line.startswith("Extension modules:")
        ]
        return f"; the last line that it printed: {lines[-1].strip()}" if lines else ""


KEPT_OUTPUT_BYTES = 64 << 10
"""Bytes of output that an outcome keeps, from its end."""
# The supervisor looks for an answer after a share of the time that the query has run, between these bounds: often at
# first, and then so seldom that waiting is a small part of the query.
_MIN_WAIT_S, _MAX_WAIT_S, _WAIT_SHARE = 0.001, 0.01, 0.05
_CHECK_LIMITS_S = 0.05
_LEAST_FREE_BYTES = 1 << 16
"""With less than this, a disk counts as full: no answer fits."""
_MOST_ANSWER_BYTES = 1 << 30
_PATIENCE_S = 5.0
"""How long a worker may take to end after SIGTERM and SIGKILL before its starter is given up."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a query. With None for `memory_bytes`, its memory is not limited."""

    deadline_s: float
    memory_bytes: int | None = None
    output_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Raise UsageError if a limit is not positive."""
        for name in ("deadline_s", "memory_bytes", "output_bytes"):
            require_positive(f"{name} of a query", getattr(self, name))


def supervise(
    worker: Worker,
    place: QueryDirectory,
    traces: QueryTraces,
    limits: Limits,
    *,
    token: str,
    is_cancelled: threading.Event,
    abandon: Callable[[], None],
) -> Outcome:
    """Wait for an answer or the worker's end, end it if it exceeds a limit or is cancelled, and return the outcome.

    An answer has to repeat the `token`. A worker that has answered is dismissed if it can be, and otherwise waited for.
    An answer counts even if the worker was ended meanwhile. `abandon` is called once if the worker is still there
    `_PATIENCE_S` after it was told to end.
    """
    started = time.monotonic()
    breach: str | None = None
    patience_ends = float("inf")
    status: int | None = None
    next_check = started + _CHECK_LIMITS_S
    while status is None:
        now = time.monotonic()
        if breach is None and os.path.lexists(place.answer) and worker.dismiss():
            status = 0
            break
        rest = started + limits.deadline_s - now if breach is None else _MAX_WAIT_S
        status = worker.wait(max(_MIN_WAIT_S, min(_MAX_WAIT_S, rest, _WAIT_SHARE * (now - started))))
        now = time.monotonic()
        if status is None and breach is None and (now >= next_check or now - started >= limits.deadline_s):
            next_check = now + _CHECK_LIMITS_S
            breach = _breach(worker, traces, limits, seconds=now - started, is_cancelled=is_cancelled)
            if breach is not None:
                worker.end()
                patience_ends = now + _PATIENCE_S
        elif status is None and now > patience_ends:
            abandon()
            patience_ends = float("inf")
    ending = _WorkerEnd(place=place, traces=traces, limits=limits, status=status, breach=breach)
    return ending.outcome(token, seconds=time.monotonic() - started)


def _breach(
    worker: Worker, traces: QueryTraces, limits: Limits, *, seconds: float, is_cancelled: threading.Event
) -> str | None:
    """Return the first limit that a running worker exceeds (cancelled, timeout, output, memory), or None.

    `seconds` is how long it has run. Memory is not checked if it has no limit or the worker's group is not known.
    """
    if is_cancelled.is_set():
        return "cancelled"
    if seconds >= limits.deadline_s:
        return "timeout"
    if traces.output_bytes > limits.output_bytes:
        return "output"
    group = worker.group
    if limits.memory_bytes is not None and group is not None and process_groups.memory_of(group) > limits.memory_bytes:
        return "memory"
    return None


@dataclass(frozen=True, kw_only=True)
class _WorkerEnd:
    """How a worker ended, or that it has answered: its files, its exit status, and the limit that it exceeded."""

    place: QueryDirectory
    traces: QueryTraces
    limits: Limits
    status: int
    """Negative: the number of the signal that ended it."""
    breach: str | None

    def outcome(self, token: str, *, seconds: float) -> Outcome:
        """Return the outcome: the content of the answer's file if there is one, or else the failure of the ending.

        `seconds` is how long the query took, which the outcome only reports. The file has an answer, the exception of
        the task, or that memory ran out; the last two are failures. It is a failure of the kind `files` if the file is
        damaged or lacks the `token`, or if the task raised an exception that is not torchdelta's own and the query's
        files were deleted or are on a full disk.
        """
        parts = self.traces.parts
        stage = parts[-1] if parts else ""
        found: dict[str, Any] = {
            "output": self.traces.output_tail(KEPT_OUTPUT_BYTES),
            "parts": parts,
            "has_begun": self.traces.has_begun,
            "seconds": seconds,
        }
        # an answer's file is complete, however its worker ended afterwards
        if not os.path.lexists(self.place.answer):
            return Outcome(failure=self._failure(stage), **found)
        message = _read_answer(self.place.answer, token)
        if message is None:
            return Outcome(failure=Failure.of_files("the file of its answer is damaged", stage=stage), **found)
        if "answer" in message:
            return Outcome(answer=message["answer"], **found)
        if "memory" in message:
            return Outcome(failure=Failure.of_refused_memory(message["memory"], stage=stage), **found)
        raised = message["raised"]
        if raised["error"] is None and (why := self._lost_files()):
            return Outcome(failure=Failure.of_files(f"{why} ({raised['message']})", stage=stage), **found)
        failure = Failure.of_exception(raised["type"], raised["message"], stage=stage, traceback=raised["traceback"])
        return Outcome(failure=failure, error=raised["error"], **found)

    def _failure(self, stage: str) -> Failure:
        """Return the failure of a worker that ended without an answer: the breach, lost files, or its exit status.

        `stage` is the failure's stage: the part that began last.
        """
        if self.breach == "cancelled":
            return Failure.of_cancelled(stage=stage)
        if self.breach == "timeout":
            return Failure.of_timeout(self.limits.deadline_s, stage=stage)
        if self.breach == "output":
            return Failure.of_output(self.limits.output_bytes, stage=stage)
        if self.breach == "memory":
            return Failure.of_memory(self.limits.memory_bytes or 0, stage=stage)
        if self.status == FILES_LOST:
            return Failure.of_files(self._lost_files() or "its files could not be written", stage=stage)
        if self.status < 0:
            return Failure.of_signal(_signal_name(-self.status), stage=stage)
        return Failure.of_exit(self.status, stage=stage)

    def _lost_files(self) -> str:
        """Return what is wrong with the files of the query: deleted, or on a full disk; empty if neither is known."""
        if not all(path.is_dir() for path in (self.place.directory, self.place.scratch, self.place.cache)):
            return "the directory of its query was deleted"
        disk = shutil.disk_usage(self.place.directory)
        return f"the disk of {self.place.directory.parent} is full" if disk.free < _LEAST_FREE_BYTES else ""


def _read_answer(path: Path, token: str) -> Message | None:
    """Return the message in the file of an answer, or None if it is damaged or does not have the token."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_ANSWER_BYTES:
            return None
        message = message_in(path.read_bytes())
    except (OSError, ValueError):
        return None
    return message if message.get("token") == token and message.keys() & {"answer", "raised", "memory"} else None


def _signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV, or `signal NUMBER` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
