"""`torchdelta check`: run a program and what a transform made of it, and print the verdict."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchdelta.cli.arguments import Debug, JsonFile, Program, Transform, needing_torch, running, taking_a_case
from torchdelta.cli.exits import EXIT_OF
from torchdelta.records.codec import write_report
from torchdelta.report.terminal import print_report


@taking_a_case
def command(
    program: Program,
    transform: Transform,
    case: dict[str, Any],
    thorough: Annotated[
        bool, typer.Option(help="Look at each node by itself too; a compiler compiles once more.")
    ] = False,
    json_file: JsonFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Does the transformed program still compute the same thing?"""
    with running(transform, json_file, verbose=verbose) as progress:
        # torch takes seconds to import: `--help` and `show` are not to wait for it
        with needing_torch("a check"):
            from torchdelta.engine.api import check
        report = check(program, transform=transform, thorough=thorough, progress=progress, **case)
    print_report(report, verbose=verbose)
    if json_file is not None:
        write_report(report, json_file)
    raise typer.Exit(EXIT_OF[report.verdict])
