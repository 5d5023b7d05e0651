"""`torchdelta diagnose`: check, locate, minify and write the script that shows it."""

from __future__ import annotations

from typing import Annotated, Any

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
    read_limits,
    read_words,
    require_directory,
    require_torch,
    running,
    taking,
    workers_for,
)
from torchdelta.locate.isolated import WORKER as LOCATE_WORKER
from torchdelta.records.recording import completed
from torchdelta.report.terminal.check import print_report


@taking(case=read_words, limits=read_limits)
def command(
    *,
    program: Program,
    transform: TransformIfAny = None,
    out: OutDirectory,
    case: dict[str, Any],
    limits: dict[str, Any],
    resume: Resume = False,
    no_data: NoData = False,
    issue: WithIssue = False,
    every: Annotated[bool, typer.Option("--all", help="Minify each group of failures, not only the first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Does it still compute the same thing, where does it go wrong first, and what is the smallest script?"""
    words = completed(program, {"transform": transform, **case})
    require_directory(out)
    require_torch("a diagnosis")
    with (
        workers_for(words["transform"], what="a diagnosis", preload=(LOCATE_WORKER,)) as workers,
        running(words["transform"], None, verbose=verbose) as progress,
    ):
        from torchdelta.api import diagnose

        report = diagnose(
            program,
            out=out,
            data=not no_data,
            issue=issue,
            resume=resume,
            every=every,
            progress=progress,
            workers=workers,
            **limits,
            **words,
        )
    print_report(report, verbose=verbose)
    if report.repro is not None:
        print(report.repro.path)
    raise typer.Exit(EXIT_OF[report.verdict])
