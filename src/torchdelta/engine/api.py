"""The Python face: live modules and functions in, a Report out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchdelta import errors, transforms
from torchdelta._torch import runtime, versions
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policies import parse
from torchdelta.engine import steadiness
from torchdelta.engine.baseline import Baseline, Progress
from torchdelta.engine.check import Check
from torchdelta.errors import UsageError
from torchdelta.execute.optimizers import OPTIMIZERS, OptimizerFactory
from torchdelta.execute.programs import Program, load_callable, load_program
from torchdelta.execute.stages import Loss, Plan
from torchdelta.records.case import VALUES, Case
from torchdelta.records.comparison import Comparison, Scalar
from torchdelta.records.report import Questions, Report, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.replacement import Replacement

DEFAULT_STAGES = ("forward", "gradients")

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
    policy: str = "noise",
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
    progress: Progress = lambda _: None,
) -> Report:
    """Run a program and what a transform made of it, and say whether both compute the same.

    `program` is a module or function with its `args` and `kwargs`, or the name of a factory (`file.py:factory`).
    Without `stages`, `forward` is compared, and `gradients` where an output requires grad. Nothing of the caller's is
    run or changed: every side is a copy, and global state is as before afterwards.
    """
    if candidate is not None:
        if transform is not None:
            raise UsageError("name either a transform or a candidate, not both")
        transform = Replacement(candidate)
    if transform is None:
        raise UsageError("name a transform or a candidate to hold the program against")
    if options and not isinstance(transform, str) and (candidate is not None or isinstance(transform, Transform)):
        raise UsageError("options belong to a transform that is named or to a pass: this one was built without them")
    case = Case(
        program=_name(program),
        transform="candidate" if candidate is not None else _name(transform),
        options=dict(options or {}),
        stages=_words(stages) if stages is not None else DEFAULT_STAGES,
        policy=policy,
        seed=seed,
        ignore=_words(ignore),
        strict=_words(strict),
        iterations=iterations,
        steps=steps,
        optimizer=_name(optimizer),
        loss=_name(loss) if loss is not None else None,
        deterministic=deterministic,
        anomaly=anomaly,
        semantic=semantic,
    )
    # a factory draws its weights: from the seed of the case, and without changing anybody's generators
    with runtime.preserved():
        runtime.seed_everything(seed)
        source = _program(program, args, kwargs)
    plan = Plan(
        stages=case.stages,
        seed=seed,
        iterations=iterations,
        steps=steps,
        optimizer=_optimizer(optimizer),
        loss=load_callable(loss, what="loss") if isinstance(loss, str) else loss,
    )
    return Check(
        case=case,
        baseline=Baseline(program=source, plan=plan, deterministic=deterministic, anomaly=anomaly, progress=progress),
        transform=transforms.build(transform, case.options),
        policy=parse(policy),
        stages_by_default=stages is None,
    ).run()


def assert_equivalent(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Check, and raise `Diverged`, `Crashed`, `TimedOut` or `Inconclusive` unless the verdict is equivalent."""
    report = check(program, args, kwargs, **options)
    if report.verdict is not Verdict.EQUIVALENT:
        raise _RAISED[report.verdict](_evidence(report), report=report)
    return report


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
        ignore=_words(ignore),
        strict=_words(strict),
    )
    judge = Judge(policy=parse(chosen), terms=Terms(ignore=frozenset(_words(ignore)), strict=frozenset(_words(strict))))
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


def _program(program: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Program:
    if isinstance(program, str):
        if args or kwargs:
            raise UsageError(f"{program} brings its own arguments: give none, or give the callable itself")
        return load_program(program)
    return Program(name=_name(program), call=program, args=args, kwargs=kwargs or {})


def _words(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names given as a sequence, or as one text with commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else tuple(names)


def _optimizer(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    if not isinstance(optimizer, str):
        return optimizer
    if ":" in optimizer:
        return load_callable(optimizer, what="optimizer factory")
    return OPTIMIZERS.get(optimizer)


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    if isinstance(thing, torch.nn.Module):
        return type(thing).__qualname__
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__


def _evidence(report: Report) -> str:
    lines = [f"{report.case.program} under {report.case.transform}: {report.verdict.value}"]
    for stage in report.stages:
        if stage.reason:
            lines.append(f"  {stage.name}: {stage.reason}")
        guilty = [seen for seen in stage.comparisons if seen.verdict is not Verdict.EQUIVALENT]
        lines += [
            f"  {stage.name} {_line(seen)}" for seen in sorted(guilty, key=lambda seen: seen.rank, reverse=True)[:5]
        ]
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


def _line(seen: Comparison) -> str:
    if seen.worst is None:
        return f"{seen.path}: {seen.reason}"
    worst = seen.worst
    values = f"reference {worst.reference}, candidate {worst.candidate}, truth {worst.truth}"
    return f"{seen.path}: {seen.reason}; worst at {list(worst.index)}: {values}"
