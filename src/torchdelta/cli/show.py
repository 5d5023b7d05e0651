"""`torchdelta show`: print a report, an audit or a location that another command saved; needs no torch."""

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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", "--all", help="All that was saved.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Show the result that a command saved, and exit as that command did."""
    saved = read_report(report, None)
    if isinstance(saved, Audit):
        print_audit(saved, verbose=verbose)
        return
    if isinstance(saved, Sensitivity):
        print_sensitivity(saved)
        return
    if isinstance(saved, Location):
        print_location(saved, show_all=verbose)
    elif isinstance(saved, OpReport):
        print_operator(saved, verbose=verbose)
    elif isinstance(saved, Sweep):
        print_sweep(saved, verbose=verbose)
    elif isinstance(saved, Pipeline):
        typer.echo(str(saved))
    else:
        print_report(saved, verbose=verbose)
    raise typer.Exit(EXIT_OF[saved.verdict])
