"""The Python face: live modules and functions in, a Report out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchdelta import errors
from torchdelta._torch import versions
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policies import parse
from torchdelta.engine import steadiness
from torchdelta.engine.baseline import Progress
from torchdelta.engine.diagnose import Diagnosing, module_of
from torchdelta.engine.guard import guard
from torchdelta.engine.locate import Locating
from torchdelta.engine.minified import Minified
from torchdelta.engine.minify import TIMEOUT_S, Minifying
from torchdelta.engine.opcheck import check_op
from torchdelta.engine.pipeline import check_pipeline
from torchdelta.engine.prepare import prepare
from torchdelta.engine.reasons import evidence_of
from torchdelta.engine.sensitivity import sensitivity
from torchdelta.engine.thorough import ask_locally
from torchdelta.engine.watch import watch_passes
from torchdelta.errors import UsageError
from torchdelta.execute.optimizers import OptimizerFactory
from torchdelta.execute.stages import Loss
from torchdelta.isolate.pool import Pool
from torchdelta.locate.capture import capture, read_capture
from torchdelta.locate.compare_captures import compare_captures
from torchdelta.locate.handles import assign_handles, handles_of
from torchdelta.minify.reducer import Budget
from torchdelta.minify.reducer import Progress as Reducing
from torchdelta.records.case import DYNAMO, VALUES, Case, words_of
from torchdelta.records.comparison import Scalar
from torchdelta.records.location import Location
from torchdelta.records.recording import completed
from torchdelta.records.report import Questions, Report, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.repro.confirm import Clean
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
    report = prepared.run()
    return ask_locally(prepared, report) if thorough else report


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
    if "thorough" in options:
        raise UsageError("locate looks at each node anyway: thorough belongs to a check")
    if memory_bytes is not None and (not isinstance(memory_bytes, int) or memory_bytes < 0):
        raise UsageError(f"memory_bytes is a number of bytes, not {memory_bytes!r}")
    found = Locating(
        check=prepare(program, args, kwargs, **options), given=mapping, limit_bytes=memory_bytes, with_cause=cause
    )
    return found.run()


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
    clean: Clean | None = None,
    script: str | os.PathLike[str] | None = None,
    data: bool = True,
    **options: Any,
) -> Minified:
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
    minifying = Minifying(
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
    diagnosing = Diagnosing(
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
    has_truth = truth is not None
    chosen = policy if policy is not None else "noise" if has_truth else "close"
    case = Case(
        program="two values",
        transform="none",
        stages=(VALUES,),
        policy=chosen,
        ignore=words_of(ignore),
        strict=words_of(strict),
    )
    terms = Terms(ignore=frozenset(words_of(ignore)), strict=frozenset(words_of(strict)))
    judge = Judge(policy=parse(chosen), terms=terms)
    comparisons, unmatched = judge.compare(
        leaves_of(reference), leaves_of(candidate), leaves_of(truth) if has_truth else None
    )
    stage = Stage.of(VALUES, tuple(comparisons), "" if comparisons else "nothing was compared: both are empty")
    stage = steadiness.doubt_coarse(stage)
    unasked = "not asked: nothing was run"
    if not has_truth:
        questions = Questions(native="not asked: no truth was given", semantic=unasked)
    elif not judge.policy.needs_truth:
        questions = Questions(native=f"not asked: the policy {chosen} needs no truth", semantic=unasked)
    else:
        questions = Questions(semantic=unasked)
    return Report(
        verdict=stage.verdict,
        environment=versions.environment(),
        case=case,
        stages=(stage,),
        questions=questions,
        unmatched=tuple(unmatched),
        notes=() if policy is not None or has_truth else ("no truth was given: judged by torch.testing's tolerances",),
    )
