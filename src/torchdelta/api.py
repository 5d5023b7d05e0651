"""The Python face: live modules and functions in, a record out.

Each function here reads its keywords once, into `CheckOptions` and `SearchLimits`, and calls the feature of its name;
its defaults are those of the records. Other public functions, such as `check_op`, are imported from their features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torchdelta import errors
from torchdelta._torch.process import runtime
from torchdelta.check.baseline import Progress
from torchdelta.check.prepare import prepare
from torchdelta.check.thorough import run_check
from torchdelta.check.values import compare_values
from torchdelta.diagnose import Diagnosis, module_of
from torchdelta.guard.backend import guard
from torchdelta.isolate.pool import Pool
from torchdelta.locate import locator
from torchdelta.locate.sensitivity import measure_sensitivity
from torchdelta.minify.capture import capture_here
from torchdelta.minify.minifier import Minifier
from torchdelta.minify.reducer import Progress as ReductionProgress
from torchdelta.minify.result import MinifiedResult
from torchdelta.nodewise.capture import capture
from torchdelta.nodewise.compare_captures import compare_captures
from torchdelta.nodewise.matching import assign_handles, handles_of
from torchdelta.operators.check import check_op
from torchdelta.passes.pipeline import check_pipeline
from torchdelta.passes.watch import watch_passes
from torchdelta.program.stages import Loss, OptimizerFactory
from torchdelta.records.case import CheckOptions, SearchLimits, case_of
from torchdelta.records.comparison import Scalar
from torchdelta.records.location import Location
from torchdelta.records.recording import complete
from torchdelta.records.report import Report, evidence_of
from torchdelta.records.sensitivity import Sensitivity
from torchdelta.records.verdict import Verdict
from torchdelta.repro.confirm import CleanProcess
from torchdelta.storage.captures import read_capture
from torchdelta.storage.run_directory import REDUCTION, RunDirectory, RunQuestion
from torchdelta.transforms.base import Transform
from torchdelta.transforms.quantize import Quantize

__all__ = [
    "assert_equivalent",
    "assign_handles",
    "capture",
    "check",
    "check_op",
    "check_pipeline",
    "compare",
    "compare_captures",
    "diagnose",
    "guard",
    "handles_of",
    "locate",
    "minify",
    "read_capture",
    "sensitivity",
    "watch_passes",
]

_ERRORS = {
    Verdict.DIVERGED: errors.Diverged,
    Verdict.CRASHED: errors.Crashed,
    Verdict.TIMED_OUT: errors.TimedOut,
    Verdict.INCONCLUSIVE: errors.Inconclusive,
}


def check(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    transform: str | Transform | Callable[..., Any] | None = None,
    candidate: Callable[..., Any] | None = None,
    options: Mapping[str, Scalar] | None = None,
    stages: str | Sequence[str] | None = None,
    policy: str | None = None,
    ignore: str | Sequence[str] = CheckOptions.ignore,
    strict: str | Sequence[str] = CheckOptions.strict,
    seed: int = CheckOptions.seed,
    iterations: int = CheckOptions.iterations,
    steps: int = CheckOptions.steps,
    optimizer: str | OptimizerFactory = CheckOptions.optimizer,
    loss: str | Loss | None = CheckOptions.loss,
    deterministic: bool = CheckOptions.deterministic,
    anomaly: bool = CheckOptions.anomaly,
    semantic: bool = CheckOptions.semantic,
    thorough: bool = CheckOptions.thorough,
    progress: Progress = lambda _: None,
) -> Report:
    """Run a program eagerly and its candidate, and report whether both compute the same.

    `program` is a module or function with its `args` and `kwargs`, the name of a factory (`file.py:factory`), or a
    recorded directory, which has a transform, options, stages and policy of its own for those that are not passed. The
    candidate is the result of `transform` on the program, or the callable `candidate`; UsageError if both are passed.
    Without `stages`, `forward` is compared, and `gradients` if an output requires grad. With `thorough`, each node is
    judged by itself too. A candidate that raises is a verdict on the report. If the program itself raises eagerly, its
    exception is compared with what the candidate does; ProgramError if both raise the same, or if that cannot be asked.
    Every side is a copy, and generators, flags and settings are put back; but a compiler drops what was compiled
    before. `progress` gets the name of each part of the check as it begins.
    """
    check_options = CheckOptions.read(
        transform=transform,
        candidate=candidate,
        options=options,
        stages=stages,
        policy=policy,
        ignore=ignore,
        strict=strict,
        seed=seed,
        iterations=iterations,
        steps=steps,
        optimizer=optimizer,
        loss=loss,
        deterministic=deterministic,
        anomaly=anomaly,
        semantic=semantic,
        thorough=thorough,
    )
    with runtime.preserved():
        return run_check(prepare(program, args, kwargs, options=check_options, progress=progress))


def assert_equivalent(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Check; return the report if its verdict is equivalent, or else raise Diverged, Crashed, TimedOut or Inconclusive.

    Takes the keywords of `check` too. The exception has the report as its `report`.
    """
    report = check(program, args, kwargs, **options)
    if report.verdict is not Verdict.EQUIVALENT:
        raise _ERRORS[report.verdict](evidence_of(report), report=report)
    return report


