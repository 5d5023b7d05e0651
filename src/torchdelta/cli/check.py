"""`torchdelta check`: run a program and what a transform made of it, and print the verdict."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchdelta.cli.arguments import counting_warnings, read_option, require_writable
from torchdelta.cli.exits import EXIT_OF
from torchdelta.errors import EnvironmentUnfit
from torchdelta.records.codec import write_report
from torchdelta.report.terminal import print_report


def command(
    program: Annotated[str, typer.Argument(help="path/file.py:factory or package.module:factory.")],
    transform: Annotated[str, typer.Option("--transform", "-t", help="inductor, export, cast:bfloat16, file.py:fn, …")],
    option: Annotated[
        list[str] | None, typer.Option("--option", "-O", help="An option of the transform, key=value.")
    ] = None,
    stages: Annotated[str | None, typer.Option(help="Of forward,gradients,steps; default forward,gradients.")] = None,
    policy: Annotated[str, typer.Option(help="noise, bitwise, close, rtol=R,atol=A, sqnr>=X, cosine>=X.")] = "noise",
    ignore: Annotated[str, typer.Option(help="Clauses that don't count: dtype,stride,integers,aliasing,…")] = "",
    strict: Annotated[str, typer.Option(help="Clauses that count although by default they don't: casts,stride.")] = "",
    strict_casts: Annotated[
        bool, typer.Option("--strict-casts", help="A narrowing cast that the candidate elides is a divergence.")
    ] = False,
    semantic: Annotated[
        bool,
        typer.Option("--semantic/--no-semantic", help="Ask in float64 too: one more application, compile included."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of every random number.")] = 0,
    iterations: Annotated[int, typer.Option(help="Runs, all but the first on fresh random inputs.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the stage steps.")] = 3,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, or file.py:factory of one from parameters.")] = "adamw",
    loss: Annotated[str | None, typer.Option(help="file.py:fn of the outputs, instead of random cotangents.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="With deterministic algorithms.")] = False,
    anomaly: Annotated[bool, typer.Option("--anomaly", help="With autograd's anomaly mode.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every leaf, every note, what it cost.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 — read in main
) -> None:
    """Does the transformed program still compute the same thing?"""
    options = dict(read_option(text) for text in option or ())
    if json_file is not None:
        require_writable(json_file)
    progress = Console(stderr=True)
    with (
        nullcontext() if verbose else counting_warnings(progress),
        progress.status("loading torch", spinner="dots") as status,
    ):
        # torch takes seconds to import: `--help` and `show` are not to wait for it
        try:
            from torchdelta.engine.api import check
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(f"a check needs {error.name}, which is not installed: install it first") from error
        report = check(
            program,
            transform=transform,
            options=options,
            stages=stages,
            policy=policy,
            ignore=ignore,
            strict=f"{strict},casts" if strict_casts else strict,
            seed=seed,
            iterations=iterations,
            steps=steps,
            optimizer=optimizer,
            loss=loss,
            deterministic=deterministic,
            anomaly=anomaly,
            semantic=semantic,
            progress=lambda part: status.update(Text(f"{transform}: {part}")),
        )
    print_report(report, verbose=verbose)
    if json_file is not None:
        write_report(report, json_file)
    raise typer.Exit(EXIT_OF[report.verdict])
