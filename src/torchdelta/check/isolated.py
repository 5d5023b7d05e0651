"""A check of a named program in a worker: whatever the candidate does to its process, there is a report.

This process needs no torch for it: only the worker imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torchdelta.errors import ProgramError
from torchdelta.isolate.pool import Pool
from torchdelta.isolate.supervisor import Outcome
from torchdelta.records.case import Case
from torchdelta.records.codec import decode
from torchdelta.records.failure import Failure
from torchdelta.records.report import Report, Stage, environment_without_torch
from torchdelta.records.verdict import Verdict

WORKER = "torchdelta.check.worker"
NO_END_S = 30 * 24 * 3600.0
OF_THE_CANDIDATE = frozenset({"candidate", "semantic"})
"""The parts of a check in which the candidate runs: who dies in another one is not its victim."""
_PULSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class IsolatedCheck:
    """What came of a check in a worker."""

    report: Report
    output: str
    """The end of what the program printed."""
    warnings: tuple[str, ...] = ()


def check_isolated(
    program: str,
    words: Mapping[str, Any],
    case: Case,
    *,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    settings: Mapping[str, Any] | None = None,
    pool: Pool | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> IsolatedCheck:
    """Check a program that is named, by the words that `torchdelta.check` takes; `case` is what they amount to."""
    request = {"program": program, "words": dict(words), "settings": dict(settings or {})}
    notes: tuple[str, ...] = ()
    with nullcontext(pool) if pool is not None else Pool(preload=(WORKER,)) as workers:
        outcome = followed(workers, f"{WORKER}:check_program", request, timeout_s, memory_bytes, progress)
        died = outcome.failure
        if died is not None and died.kind != "exception" and outcome.part == "semantic":
            # what shows only in an extra run is no verdict on the native one
            why = f"asking float64 whether it is the same function ended the process ({died.message})"
            notes = (f"{why}: that question was left out",)
            request["words"] = {**words, "semantic": False}
            outcome = followed(workers, f"{WORKER}:check_program", request, timeout_s, memory_bytes, progress)
    if outcome.answer is not None:
        report = decode(Report, outcome.answer["report"], "report")
        return IsolatedCheck(
            report=replace(report, case=case if notes else report.case, notes=(*report.notes, *notes)),
            output=outcome.output,
            warnings=tuple(outcome.answer["warnings"]),
        )
    return IsolatedCheck(report=report_of_dead(outcome, case), output=outcome.output)


def followed(
    pool: Pool,
    task: str,
    request: dict[str, Any],
    timeout_s: float | None,
    memory_bytes: int | None,
    progress: Callable[[str], None],
) -> Outcome:
    """Have a task run, and pass on which part it is at."""
    query = pool.submit(task, request, deadline_s=timeout_s or NO_END_S, memory_bytes=memory_bytes)
    part = ""
    try:
        while not query.is_done():
            if query.part != part:
                part = query.part
                progress(part)
            time.sleep(_PULSE_S)
        return query.result()
    except BaseException:  # a Ctrl-C ends the query, not only the waiting
        query.cancel()
        raise


def report_of_dead(outcome: Outcome, case: Case) -> Report:
    """Return the report of a check whose candidate took the worker with it.

    Raises what the check raised by itself, and ProgramError where the program did it before any candidate ran.
    """
    outcome.raise_own_error()
    failure = outcome.failure
    assert failure is not None
    if failure.kind == "exception":
        raise RuntimeError(f"{failure.message}\n{failure.traceback}")
    if outcome.part not in OF_THE_CANDIDATE and failure.kind != "timeout":
        where = f"in its part {outcome.part!r}" if outcome.part else "while it was loaded"
        raise ProgramError(
            f"{case.program} fails when run eagerly, {where}: {failure.message}{last_line(outcome.output)}"
        )
    return dead(replace(failure, traceback=outcome.output), case, outcome.part)


def dead(failure: Failure, case: Case, part: str = "") -> Report:
    """Return the report of a candidate that ended its process."""
    verdict = Verdict.TIMED_OUT if failure.kind == "timeout" else Verdict.CRASHED
    where = f" (in {part})" if part and part not in OF_THE_CANDIDATE else ""
    return Report(
        verdict=verdict,
        environment=environment_without_torch(),
        case=case,
        stages=(Stage(name=case.stages[0], verdict=verdict, reason=f"{failure.message}{where}"),),
        failure=failure,
    )


def last_line(output: str) -> str:
    """Return the last line that a worker printed, as the end of a message."""
    lines = [line for line in output.splitlines() if line.strip()]
    return f"; the last it printed: {lines[-1].strip()}" if lines else ""
