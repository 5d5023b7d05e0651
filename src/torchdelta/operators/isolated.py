"""A check of a named operator in a worker: an operator that crashes or hangs costs the worker, and there is a report.

This process needs no torch for it: only the worker imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdelta.isolate.pool import Pool
from torchdelta.isolate.supervisor import Outcome
from torchdelta.records.failure import Failure
from torchdelta.records.operators import OpReport, Probe
from torchdelta.records.report import environment_without_torch
from torchdelta.records.verdict import Verdict

WORKER = "torchdelta.operators.worker"


@dataclass(frozen=True, kw_only=True)
class IsolatedOpCheck:
    """The result of a check of an operator in a worker."""

    report: OpReport
    output: str
    """The end of the operator's output."""
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
    """Check a named operator in a worker; return its report, the end of the worker's output, and the warnings.

    It is called with `arguments`, as `cli.op_arguments` describes them, or, if `inputs` is not None, with those that
    this factory (`file.py:function`) returns. The worker first imports the modules `imports`. `words` are the other
    keywords of `torchdelta.check_op`; `progress` gets the name of each probe before it is asked. A worker that dies in
    a probe, or exceeds `memory_bytes` there, gives a report with the verdict CRASHED, and one that exceeds `timeout_s`
    (None is no limit) TIMED_OUT. Raises the errors of the check, RuntimeError for any other exception in the worker,
    and ProgramError if the worker dies before the first probe.
    """
    call = {"arguments": arguments, "inputs": inputs, "imports": list(imports)}
    request = {"op": op, "call": call, "words": dict(words), "seed": seed}
    warm = "inductor" if "inductor" in words.get("backends", ()) else ""
    with Pool(preload=(WORKER,), warm=warm) as pool:
        task = f"{WORKER}:check_operator"
        outcome = pool.ask(task, request, deadline_s=timeout_s, memory_bytes=memory_bytes, progress=progress)
    # the worker reports the name of each probe when it begins, and nothing before the first: any part is a candidate's
    result = outcome.read(OpReport, "report", program=op, candidate_parts=frozenset(outcome.parts))
    report = _report_of_death(result, op, outcome) if isinstance(result, Failure) else result
    return IsolatedOpCheck(report=report, output=outcome.output, warnings=outcome.warnings)


def _report_of_death(failure: Failure, op: str, outcome: Outcome) -> OpReport:
    """Return a report on an operator that ended its worker: TIMED_OUT if the failure is a timeout, else CRASHED.

    Its only probe is the one that was under way, or is called "loading" if none was. A note says that the results of
    earlier probes are lost.
    """
    verdict = Verdict.TIMED_OUT if failure.kind == "timeout" else Verdict.CRASHED
    return OpReport(
        op=op,
        arguments=(),
        verdict=verdict,
        probes=(Probe(name=outcome.part or "loading", verdict=verdict, reason=failure.message),),
        unasked={},
        notes=("the process ended, and the results of earlier probes with it: --probes asks for them alone",),
        environment=environment_without_torch(),
        seconds=outcome.seconds,
    )
