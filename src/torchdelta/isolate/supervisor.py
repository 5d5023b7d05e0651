"""Watch one worker until its query has an outcome, and end a worker that hangs or exceeds another limit.

`supervise` waits for the answer's file or the worker's end. Meanwhile `_breach` checks the limits: cancellation,
deadline, output, memory. On a breach the worker's group gets SIGTERM and then SIGKILL; if it is still there after
`_PATIENCE_S`, the zygote that should have ended it is killed too. `_outcome` then turns the files and the exit status
into an `Outcome`: an answer, or a failure with the evidence.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torchdelta import errors
from torchdelta.errors import UsageError
from torchdelta.isolate import process_groups
from torchdelta.isolate.directories import QueryDirectory, read_tail
from torchdelta.isolate.protocol import message_in
from torchdelta.isolate.starters import Worker
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
    part: str = ""
    """The part that the task reported last, such as `candidate`."""
    seconds: float = 0.0
    error: str | None = None
    """The name of the class, if the task raised one of torchdelta's own errors."""

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.failure is None):
            raise ValueError("an outcome is either an answer or a failure")

    def read(
        self,
        kind: type[Answer],
        field: str,
        *,
        program: str,
        runs_candidate: Callable[[str], bool] = lambda _: True,
    ) -> Answer | Failure:
        """Return the answer's `field`, decoded as a `kind`, or the failure that ended the worker.

        The failure's traceback is what the worker printed. `program` is the name for messages. `runs_candidate` tells
        by the name of a part whether the candidate runs in it. Raises:
        - the TorchDeltaError that the task raised;
        - RuntimeError if the task raised anything else, because a task catches what a candidate raises;
        - ProgramError if the worker ended in a part without a candidate, unless by a timeout;
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
        if failure.kind != "timeout" and not runs_candidate(self.part):
            where = f"in its part {self.part!r}" if self.part else "while it was loaded"
            raise errors.ProgramError(f"{program} fails when run eagerly, {where}: {failure.message}{self.last_words}")
        return replace(failure, traceback=self.output)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of the warnings that a task returned with its answer."""
        return tuple((self.answer or {}).get("warnings", ()))

    @property
    def last_words(self) -> str:
        """The last line that the worker printed, as the end of a message; empty if it printed none."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"; the last line that it printed: {lines[-1].strip()}" if lines else ""


KEPT_OUTPUT_BYTES = 64 << 10
"""Bytes of output that an outcome keeps, from its end."""
# The supervisor looks for an answer after a share of the time that the query has run, between these bounds: often at
# first, and then so seldom that waiting is a small part of the query.
_MIN_WAIT_S, _MAX_WAIT_S, _WAIT_SHARE = 0.001, 0.01, 0.05
_CHECK_LIMITS_S = 0.05
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
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} of a query is {value}: nothing can run within that")


def supervise(
    worker: Worker, place: QueryDirectory, limits: Limits, *, is_cancelled: threading.Event, abandon: Callable[[], None]
) -> Outcome:
    """Wait for an answer or the worker's end, end it if it exceeds a limit or is cancelled, and return the outcome.

    A worker that has answered is dismissed if it can be, and otherwise waited for. An answer counts even if the worker
    was ended meanwhile. `abandon` is called once if the worker is still there `_PATIENCE_S` after it was told to end.
    """
    started = time.monotonic()
    breach: str | None = None
    patience_ends = float("inf")
    status: int | None = None
    next_check = started + _CHECK_LIMITS_S
    while status is None:
        now = time.monotonic()
        if breach is None and place.answer.exists() and worker.dismiss():
            status = 0
            break
        rest = started + limits.deadline_s - now if breach is None else _MAX_WAIT_S
        status = worker.wait(max(_MIN_WAIT_S, min(_MAX_WAIT_S, rest, _WAIT_SHARE * (now - started))))
        now = time.monotonic()
        if status is None and breach is None and (now >= next_check or now - started >= limits.deadline_s):
            next_check = now + _CHECK_LIMITS_S
            breach = _breach(worker, place, limits, seconds=now - started, is_cancelled=is_cancelled)
            if breach is not None:
                worker.end()
                patience_ends = now + _PATIENCE_S
        elif status is None and now > patience_ends:
            abandon()
            patience_ends = float("inf")
    return _outcome(place, limits, status, breach, time.monotonic() - started)


def _breach(
    worker: Worker, place: QueryDirectory, limits: Limits, *, seconds: float, is_cancelled: threading.Event
) -> str | None:
    """Return the first limit that a running worker exceeds (cancelled, timeout, output, memory), or None.

    `seconds` is how long it has run. Memory is not checked if it has no limit or the worker's group is not known.
    """
    if is_cancelled.is_set():
        return "cancelled"
    if seconds >= limits.deadline_s:
        return "timeout"
    if place.output.exists() and place.output.stat().st_size > limits.output_bytes:
        return "output"
    group = worker.group
    if limits.memory_bytes is not None and group is not None and process_groups.memory_of(group) > limits.memory_bytes:
        return "memory"
    return None


def _outcome(place: QueryDirectory, limits: Limits, status: int, breach: str | None, seconds: float) -> Outcome:
    """Return the outcome of a worker that has answered or ended, from its files, its status and the breach.

    The file of the answer decides if it exists: an answer, the exception of the task, or that memory ran out. Otherwise
    the failure is the breach, or the exit `status` without one.
    """
    part = place.last_part()
    evidence: dict[str, Any] = {"output": read_tail(place.output, KEPT_OUTPUT_BYTES), "part": part, "seconds": seconds}
    # an answer's file is complete, however its worker ended afterwards
    if place.answer.exists():
        message = message_in(place.answer.read_bytes())
        if "answer" in message:
            return Outcome(answer=message["answer"], **evidence)
        if "raised" in message:
            raised = message["raised"]
            failure = Failure.of_exception(raised["type"], raised["message"], stage=part, traceback=raised["traceback"])
            return Outcome(failure=failure, error=raised["error"], **evidence)
        breach = "memory"
    return Outcome(failure=_failure(limits, status, breach, part), **evidence)


def _failure(limits: Limits, status: int, breach: str | None, part: str) -> Failure:
    """Return the failure of a worker that ended without an answer: the breach if there was one, or its exit status.

    A negative status is the number of the signal that ended it. `part` becomes the failure's stage.
    """
    if breach == "cancelled":
        return Failure.of_cancelled(stage=part)
    if breach == "timeout":
        return Failure.of_timeout(limits.deadline_s, stage=part)
    if breach == "output":
        return Failure.of_output(limits.output_bytes, stage=part)
    if breach == "memory":
        return Failure.of_memory(limits.memory_bytes or 0, stage=part)
    if status < 0:
        return Failure.of_signal(_signal_name(-status), stage=part)
    return Failure.of_exit(status, stage=part)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
