"""What `torchdelta op --opinfo` adds to the command: which operators, in which dtypes, kept where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdelta.cli.reduction import Resume, require_directory
from torchdelta.engine.sweep import DTYPES, Asked, sweep
from torchdelta.errors import UsageError
from torchdelta.records.operators import Sweep

TIMEOUT_S = 180.0
_SAMPLES = 2
_WORKERS = 2


def read_sweep(
    opinfo: Annotated[
        str | None,
        typer.Option(metavar="NAME|all", help="Operators of torch's database: names and patterns with commas, or all."),
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(help=f"Of a sweep: in which dtypes; default {','.join(DTYPES)}.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help=f"Of a sweep: on how many samples; default {_SAMPLES}.")] = None,
    workers: Annotated[int | None, typer.Option(help=f"Of a sweep: how many at a time; default {_WORKERS}.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Of a sweep: the directory that keeps what is found as it comes.")
    ] = None,
    resume: Resume = False,
) -> dict[str, Any]:
    """Return what a sweep is told; None wherever a user said nothing."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is a number above 0, not {workers}")
    if resume and out is None:
        raise UsageError("--resume goes on with what is in a directory: name it by -o")
    told = {"opinfo": opinfo, "dtypes": dtypes, "samples": samples, "workers": workers, "out": out}
    return {**told, "resume": resume or None}


def swept(
    told: Mapping[str, Any],
    words: Mapping[str, Any],
    *,
    timeout_s: float | None,
    memory_bytes: int | None,
    progress: Callable[[str], None],
) -> Sweep:
    """Run the sweep that a user asked for."""
    asked = Asked(
        operators=split(told["opinfo"]),
        dtypes=DTYPES if told["dtypes"] is None else split(told["dtypes"]),
        samples=_SAMPLES if told["samples"] is None else told["samples"],
        **words,
    )
    if told["out"] is not None:
        require_directory(told["out"])
    return sweep(
        asked,
        out=told["out"],
        resume=bool(told["resume"]),
        workers=told["workers"] or _WORKERS,
        timeout_s=timeout_s or TIMEOUT_S,
        memory_bytes=memory_bytes,
        told=lambda done, total, what: progress(f"{done} of {total}, {what}" if total else what),
    )


def split(text: str) -> tuple[str, ...]:
    """Return the words between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
