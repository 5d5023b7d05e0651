"""`torchdelta check`: run a program and what a transform made of it, and print the verdict."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchdelta.check.isolated import check_isolated
from torchdelta.cli.options import (
    EXIT_OF,
    Debug,
    JsonFile,
    Memory,
    Program,
    TransformIfAny,
    needing_torch,
    pass_on,
    read_bytes,
    read_words,
    require_torch,
    running,
    taking,
)
from torchdelta.errors import UsageError
from torchdelta.records.case import read_case
from torchdelta.records.codec import write_report
from torchdelta.records.recording import completed
from torchdelta.records.report import Report
from torchdelta.report.terminal.check import print_report


@taking(case=read_words)
def command(
    *,
    program: Program,
    transform: TransformIfAny = None,
    case: dict[str, Any],
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
) -> None:
    """Does the transformed program still compute the same thing?"""
    words = completed(program, {"transform": transform, "thorough": thorough, **case})
    if not isolated and (timeout is not None or memory is not None):
        raise UsageError("--timeout and --memory hold for a process of its own: leave --no-isolated out")
    if timeout is not None and timeout <= 0:
        raise UsageError(f"--timeout is a number of seconds above 0, not {timeout:g}")
    with running(words["transform"], json_file, verbose=verbose) as progress:
        report = (
            _in_worker(program, words, timeout, memory, progress, verbose=verbose)
            if isolated
            else _here(program, words, progress)
        )
    print_report(report, verbose=verbose)
    if json_file is not None:
        write_report(report, json_file)
    raise typer.Exit(EXIT_OF[report.verdict])


def _here(program: str, words: dict[str, Any], progress: Any) -> Report:
    # torch takes seconds to import: `--help` and `show` are not to wait for it
    with needing_torch("a check"):
        from torchdelta.api import check
    return check(program, progress=progress, **words)


def _in_worker(
    program: str, words: dict[str, Any], timeout: float | None, memory: str | None, progress: Any, *, verbose: bool
) -> Report:
    require_torch("a check")
    checked = check_isolated(
        program,
        words,
        read_case(program, **words),
        timeout_s=timeout,
        memory_bytes=read_bytes(memory) if memory is not None else None,
        progress=progress,
    )
    pass_on(checked.output, checked.warnings, verbose=verbose)
    return checked.report
