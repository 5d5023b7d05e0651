"""From what a user names to a check that can be run: programs loaded, transforms built, policies read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchdelta import transforms
from torchdelta._torch.process import runtime
from torchdelta.check.baseline import Baseline, Progress
from torchdelta.check.check import Check
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import UsageError
from torchdelta.program.loading import import_program, load_program
from torchdelta.program.programs import Program, load_callable
from torchdelta.program.stages import OPTIMIZERS, Loss, OptimizerFactory, Plan
from torchdelta.records.case import DEFAULT_STAGES, Case, words_of
from torchdelta.records.comparison import Scalar
from torchdelta.records.recording import completed
from torchdelta.transforms.base import Transform
from torchdelta.transforms.replacement import Replacement


def prepare(
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
) -> Check:
    """Return the check that `torchdelta.check` would run, where these words are explained."""
    if candidate is not None:
        if transform is not None:
            raise UsageError("name either a transform or a candidate, not both")
        transform = Replacement(candidate)
    given = {"transform": transform, "options": options, "stages": stages, "policy": policy}
    transform, options, stages, policy = map(completed(program, given).__getitem__, given)
    if options and not isinstance(transform, str) and (candidate is not None or isinstance(transform, Transform)):
        raise UsageError("options belong to a transform that is named or to a pass: this one was built without them")
    case = Case(
        program=name_of(program),
        transform="candidate" if candidate is not None else name_of(transform),
        options=dict(options or {}),
        stages=words_of(stages) if stages is not None else DEFAULT_STAGES,
        policy=policy,
        seed=seed,
        ignore=words_of(ignore),
        strict=words_of(strict),
        iterations=iterations,
        steps=steps,
        optimizer=name_of(optimizer),
        loss=name_of(loss) if loss is not None else None,
        deterministic=deterministic,
        anomaly=anomaly,
        semantic=semantic,
        thorough=thorough,
    )
    if isinstance(program, str):
        # what its module sets when it is imported holds from then on, as in the user's own run
        with runtime.preserved_generators():
            import_program(program)
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
    )


def _program(program: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Program:
    if isinstance(program, str):
        if args or kwargs:
            raise UsageError(f"{program} brings its own arguments: give none, or give the callable itself")
        return load_program(program)
    return Program(name=name_of(program), call=program, args=args, kwargs=kwargs or {})


def _optimizer(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    if not isinstance(optimizer, str):
        return optimizer
    if ":" in optimizer:
        return load_callable(optimizer, what="optimizer factory")
    return OPTIMIZERS.get(optimizer)


def name_of(thing: Any) -> str:
    """Return what a program, transform or optimizer is called, given itself or by name."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, torch.nn.Module):
        return type(thing).__qualname__
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__
