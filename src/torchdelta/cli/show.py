"""`torchdelta show`: print a report, an audit or another record that a command saved; needs no torch.

`PRINTERS` says which function prints which record.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdelta.cli.options import EXIT_OF, Debug, exit_of_sweep
from torchdelta.records.audit import Audit
from torchdelta.records.codec import Saved, read_report
from torchdelta.records.location import Location
from torchdelta.records.operators import OpReport, Sweep
from torchdelta.records.passes import Pipeline
from torchdelta.records.report import Report
from torchdelta.records.sensitivity import Sensitivity
from torchdelta.report.terminal.audit import print_audit
from torchdelta.report.terminal.check import print_report
from torchdelta.report.terminal.location import print_location
from torchdelta.report.terminal.operators import print_operator, print_sweep
from torchdelta.report.terminal.sensitivity import print_sensitivity

PRINTERS: dict[type[Saved], Callable[..., Any]] = {
    Report: print_report,
    Audit: print_audit,
    Location: print_location,
    OpReport: print_operator,
    Sweep: print_sweep,
    # both are always printed whole
    Pipeline: lambda pipeline, verbose: typer.echo(str(pipeline)),  # noqa: ARG005
    Sensitivity: lambda sensitivity, verbose: print_sensitivity(sensitivity),  # noqa: ARG005
}
"""The function that prints a record of this class, called with the record and `verbose`."""


def command(
    report: Annotated[Path, typer.Argument(help="A file that --json wrote.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", "--all", help="All that was saved.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Show the result that a command saved, and exit as that command did."""
    saved = read_report(report, None)
    PRINTERS[type(saved)](saved, verbose=verbose)
    verdict = getattr(saved, "verdict", None)  # an audit and a sensitivity are measurements, and have none
    if isinstance(saved, Sweep):
        raise typer.Exit(exit_of_sweep(saved))
    if verdict is not None:
        raise typer.Exit(EXIT_OF[verdict])
