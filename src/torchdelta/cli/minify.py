"""`torchdelta minify`: the smallest graph that fails as the program does, and a script that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from torchdelta._torch.process.warmup import warmup_steps
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
from torchdelta.isolate.pool import CAN_FORK
from torchdelta.records.codec import write_report
from torchdelta.records.recording import completed
from torchdelta.report.terminal.check import print_report
from torchdelta.repro.confirm import CleanProcess


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
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """What is the smallest graph that still shows it?"""
    words = completed(program, {"transform": transform, **case})
    require_directory(out)
    require_torch("minifying")
    # who will run the script imports torch beside this process, which does so for everybody else
    clean = CleanProcess(warmup_steps(words["transform"], forks=CAN_FORK))
    with (
        workers_for(words["transform"], what="minifying") as workers,
        running(words["transform"], None, verbose=False) as progress,
    ):
        from torchdelta.api import minify

        small = minify(
            program,
            out=out / "minify",
            resume=resume,
            progress=lambda told: progress(str(told)),
            workers=workers,
            clean=clean,
            script=out / "repro.py",
            data=not no_data,
            **limits,
            **words,
        )
        also = [f"also seen, and not followed: {signature}" for signature in small.also_seen]
        notes = (*small.report.notes, *small.notes, *also)
        report = replace(small.report, reduction=small.reduction, notes=notes)
        write_report(report, out / "report.json")
        path = out / "repro.py"
        repro = small.write(path, data=not no_data)
        if issue:
            path.with_suffix(".md").write_text(small.issue(path, data=not no_data), encoding="utf-8")
        report = replace(report, repro=repro)
        write_report(report, out / "report.json")
    print_report(report)
    print(repro.path)
    raise typer.Exit(EXIT_OF[report.verdict])
