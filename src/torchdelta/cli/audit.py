"""`torchdelta audit`: plant faults in a program, and print how many of them a check catches."""

from __future__ import annotations

from typing import Annotated

import typer

from torchdelta.cli.options import (
    Debug,
    JsonFile,
    Options,
    Policy,
    Program,
    Stages,
    Transform,
    deliver,
    needing_torch,
    read_options,
    running,
)
from torchdelta.records.case import Case, CheckOptions, words_of
from torchdelta.report.terminal.audit import print_audit


def command(
    program: Program,
    transform: Transform,
    option: Options = None,
    stages: Stages = None,
    policy: Policy = Case.policy,
    kinds: Annotated[str, typer.Option(help="Kinds of fault, with commas; default all.")] = "",
    per_kind: Annotated[int, typer.Option(help="Places at which to plant each kind.")] = 1,
    seed: Annotated[int, typer.Option(help="Of every random number, and of the places.")] = Case.seed,
    json_file: JsonFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every fault that was not caught.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """How many of the faults planted in the program does a check catch? Ends with 0 whatever the answer."""
    options = CheckOptions.read(
        transform=transform, options=read_options(option), stages=stages, policy=policy, seed=seed
    )
    with running(transform, json_file, verbose=verbose) as progress:
        # torch takes seconds to import, and `--help` does without it
        with needing_torch("an audit"):
            from torchdelta.audit.audit import audit
        result = audit(
            program,
            options=options,
            kinds=words_of(kinds),
            per_kind=per_kind,
            progress=progress,
        )
    deliver(result, json_file, lambda: print_audit(result, verbose=verbose))
