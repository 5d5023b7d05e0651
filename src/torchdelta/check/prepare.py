"""From the options of a caller to a check that can be run: the program is loaded, the transform built, the policy read.

`prepare` is the usual way to a `Check`; `Check.run` answers it. Workers and the Python face both call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchdelta import transforms
from torchdelta._torch.process import runtime
from torchdelta.check.baseline import Baseline, Progress
from torchdelta.check.check import Check
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import UsageError
from torchdelta.program.loading import import_program, load_program
from torchdelta.program.programs import Program, load_callable
from torchdelta.program.stages import OPTIMIZERS, OptimizerFactory, Plan
from torchdelta.records.case import CheckOptions, case_of, name_of
from torchdelta.records.recording import complete, with_absolute_file, with_absolute_files
from torchdelta.transforms.base import Transform
from torchdelta.transforms.replacement import Replacement


def prepare(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: CheckOptions,
    progress: Progress = lambda _: None,
) -> Check:
    """Return the check of a program under these options; UsageError or ProgramError if there can be none.

    Nothing of the check runs yet. If the program is a recorded directory, options that are left open come from its
    record; ReportUnreadable if that cannot be read. A named program is imported, and then built with the seed of the
    case; random generators are put back. Other settings that its module or factory makes stay, for all that is done
    with the check: a caller whose process goes on afterwards puts them back with `runtime.preserved`. `progress` will
    get the name of each part of the check as it begins.
    """
    options = complete(program, options)
    case = case_of(program, options)
    # a module or a factory may change the working directory, and the user named the other files from the present one
    options = with_absolute_files(options)
    place = with_absolute_file(program) if isinstance(program, str) else ""
    transform = options.transform if options.candidate is None else Replacement(options.candidate, program=program)
    if options.options and isinstance(transform, Transform):
        raise UsageError("options belong to a transform that is named or to a pass: this one was built without them")
    if isinstance(program, str):
        # settings that its module makes on import hold from then on, as in the user's own run
        with runtime.preserved_generators():
            import_program(program)
    # a factory draws its weights from the seed of the case, and the caller's generators stay as they were; its other
    # settings belong to the program
    with runtime.preserved_generators():
        runtime.seed_everything(case.seed)
        source = _load(program, args, kwargs, place=place)
    plan = Plan(
        stages=case.stages,
        seed=case.seed,
        iterations=case.iterations,
        steps=case.steps,
        optimizer=_optimizer(options.optimizer),
        loss=load_callable(options.loss, what="loss") if isinstance(options.loss, str) else options.loss,
    )
    return Check(
        case=case,
        baseline=Baseline(
            program=source, plan=plan, deterministic=case.deterministic, anomaly=case.anomaly, progress=progress
        ),
        transform=transforms.build(transform, options.options),
        policy=parse(case.policy),
        stages_by_default=options.stages is None,
    )


def _load(
    program: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, place: str
) -> Program:
    """Return the program that a name stands for, or one of the callable with these arguments.

    `place` is the name with its file made absolute, by which it is found. UsageError if a named program is given
    arguments, or if the name has no known form. ProgramError if it cannot be loaded, or if the arguments do not fit the
    callable. ReportUnreadable if its recording is missing or damaged.
    """
    if isinstance(program, str):
        if args or kwargs:
            raise UsageError(f"{program} brings its own arguments: pass none, or pass the callable itself")
        return replace(load_program(place, name=program), name=program)
    return Program(name=name_of(program), call=program, args=args, kwargs=kwargs or {})


def _optimizer(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    """Return the factory itself, or the one that a text names.

    The text is `file.py:factory`, `package.module:factory`, or a registered name such as `sgd`. UsageError if the name
    is unknown; UsageError or ProgramError if the factory cannot be loaded.
    """
    if not isinstance(optimizer, str):
        return optimizer
    if ":" in optimizer:
        return load_callable(optimizer, what="optimizer factory")
    return OPTIMIZERS.get(optimizer)
