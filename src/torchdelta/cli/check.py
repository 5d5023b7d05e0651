"""`torchdelta check`: run a program and its candidate, which a transform makes of it, and print the verdict.

The way of a check goes on in `check/isolated.py`, in a worker in `check/worker.py`, then `check/prepare.py` and
`check/check.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NoReturn

import typer

from torchdelta.check.isolated import check_isolated
from torchdelta.cli.options import (
    EXIT_OF,
    Debug,
    JsonFile,
    Memory,
    Program,
    TransformIfAny,
    deliver,
    needing_torch,
    pass_on,
    read_bytes,
    read_check_options,
    require_torch,
    running,
    taking,
)
from torchdelta.errors import UsageError
from torchdelta.records.case import CheckOptions, require_positive
from torchdelta.records.recording import complete
from torchdelta.report.terminal.check import print_report


@taking(options=read_check_options)
def command(
    *,
    program: Program,
    transform: TransformIfAny = None,
    options: CheckOptions,
    thorough: Annotated[
        bool, typer.Option(help="Look at each node by itself too; a compiler compiles once more.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which the candidate has timed out.")] = None,
    memory: Memory = None,
    isolated: Annotated[
        bool, typer.Option(help="In a process of its own, whose death is a verdict; without it, in this one.")
    ] = True,
    json_file: JsonFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> NoReturn:
    """Does the transformed program still compute the same thing?"""
    options = complete(program, replace(options, transform=transform, thorough=thorough))
    if not isolated and (timeout is not None or memory is not None):
        raise UsageError("--timeout and --memory hold for a process of its own: leave --no-isolated out")
    require_positive("--timeout", timeout)
    memory_bytes = read_bytes(memory) if memory is not None else None
    with running(options.transform, json_file, verbose=verbose) as progress:
        if isolated:
            require_torch("a check")
            result = check_isolated(program, options, timeout_s=timeout, memory_bytes=memory_bytes, progress=progress)
            report = result.report
        else:
            # torch takes seconds to import, and `--help` and `show` do without it
            with needing_torch("a check"):
                from torchdelta.check.prepare import prepare
                from torchdelta.check.thorough import run_check
            report = run_check(prepare(program, options=options, progress=progress))

    def aside() -> None:
        if isolated:
            pass_on(result.output, result.warnings, verbose=verbose)

    deliver(report, json_file, lambda: print_report(report, verbose=verbose), aside)
    raise typer.Exit(EXIT_OF[report.verdict])
