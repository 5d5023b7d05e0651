"""`torchdelta minify`: the smallest graph that fails as the program does, and a script that shows it."""

from __future__ import annotations

from dataclasses import replace
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
from torchdelta.records.codec import write_report
from torchdelta.report.terminal import print_report


@taking_a_case
def command(
    program: Program,
    transform: Transform,
    out: OutDirectory,
    case: dict[str, Any],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the directory.")] = False,
    match: Match = None,
    timeout: Timeout = 600.0,
    queries: Queries = None,
    seconds: Seconds = None,
    memory: Memory = None,
    no_data: NoData = False,
    issue: WithIssue = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """What is the smallest graph that still shows it?"""
    require_directory(out)
    with running(transform, None, verbose=False) as progress:
        with needing_torch("minifying"):
            from torchdelta.engine.api import minify
        small = minify(
            program,
            transform=transform,
            out=out / "minify",
            resume=resume,
            timeout_s=timeout,
            memory_bytes=read_bytes(memory) if memory is not None else None,
            queries=queries,
            seconds=seconds,
            match=match,
            progress=lambda told: progress(f"{told.nodes} nodes, {told.queries} queries, {told.doing}"),
            **case,
        )
        path = out / "repro.py"
        repro = small.write(path, data=not no_data)
        if issue:
            path.with_suffix(".md").write_text(small.issue(path), encoding="utf-8")
    also = [f"also seen, and not followed: {signature}" for signature in small.also_seen]
    notes = (*small.report.notes, *small.notes, *also)
    report = replace(small.report, reduction=small.reduction, repro=repro, notes=notes)
    write_report(report, out / "report.json")
    print_report(report)
    print(repro.path)
    raise typer.Exit(EXIT_OF[report.verdict])
