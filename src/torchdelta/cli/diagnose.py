"""`torchdelta diagnose`: check, locate, minify and write the script that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NoReturn

import typer

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
from torchdelta.locate.isolated import WORKER as LOCATE_WORKER
from torchdelta.records.case import CheckOptions, SearchLimits
from torchdelta.records.recording import complete
from torchdelta.report.terminal.check import print_report


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
    every: Annotated[bool, typer.Option("--all", help="Minify each group of failures, not only the first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> NoReturn:
    """Does it still compute the same thing, where does it go wrong first, and what is the smallest script?"""
    options = complete(program, replace(options, transform=transform))
    require_directory(out)
    require_torch("a diagnosis")
    with (
        workers_for(options.transform, what="a diagnosis", preload=(LOCATE_WORKER,)) as workers,
        running(options.transform, None, verbose=verbose) as progress,
    ):
        from torchdelta.diagnose import Diagnosis

        diagnosis = Diagnosis(
            program=program,
            options=options,
            limits=limits,
            out=out,
            with_data=not no_data,
            with_issue=issue,
            is_resumed=resume,
            does_all=every,
            progress=progress,
            workers=workers,
        )
        report = diagnosis.run()
    print_report(report, verbose=verbose)
    for path in diagnosis.issues:
        print(path)
    if report.repro is not None and report.repro.confirmed:
        print(report.repro.path)
    raise typer.Exit(EXIT_OF[report.verdict])