def locate(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mapping: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    cause: bool = False,
    **options: Any,
) -> Location:
    """Check, and return the culprits in a location: operations that are wrong when given the reference's own inputs.

    The first goes wrong first. Nodes are looked at even if the check passes; there may be no culprits. Takes the
    keywords of `check` too, without `thorough` (UsageError). `mapping` maps names of nodes in the reference's graph to
    names in the candidate's. `memory_bytes` bounds the memory of taps on a compiler. With `cause`, a setting of
    inductor that makes the difference vanish is looked for even if a node was named.
    """
    if "thorough" in options:
        raise errors.UsageError("locate looks at each node anyway: thorough belongs to a check")
    progress = options.pop("progress", lambda _: None)
    return locator.locate(
        program,
        args,
        kwargs,
        options=CheckOptions.read(**options),
        mapping=mapping,
        memory_bytes=memory_bytes,
        cause=cause,
        progress=progress,
    )


def sensitivity(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    transform: str | Quantize = "quantize:x86",
    **options: Any,
) -> Sensitivity:
    """Quantize each module alone that the quantizer would quantize, and all at once; return the effects on all outputs.

    Takes the keywords of `check` too, but stages and policy mean nothing here. The module that loses most is first.
    UsageError if the transform is not a quantizer; ProgramError if the program fails eagerly, if the quantizer fails on
    the whole program, or if the quantized whole fails when run.
    """
    progress = options.pop("progress", lambda _: None)
    check_options = CheckOptions.read(transform=transform, **options)
    return measure_sensitivity(program, args, kwargs, options=check_options, progress=progress)


