"""`torchdelta show`: what was saved of a check, an audit or a search, on the terminal; needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchdelta.cli.options import EXIT_OF, Debug
from torchdelta.records.audit import Audit
from torchdelta.records.codec import read_report
from torchdelta.records.location import Location
from torchdelta.records.operators import OpReport, Sweep
from torchdelta.records.passes import Pipeline
from torchdelta.records.sensitivity import Sensitivity
from torchdelta.report.terminal.audit import print_audit
from torchdelta.report.terminal.check import print_report
from torchdelta.report.terminal.location import print_location
from torchdelta.report.terminal.operators import print_operator, print_sweep
from torchdelta.report.terminal.sensitivity import print_sensitivity


def command(
    report: Annotated[Path, typer.Argument(help="A file that --json wrote.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", "--all", help="Everything that there is.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Show what a command saved, and exit as that did."""
    found = read_report(report, None)
    if isinstance(found, Audit):
        print_audit(found, verbose=verbose)
        return
    if isinstance(found, Sensitivity):
        print_sensitivity(found)
        return
    if isinstance(found, Location):
        print_location(found, show_all=verbose)
    elif isinstance(found, OpReport):
        print_operator(found, verbose=verbose)
    elif isinstance(found, Sweep):
        print_sweep(found, verbose=verbose)
    elif isinstance(found, Pipeline):
        typer.echo(str(found))
    else:
        print_report(found, verbose=verbose)
    raise typer.Exit(EXIT_OF[found.verdict])
