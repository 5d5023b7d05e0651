"""`torchdelta show`: a saved report on the terminal; needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchdelta.cli.exits import EXIT_OF
from torchdelta.records.codec import read_report
from torchdelta.report.terminal import print_report


def command(
    report: Annotated[Path, typer.Argument(help="A report.json.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 — read in main
) -> None:
    """Show a saved report, and exit as the check that wrote it did."""
    found = read_report(report)
    print_report(found, verbose=verbose)
    raise typer.Exit(EXIT_OF[found.verdict])