def minify(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    isolated: bool = True,
    timeout_s: float = SearchLimits.timeout_s,
    memory_bytes: int | None = SearchLimits.memory_bytes,
    queries: int | None = SearchLimits.queries,
    seconds: float | None = SearchLimits.seconds,
    match: str | None = SearchLimits.match,
    level: str = SearchLimits.level,
    progress: Callable[[ReductionProgress], None] = lambda _: None,
    workers: Pool | None = None,
    clean: CleanProcess | None = None,
    script: str | os.PathLike[str] | None = None,
    data: bool = True,
    **options: Any,
) -> MinifiedResult:
    """Return the smallest graph that is found to fail as the program does, a `MinifiedGraph`.

    If no graph of it fails by itself, the result is a `WholeProgram`, whose script runs the program itself. If the
    program does not fail either, or is not the name of a factory, so that a script cannot build it, raise
    NothingToMinify, or ProgramError if torch makes no graph of it. Takes the keywords of `check` too. Queries run in
    workers; without `isolated`, or if no other process can import the transform, in this process. The best graph so far
    is kept in the directory `out`, and `resume` continues from there; UsageError if the directory is in use, is about
    another question, or has files that torchdelta did not write. The first query may take `timeout_s`; `memory_bytes`
    bounds a worker, `queries` and `seconds` the search. `progress` gets the progress of the reduction. Of several
    failures, the first whose signature matches the regular expression `match` is followed. The level `aot` makes graphs
    of AOTAutograd smaller instead of dynamo's. `workers` is a pool and `clean` a process that were started earlier. The
    script is left to the result's `write`; if its path is given as `script`, a draft with or without `data` is run
    while the last queries are.
    """
    check_options = complete(program, CheckOptions.read(**options))
    limits = SearchLimits(
        timeout_s=timeout_s, memory_bytes=memory_bytes, queries=queries, seconds=seconds, match=match, level=level
    )
    if resume and out is None:
        raise errors.UsageError("`resume` needs the directory `out` of the earlier run")
    question = RunQuestion(command="minify", case=case_of(program, check_options), level=level)
    directory = RunDirectory(Path(out), question=question, names=REDUCTION, resume=resume) if out is not None else None
    with runtime.preserved(), directory or nullcontext():
        check = prepare(program, args, kwargs, options=check_options)
        minifier = Minifier(
            case=check.case,
            capture=lambda: capture_here(check, level),
            transform=check_options.transform,
            limits=limits,
            notes=[*directory.notes] if directory is not None else [],
            out=directory.path if directory is not None else None,
            is_resumed=resume,
            is_isolated=isolated,
            program=program if isinstance(program, str) else None,
            options=check_options,
            imports=module_of(program),
            pool=workers,
            clean=clean,
            script=Path(script) if script is not None else None,
            with_data=data,
            tell=progress,
        )
        return minifier.run()


def diagnose(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    timeout_s: float = SearchLimits.timeout_s,
    memory_bytes: int | None = SearchLimits.memory_bytes,
    queries: int | None = SearchLimits.queries,
    seconds: float | None = SearchLimits.seconds,
    match: str | None = SearchLimits.match,
    level: str = SearchLimits.level,
    data: bool = True,
    issue: bool = False,
    resume: bool = False,
    every: bool = False,
    progress: Progress = lambda _: None,
    workers: Pool | None = None,
    **options: Any,
) -> Report:
    """Check; if the program fails, also locate, minify and write a script that shows it; return the report of all that.

    Takes the keywords of `check` too. The directory `out` gets `report.json`, and after a failure `repro.py`, with
    `issue` also the text of an issue. If locating, minifying or the script fails, a note says so, and what was found
    before is kept; `resume` continues from there. UsageError, EnvironmentUnfit and errors of the check are raised.
    `every` minifies each group of failures (culprits of one operation and stage) and not only the first. Without
    `data`, random numbers replace the user's in the script. The limits, `level` and `workers` are as for `minify`.
    """
    diagnosis = Diagnosis(
        program=program,
        args=args,
        kwargs=kwargs,
        options=complete(program, CheckOptions.read(**options)),
        out=Path(out),
        limits=SearchLimits(
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            queries=queries,
            seconds=seconds,
            match=match,
            level=level,
        ),
        with_data=data,
        with_issue=issue,
        is_resumed=resume,
        does_all=every,
        progress=progress,
        workers=workers,
    )
    return diagnosis.run()


def compare(
    reference: Any,
    candidate: Any,
    *,
    truth: Any = None,
    policy: str | None = None,
    ignore: str | Sequence[str] = (),
    strict: str | Sequence[str] = (),
) -> Report:
    """Compare two values of any structure without running anything, and return the report with the verdict.

    With a `truth` (the same in float64) the default policy is `noise`; without one it is `close`, which means
    torch.testing's tolerances, and a note says so. `ignore` and `strict` name clauses of the contract. UsageError if
    the policy or a clause is unknown.
    """
    return compare_values(reference, candidate, truth=truth, policy=policy, ignore=ignore, strict=strict)
