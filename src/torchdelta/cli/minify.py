"""`torchdelta minify`: the smallest graph that fails as the program does, and a script that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from torchdelta._torch.process.warmup import warmup_steps
from torchdelta.cli.options import (
    EXIT_OF,
    Debug,
    NoData,
    OutDirectory,
    Program,
    Resume,
    TransformIfAny,
    WithIssue,
    read_check_options,
    read_limits,
    require_directory,
    require_torch,
    running,
    taking,
    workers_for,
)
from torchdelta.errors import UsageError
from torchdelta.isolate.pool import CAN_FORK
from torchdelta.records.case import CheckOptions, SearchLimits, case_of
from torchdelta.records.codec import write_report
from torchdelta.records.recording import complete
from torchdelta.records.strict_json import write_file
from torchdelta.report.terminal.check import print_report
from torchdelta.repro.confirm import CleanProcess, ended
from torchdelta.storage.run_directory import DIAGNOSIS, RunDirectory, RunQuestion

if TYPE_CHECKING:
    from torchdelta.minify.result import MinifiedResult
    from torchdelta.records.report import Report


@taking(options=read_check_options, limits=read_limits)
def command(
    *,
    program: Program,
    transform: TransformIfAny = None,
    out: OutDirectory,
    options: CheckOptions,
    limits: SearchLimits,
    resume: Resume = False,
    no_data: NoData = False,
    issue: WithIssue = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """What is the smallest graph that still shows it?"""
    options = complete(program, replace(options, transform=transform))
    require_directory(out)
    require_torch("minifying")
    question = RunQuestion(command="minify", case=case_of(program, options), level=limits.level)
    with (
        RunDirectory(out, question=question, names=DIAGNOSIS, resume=resume) as directory,
        # the process that will run the script imports torch while this one imports it for itself and the workers
        ended(CleanProcess(warmup_steps(options.transform, forks=CAN_FORK))) as clean,
        workers_for(options.transform, what="minifying") as workers,
        running(options.transform, None, verbose=False) as progress,
    ):
        from torchdelta.diagnose import module_of
        from torchdelta.minify.capture import capture_isolated
        from torchdelta.minify.minifier import Minifier

        minifier = Minifier(
            case=question.case,
            capture=lambda: capture_isolated(program, options, limits=limits, settings={}, pool=workers),
            notes=[*directory.notes],
            transform=options.transform,
            limits=limits,
            out=out / "minify",
            is_resumed=resume,
            program=program,
            options=options,
            imports=module_of(program),
            pool=workers,
            clean=clean,
            script=out / "repro.py",
            with_data=not no_data,
            tell=lambda reduction: progress(str(reduction)),
        )
        small = minifier.run()
        report = _report_of(small)
        path = out / "repro.py"
        unwritten: UsageError | None = None
        try:
            write_report(report, out / "report.json")
            small, repro = small.with_script(path, data=not no_data)
            report = replace(_report_of(small), repro=repro)
            write_report(report, out / "report.json")
            if issue:
                write_file(path.with_suffix(".md"), small.issue(path, data=not no_data))
        except UsageError as error:
            unwritten = error
        except OSError as error:
            unwritten = UsageError(f"cannot write into {out}: {error.strerror or error}; make room, and use --resume")
    print_report(report)
    if unwritten is not None:  # the result is printed all the same
        raise unwritten
    if issue:
        print(path.with_suffix(".md"))
    if repro.confirmed:
        print(repro.path)
    raise typer.Exit(EXIT_OF[report.verdict])


def _report_of(small: MinifiedResult) -> Report:
    """Return the result's report with its reduction and notes, and a note for each failure that was not followed."""
    also = [f"also seen, and not followed: {signature}" for signature in small.also_seen]
    return replace(small.report, reduction=small.reduction, notes=(*small.report.notes, *small.notes, *also))
