"""`torchdelta diagnose`: check, locate, minify and write the script that shows it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchdelta.cli.arguments import (
    Debug,
    Program,
    TransformIfAny,
    read_words,
    require_torch,
    running,
    taking,
)
from torchdelta.cli.exits import EXIT_OF
from torchdelta.cli.reduction import (
    NoData,
    OutDirectory,
    Resume,
    WithIssue,
    read_limits,
    require_directory,
    workers_for,
)
from torchdelta.records.recording import completed
from torchdelta.report.terminal import print_report


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
        workers_for(words["transform"], what="a diagnosis") as workers,
        running(words["transform"], None, verbose=verbose) as progress,
    ):
        from torchdelta.engine.api import diagnose

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
