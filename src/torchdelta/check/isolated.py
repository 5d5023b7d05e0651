"""A check of a named program in a worker: a candidate that crashes or hangs costs the worker, and there is a report.

`check_isolated` sends the options to `check.worker`, waits, and reads the report or explains the worker's death. This
process needs no torch for it: only the worker imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torchdelta.isolate.pool import Pool
from torchdelta.isolate.supervisor import Outcome
from torchdelta.records.case import Case, CheckOptions, case_of
from torchdelta.records.codec import encode
from torchdelta.records.failure import Failure
from torchdelta.records.report import Report, Stage, environment_without_torch
from torchdelta.records.verdict import Verdict

WORKER = "torchdelta.check.worker"
SEMANTIC = "semantic"
CANDIDATE_PARTS = frozenset({"candidate", SEMANTIC})
"""The parts of a check in which the candidate runs. A crash before the first of them is not the candidate's fault. A
crash after it is, because the candidate may have damaged memory, and the reference had run before."""


@dataclass(frozen=True, kw_only=True)
class IsolatedCheck:
    """The result of a check in a worker."""

    report: Report
    output: str
    """The end of the program's output."""
    warnings: tuple[str, ...] = ()


def warm_pool(
    transform: object, *, workers: int = 1, preload: Sequence[str] = (), from_here: bool = False, warm: str = ""
) -> Pool:
    """Return a pool, not entered yet, whose workers are ready for a check under this transform.

    They have imported what a check needs and the modules `preload`. If the transform is inductor, it has compiled once
    before they are forked, because its first compile looks for the machine's vector instructions, which takes longer
    than a small check; for any other transform, the backend `warm` has, if it is not empty. With `from_here` the
    workers are forked from this process, which has to be a single thread.
    """
    is_inductor = isinstance(transform, str) and transform.removeprefix("backend:") == "inductor"
    return Pool(
        workers=workers,
        preload=(f"{WORKER}:get_ready", *preload),
        warm="inductor" if is_inductor else warm,
        from_here=from_here,
    )


def check_isolated(
    program: str,
    options: CheckOptions,
    *,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    settings: Mapping[str, Any] | None = None,
    pool: Pool | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> IsolatedCheck:
    """Check a named program in a worker, under complete, named options; return its report and the worker's output.

    `settings` are compiler settings that the worker has during the check. Without a `pool`, a warm one is made; one
    that is passed stays open. `timeout_s` and `memory_bytes` limit each query, and `progress` gets the name of each
    part of the check as it begins. If the candidate ends the worker, the report is `crashed`; if a deadline passes,
    `timed_out`. If either happens in the semantic question, the check runs once more without it, with a note. Raises
    what `Outcome.read` raises, such as ProgramError if the worker died where no candidate runs.
    """
    case = case_of(program, options)
    notes: tuple[str, ...] = ()

    def ask(question: CheckOptions) -> Outcome:
        request = {"program": program, "options": encode(question), "settings": dict(settings or {})}
        task = f"{WORKER}:check_program"
        return workers.ask(task, request, deadline_s=timeout_s, memory_bytes=memory_bytes, progress=progress)

    with nullcontext(pool) if pool is not None else warm_pool(options.transform) as workers:
        outcome = ask(options)
        death = outcome.failure
        if death is not None and death.kind != "exception" and outcome.part == SEMANTIC:
            # a failure of an extra run is not a verdict on the native one
            why = f"asking float64 whether it is the same function ended the process ({death.message})"
            notes = (f"{why}: that question was left out",)
            outcome = ask(replace(options, semantic=False))
    result = outcome.read(Report, "report", program=program, candidate_parts=CANDIDATE_PARTS)
    if isinstance(result, Failure):
        return IsolatedCheck(report=report_of_death(result, case, outcome.part), output=outcome.output)
    report = replace(result, case=case, notes=(*result.notes, *notes))
    return IsolatedCheck(report=report, output=outcome.output, warnings=outcome.warnings)


def report_of_death(failure: Failure, case: Case, part: str = "") -> Report:
    """Return the report of a check whose worker ended by this failure: `timed_out` after a timeout, or else `crashed`.

    `part` is the part of the check that the worker reported last. The report has the case's first stage alone, without
    comparisons; its reason is the failure's message, with the part if no candidate runs in it.
    """
    verdict = Verdict.TIMED_OUT if failure.kind == "timeout" else Verdict.CRASHED
    where = f" (in its part {part!r})" if part and part not in CANDIDATE_PARTS else ""
    return Report(
        verdict=verdict,
        environment=environment_without_torch(),
        case=case,
        stages=(Stage(name=case.stages[0], verdict=verdict, reason=f"{failure.message}{where}"),),
        failure=failure,
    )
