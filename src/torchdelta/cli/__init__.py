"""The command line: one file per command, which reads its options into records and calls the feature of its name.

`main` turns errors into one sentence and an exit code. `options.py` has the options that commands share.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from torchdelta import __version__
from torchdelta.cli import audit, check, diagnose, locate, minify, op, run, show
from torchdelta.cli.options import INTERNAL, USAGE
from torchdelta.cli.output import tolerant_streams
from torchdelta.errors import TorchDeltaError
from torchdelta.isolate.process_groups import no_process_left
from torchdelta.records.printable import printable

app = typer.Typer(
    name="torchdelta",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("check")(check.command)
app.command("locate")(locate.command)
app.command("minify")(minify.command)
app.command("diagnose")(diagnose.command)
app.command("run", context_settings=run.SETTINGS)(run.command)
app.command("show")(show.command)
app.command("audit")(audit.command)
app.command("op")(op.command)


def _print_version(wanted: bool) -> None:
    """Print the version and raise typer.Exit if `wanted`; otherwise do nothing."""
    if wanted:
        print(f"torchdelta {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 — its callback prints it
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Does it still compute the same thing?"""
    if context.invoked_subcommand != "run":  # a script's own daemons outlive it, as under python
        context.with_resource(no_process_left())


def main() -> None:
    """Run the command line and exit; an error of torchdelta's own classes is one sentence on stderr, and exit code 2.

    With `--debug` its traceback comes first. Any other Exception is printed with its traceback and gives 70. One that
    is not an Exception gives 2, but SystemExit and KeyboardInterrupt are passed on, and so is a Ctrl-C in a script of
    `run`.
    """
    with tolerant_streams() as restore:
        _run(restore)


def _run(restore_streams: Callable[[], None]) -> None:
    """Run the command line, and exit as `main` says; `restore_streams` puts the user's own streams back."""
    try:
        app(obj=restore_streams)
    except run.Interrupted:
        # the script's traceback was shown; Python ends the process as it does for any KeyboardInterrupt
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None
    except TorchDeltaError as error:
        if "--debug" in sys.argv:
            _print_traceback()
        print(f"torchdelta: {printable(str(error))}", file=sys.stderr)
        sys.exit(USAGE)
    except Exception:
        _print_traceback()
        print("torchdelta: this is a mistake of torchdelta itself; please report the lines above", file=sys.stderr)
        sys.exit(INTERNAL)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the program's own: Python would exit with 1, which means that it diverged
        _print_traceback()
        print(f"torchdelta: the program raised {type(error).__name__}, which is not an Exception", file=sys.stderr)
        sys.exit(USAGE)


def _print_traceback() -> None:
    """Print the traceback of the exception that is being handled to stderr, with its control characters as escapes."""
    print(printable(traceback.format_exc()), file=sys.stderr, end="")
