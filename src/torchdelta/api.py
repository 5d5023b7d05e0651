"""The Python face: live modules and functions in, a Report out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchdelta import errors
from torchdelta.check.baseline import Progress
from torchdelta.check.prepare import prepare
from torchdelta.check.thorough import run_check
from torchdelta.check.values import compare_values
from torchdelta.diagnose import Diagnosis, module_of
from torchdelta.guard.backend import guard
from torchdelta.isolate.pool import Pool
from torchdelta.locate import locator
from torchdelta.locate.sensitivity import sensitivity
from torchdelta.minify.minifier import TIMEOUT_S, Minifier
from torchdelta.minify.reducer import Budget
from torchdelta.minify.reducer import Progress as Reducing
from torchdelta.minify.result import MinifiedGraph
from torchdelta.nodewise.capture import capture
from torchdelta.nodewise.compare_captures import compare_captures
from torchdelta.nodewise.matching import assign_handles, handles_of
from torchdelta.operators.check import check_op
from torchdelta.passes.pipeline import check_pipeline
from torchdelta.passes.watch import watch_passes
from torchdelta.program.stages import Loss, OptimizerFactory
from torchdelta.records.case import DYNAMO
from torchdelta.records.comparison import Scalar
from torchdelta.records.location import Location
from torchdelta.records.recording import completed
from torchdelta.records.report import Report, evidence_of
from torchdelta.records.verdict import Verdict
from torchdelta.repro.confirm import CleanProcess
from torchdelta.storage.captures import read_capture
from torchdelta.transforms.base import Transform

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

_RAISED = {
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
    ignore: str | Sequence[str] = (),
    strict: str | Sequence[str] = (),
    seed: int = 0,
    iterations: int = 1,
    steps: int = 3,
    optimizer: str | OptimizerFactory = "adamw",
    loss: str | Loss | None = None,
    deterministic: bool = False,
    anomaly: bool = False,
    semantic: bool = True,
    thorough: bool = False,
    progress: Progress = lambda _: None,
) -> Report:
    """Run a program and what a transform made of it, and say whether both compute the same.

    `program` is a module or function with its `args` and `kwargs`, the name of a factory (`file.py:factory`), or a
    recorded directory, which brings transform, options, stages and policy where none are given. Without `stages`,
    `forward` is compared, and `gradients` where an output requires grad. Nothing of the caller's is run or changed:
    every side is a copy, and global state is as before afterwards. With `thorough`, each node is looked at by itself
    too.
    """
    prepared = prepare(
        program,
        args,
        kwargs,
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
        progress=progress,
    )
    return run_check(prepared)


def assert_equivalent(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Check, and raise `Diverged`, `Crashed`, `TimedOut` or `Inconclusive` unless the verdict is equivalent."""
    report = check(program, args, kwargs, **options)
    if report.verdict is not Verdict.EQUIVALENT:
        raise _RAISED[report.verdict](evidence_of(report), report=report)
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
    """Check, and name the operation that goes wrong first: the first that is wrong when fed the reference's own inputs.

    Takes what `check` takes. `mapping` tells by name which node of the candidate's graph stands for which of the
    reference's, `memory_bytes` bounds what taps on a compiler may hold, and with `cause` a setting is looked for that
    makes the difference vanish although a node was named.
    """
    return locator.locate(program, args, kwargs, mapping=mapping, memory_bytes=memory_bytes, cause=cause, **options)


def minify(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    isolated: bool = True,
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int | None = None,
    queries: int | None = None,
    seconds: float | None = None,
    match: str | None = None,
    level: str = DYNAMO,
    progress: Callable[[Reducing], None] = lambda _: None,
    workers: Pool | None = None,
    clean: CleanProcess | None = None,
    script: str | os.PathLike[str] | None = None,
    data: bool = True,
    **options: Any,
) -> MinifiedGraph:
    """Find the smallest graph that fails as the program does, each query in a process of its own.

    Takes what `check` takes. The best so far is kept in the directory `out`, from which `resume` goes on. The first
    query may take `timeout_s`; `queries` and `seconds` bound the whole. Of several failures, `match` is a regular
    expression for the one that is meant. NothingToMinify is raised where no graph of the program fails by itself.
    With the level `aot`, what is made smaller are the forward and backward graphs that AOTAutograd makes. `workers` are
    some that got ready while the program was loaded, and `clean` waits for the script; where it is known that this will
    be written to `script`, with or without `data`, it is run as soon as there is something to run.
    """
    options = completed(program, options)
    transform = options.get("transform")
    minifying = Minifier(
        check=prepare(program, args, kwargs, **options),
        transform=transform,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        budget=Budget(queries=queries, seconds=seconds),
        match=match,
        level=level,
        out=Path(out) if out is not None else None,
        is_resumed=resume,
        is_isolated=isolated,
        imports=module_of(program),
        pool=workers,
        clean=clean,
        script=Path(script) if script is not None else None,
        with_data=data,
        tell=progress,
    )
    return minifying.run()


def diagnose(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int | None = None,
    queries: int | None = None,
    seconds: float | None = None,
    match: str | None = None,
    level: str = DYNAMO,
    data: bool = True,
    issue: bool = False,
    resume: bool = False,
    every: bool = False,
    progress: Progress = lambda _: None,
    workers: Pool | None = None,
    **options: Any,
) -> Report:
    """Check, locate, minify and write a script: the whole way from a failing program to one small file.

    Takes what `check` takes. The directory `out` gets `report.json` and `repro.py`, with `issue` also the text of an
    issue. Each step's result is kept if a later one fails, and `resume` goes on from there. `every` minifies each group
    of failures and not only the first; without `data`, random numbers stand for the user's in the script. `level` and
    `workers` are as for `minify`.
    """
    diagnosing = Diagnosis(
        program=program,
        args=args,
        kwargs=kwargs,
        words=completed(program, options),
        out=Path(out),
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        budget=Budget(queries=queries, seconds=seconds),
        match=match,
        level=level,
        with_data=data,
        with_issue=issue,
        is_resumed=resume,
        does_all=every,
        progress=progress,
        workers=workers,
    )
    return diagnosing.run()


def compare(
    reference: Any,
    candidate: Any,
    *,
    truth: Any = None,
    policy: str | None = None,
    ignore: str | Sequence[str] = (),
    strict: str | Sequence[str] = (),
) -> Report:
    """Compare two values of any structure, without running anything.

    With a `truth` (the same in float64) the default policy is `noise`; without one it is `close`, which means
    torch.testing's tolerances, and the report says so.
    """
    return compare_values(reference, candidate, truth=truth, policy=policy, ignore=ignore, strict=strict)
