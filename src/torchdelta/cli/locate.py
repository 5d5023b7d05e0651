"""`torchdelta locate`: check, and name the operation that goes wrong first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torchdelta.cli.options import (
    EXIT_OF,
    Debug,
    JsonFile,
    Program,
    TransformIfAny,
    needing_torch,
    read_bytes,
    read_mapping,
    read_words,
    running,
    taking,
)
from torchdelta.errors import UsageError
from torchdelta.records.codec import write_report
from torchdelta.records.recording import completed
from torchdelta.report.terminal.location import print_location
from torchdelta.report.terminal.sensitivity import print_sensitivity


@taking(case=read_words)
def command(
    *,
    program: Program,
    transform: TransformIfAny = None,
    case: dict[str, Any],
    memory: Annotated[str | None, typer.Option(help="What taps on a compiler may hold: 2GB, 512MiB, …")] = None,
    cause: Annotated[
        bool, typer.Option("--cause", help="Look for the setting behind it although a node was named.")
    ] = False,
    mapping: Annotated[
        Path | None, typer.Option(help="JSON of the nodes of the reference and those that stand for them.")
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="For a quantizer: which layer hurts most when it alone is quantized.")
    ] = False,
    json_file: JsonFile = None,
    show_all: Annotated[bool, typer.Option("--all", help="Every node, not only the worst.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="As --all, and every warning.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Where does it go wrong first?"""
    memory_bytes = read_bytes(memory) if memory is not None else None
    given = read_mapping(mapping) if mapping is not None else None
    if sensitivity:
        ignored = {"--memory": memory, "--mapping": mapping, "--cause": cause, "--all": show_all}
        if given_too := [name for name, value in ignored.items() if value]:
            raise UsageError(f"--sensitivity looks for no culprit, and has no use for {', '.join(given_too)}")
    words = completed(program, {"transform": transform, **case})
    with running(words["transform"], json_file, verbose=verbose) as progress:
        # torch takes seconds to import: `--help` and `show` are not to wait for it
        with needing_torch("locating"):
            from torchdelta.api import locate
            from torchdelta.api import sensitivity as ask_one_by_one
        if sensitivity:
            alone = ask_one_by_one(program, progress=progress, **words)
            print_sensitivity(alone)
            if json_file is not None:
                write_report(alone, json_file)
            return
        location = locate(program, mapping=given, memory_bytes=memory_bytes, cause=cause, progress=progress, **words)
    print_location(location, show_all=show_all or verbose)
    if json_file is not None:
        write_report(location, json_file)
    raise typer.Exit(EXIT_OF[location.verdict])
