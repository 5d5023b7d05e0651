"""A check of an operator in a worker: whatever it does to its process, there is a report.

This process needs no torch for it: only the worker imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdelta.check.isolated import followed
from torchdelta.errors import ProgramError
from torchdelta.isolate.pool import Pool
from torchdelta.isolate.supervisor import Outcome
from torchdelta.records.codec import decode
from torchdelta.records.operators import OpReport, Probe
from torchdelta.records.report import environment_without_torch
from torchdelta.records.verdict import Verdict

WORKER = "torchdelta.operators.worker"


@dataclass(frozen=True, kw_only=True)
class IsolatedOpCheck:
    """What came of a check of an operator in a worker."""

    report: OpReport
    output: str
    """The end of what the operator printed."""
    warnings: tuple[str, ...] = ()


def check_op_isolated(
    op: str,
    *,
    arguments: Any = None,
    inputs: str | None = None,
    imports: Sequence[str] = (),
    words: Mapping[str, Any],
    seed: int = 0,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> IsolatedOpCheck:
    """Check an operator that is named, on arguments that are described or on those of a factory."""
    call = {"arguments": arguments, "inputs": inputs, "imports": list(imports)}
    request = {"op": op, "call": call, "words": dict(words), "seed": seed}
    with Pool(preload=(WORKER,)) as pool:
        outcome = followed(pool, f"{WORKER}:check_operator", request, timeout_s, memory_bytes, progress)
    if outcome.answer is None:
        return IsolatedOpCheck(report=_of_dead(outcome, op), output=outcome.output)
    return IsolatedOpCheck(
        report=decode(OpReport, outcome.answer["report"], "report"),
        output=outcome.output,
        warnings=tuple(outcome.answer["warnings"]),
    )


def _of_dead(outcome: Outcome, op: str) -> OpReport:
    outcome.raise_own_error()
    failure, part = outcome.failure, outcome.part
    assert failure is not None
    if failure.kind == "exception":
        raise RuntimeError(f"{failure.message}\n{failure.traceback}")
    # the worker tells the name of each probe when it begins, and nothing before the first
    if not part and failure.kind != "timeout":
        raise ProgramError(f"{op} fails when run eagerly: {failure.message}")
    verdict = Verdict.TIMED_OUT if failure.kind == "timeout" else Verdict.CRASHED
    return OpReport(
        op=op,
        arguments=(),
        verdict=verdict,
        probes=(Probe(name=part or "loading", verdict=verdict, reason=failure.message),),
        unasked={},
        notes=("the process ended, and with it what the probes before had found: --probes asks for them alone",),
        environment=environment_without_torch(),
        seconds=outcome.seconds,
    )
