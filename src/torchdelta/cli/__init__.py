"""The command line: one file per command, each a thin shell around the engine."""

from __future__ import annotations

import sys

import typer

from torchdelta.cli import check, show
from torchdelta.cli.exits import USAGE
from torchdelta.errors import TorchDeltaError

app = typer.Typer(
    name="torchdelta",
    help="Does it still compute the same thing?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("check")(check.command)
app.command("show")(show.command)


def main() -> None:
    """Run the command line; a mistake of the user's is one sentence and exit code 2, with `--debug` a traceback."""
    try:
        app()
    except TorchDeltaError as error:
        if "--debug" in sys.argv:
            raise
        print(f"torchdelta: {error}", file=sys.stderr)
        sys.exit(USAGE)
