"""`torchdelta audit`: plant faults in a program, and print how many of them a check catches."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchdelta.cli.arguments import counting_warnings, read_option, require_writable
from torchdelta.errors import EnvironmentUnfit, UsageError
from torchdelta.records.audit import Audit
from torchdelta.records.codec import encode
from torchdelta.report.audit import print_audit


def command(
    program: Annotated[str, typer.Argument(help="path/file.py:factory or package.module:factory.")],
    transform: Annotated[str, typer.Option("--transform", "-t", help="Applied to the faulty program: inductor, …")],
    option: Annotated[
        list[str] | None, typer.Option("--option", "-O", help="An option of the transform, key=value.")
    ] = None,
    stages: Annotated[str | None, typer.Option(help="Of forward,gradients,steps; default forward,gradients.")] = None,
    policy: Annotated[str, typer.Option(help="noise, bitwise, close, rtol=R,atol=A, sqnr>=X, cosine>=X.")] = "noise",
    kinds: Annotated[str, typer.Option(help="Kinds of fault, with commas; default all.")] = "",
    per_kind: Annotated[int, typer.Option(help="Places at which to plant each kind.")] = 1,
    seed: Annotated[int, typer.Option(help="Of every random number, and of the places.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the audit there.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every fault that was not caught.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 — read in main
) -> None:
    """How many of the faults planted in the program does a check catch? Ends with 0 whatever the answer."""
    options = dict(read_option(text) for text in option or ())
    if json_file is not None:
        require_writable(json_file)
    console = Console(stderr=True)
    with (
        nullcontext() if verbose else counting_warnings(console),
        console.status("loading torch", spinner="dots") as status,
    ):
        # torch takes seconds to import: `--help` is not to wait for it
        try:
            from torchdelta.engine.audit import audit
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(f"an audit needs {error.name}, which is not installed: install it first") from error
        found = audit(
            program,
            transform=transform,
            options=options,
            stages=_words(stages) if stages is not None else None,
            policy=policy,
            kinds=_words(kinds),
            per_kind=per_kind,
            seed=seed,
            progress=lambda part: status.update(Text(f"{transform}: {part}")),
        )
    print_audit(found, verbose=verbose)
    if json_file is not None:
        _write(found, json_file)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _write(audit: Audit, path: Path) -> None:
    text = json.dumps(encode(audit), indent=2, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
