"""`torchdelta diagnose`: check, locate, minify and write the script that shows it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchdelta.cli.arguments import (
    Debug,
    Program,
    Transform,
    needing_torch,
    read_bytes,
    running,
    taking_a_case,
)
from torchdelta.cli.exits import EXIT_OF
from torchdelta.cli.reduction import (
    Match,
    Memory,
    NoData,
    OutDirectory,
    Queries,
    Seconds,
    Timeout,
    WithIssue,
    require_directory,
)
from torchdelta.report.terminal import print_report


@taking_a_case
def command(
    program: Program,
    transform: Transform,
    out: OutDirectory,
    case: dict[str, Any],
    match: Match = None,
    timeout: Timeout = 600.0,
    queries: Queries = None,
    seconds: Seconds = None,
    memory: Memory = None,
    no_data: NoData = False,
    issue: WithIssue = False,
    every: Annotated[bool, typer.Option("--all", help="Minify each group of failures, not only the first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Does it still compute the same thing, where does it go wrong first, and what is the smallest script?"""
    require_directory(out)
    with running(transform, None, verbose=verbose) as progress:
        with needing_torch("a diagnosis"):
            from torchdelta.engine.api import diagnose
        report = diagnose(
            program,
            transform=transform,
            out=out,
            timeout_s=timeout,
            memory_bytes=read_bytes(memory) if memory is not None else None,
            queries=queries,
            seconds=seconds,
            match=match,
            data=not no_data,
            issue=issue,
            every=every,
            progress=progress,
            **case,
        )
    print_report(report, verbose=verbose)
    if report.repro is not None:
        print(report.repro.path)
    raise typer.Exit(EXIT_OF[report.verdict])
