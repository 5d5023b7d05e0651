"""`torchdelta locate`: check, and name the operation that goes wrong first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from torchdelta.cli.options import (
    EXIT_OF,
    Debug,
    JsonFile,
    Program,
    TransformIfAny,
    deliver,
    needing_torch,
    read_bytes,
    read_check_options,
    read_mapping,
    running,
    taking,
)
from torchdelta.errors import UsageError
from torchdelta.records.case import CheckOptions
from torchdelta.records.recording import complete
from torchdelta.report.terminal.location import print_location
from torchdelta.report.terminal.sensitivity import print_sensitivity


@taking(options=read_check_options)
def command(
    *,
    program: Program,
    transform: TransformIfAny = None,
    options: CheckOptions,
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
    pairs = read_mapping(mapping) if mapping is not None else None
    if sensitivity:
        useless = {"--memory": memory, "--mapping": mapping, "--cause": cause, "--all": show_all}
        if names := [name for name, value in useless.items() if value]:
            raise UsageError(f"--sensitivity looks for no culprit, and has no use for {', '.join(names)}")
    options = complete(program, replace(options, transform=transform))
    with running(options.transform, json_file, verbose=verbose) as progress:
        # torch takes seconds to import, and `--help` and `show` do without it
        with needing_torch("locating"):
            from torchdelta.locate.locator import locate
            from torchdelta.locate.sensitivity import measure_sensitivity
        if sensitivity:
            effects = measure_sensitivity(program, options=options, progress=progress)
        else:
            location = locate(
                program, options=options, mapping=pairs, memory_bytes=memory_bytes, cause=cause, progress=progress
            )
    if sensitivity:
        deliver(effects, json_file, lambda: print_sensitivity(effects))
        return
    deliver(location, json_file, lambda: print_location(location, verbose=show_all or verbose))
    raise typer.Exit(EXIT_OF[location.verdict])
