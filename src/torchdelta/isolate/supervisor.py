"""What came of a query: an answer, or a failure with the last that was heard of it.

Whoever oversees a worker: deadline, memory and output while it runs, and what to make of how it ended.
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
from torchdelta.isolate.directories import QueryDirectory, tail_of
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
        """Return the answer's field, decoded as a `kind`, or the failure by which the candidate ended the worker.

        `runs_candidate` tells by the name of a part whether the candidate runs in it. Raises:
        - the TorchDeltaError that the task raised;
        - RuntimeError if the task raised anything else, because a task catches what a candidate raises;
        - ProgramError if the worker died in a part without a candidate. A timeout is returned from any part.
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
# an answer is looked for often at first, and then every so often that waiting is a small part of the query
_LEAST_S, _PULSE_S, _PART = 0.001, 0.01, 0.05
_LOOK_S = 0.05
_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a query may use."""

    deadline_s: float
    memory_bytes: int | None = None
    output_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("deadline_s", "memory_bytes", "output_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} of a query is {value}: nothing can run within that")


def oversee(
    worker: Worker, place: QueryDirectory, limits: Limits, *, is_cancelled: threading.Event, abandon: Callable[[], None]
) -> Outcome:
    """Wait for an answer or the worker's end, bring the end about when a limit is passed, and say what came of it."""
    started = time.monotonic()
    breached: str | None = None
    patience_ends = float("inf")
    status: int | None = None
    next_look = started + _LOOK_S
    while status is None:
        now = time.monotonic()
        if breached is None and place.answer.exists() and worker.dismiss():
            status = 0
            break
        rest = started + limits.deadline_s - now if breached is None else _PULSE_S
        status = worker.wait(max(_LEAST_S, min(_PULSE_S, rest, _PART * (now - started))))
        now = time.monotonic()
        if status is None and breached is None and (now >= next_look or now - started >= limits.deadline_s):
            next_look = now + _LOOK_S
            breached = _breach(worker, place, limits, seconds=now - started, is_cancelled=is_cancelled)
            if breached is not None:
                worker.end()
                patience_ends = now + _PATIENCE_S
        elif status is None and now > patience_ends:
            abandon()
            patience_ends = float("inf")
    return _outcome(place, limits, status, breached, time.monotonic() - started)


def _breach(
    worker: Worker, place: QueryDirectory, limits: Limits, *, seconds: float, is_cancelled: threading.Event
) -> str | None:
    if is_cancelled.is_set():
        return "cancelled"
    if seconds >= limits.deadline_s:
        return "timeout"
    if place.output.exists() and place.output.stat().st_size > limits.output_bytes:
        return "output"
    group = worker.group
    if limits.memory_bytes is not None and group is not None and process_groups.held_bytes(group) > limits.memory_bytes:
        return "memory"
    return None


def _outcome(place: QueryDirectory, limits: Limits, status: int, breached: str | None, seconds: float) -> Outcome:
    part = place.told_last()
    known: dict[str, Any] = {"output": tail_of(place.output, KEPT_OUTPUT_BYTES), "part": part, "seconds": seconds}
    # an answer that is there is complete, however its worker ended afterwards
    if place.answer.exists():
        said = message_in(place.answer.read_bytes())
        if "answer" in said:
            return Outcome(answer=said["answer"], **known)
        if "raised" in said:
            raised = said["raised"]
            failure = Failure.of_exception(raised["type"], raised["message"], stage=part, traceback=raised["traceback"])
            return Outcome(failure=failure, error=raised["error"], **known)
        breached = "memory"
    return Outcome(failure=_failure(limits, status, breached, part), **known)


def _failure(limits: Limits, status: int, breached: str | None, part: str) -> Failure:
    if breached == "cancelled":
        return Failure.of_cancelled(stage=part)
    if breached == "timeout":
        return Failure.of_timeout(limits.deadline_s, stage=part)
    if breached == "output":
        return Failure.of_output(limits.output_bytes, stage=part)
    if breached == "memory":
        return Failure.of_memory(limits.memory_bytes or 0, stage=part)
    if status < 0:
        return Failure.of_signal(_signal_name(-status), stage=part)
    return Failure.of_exit(status, stage=part)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"
