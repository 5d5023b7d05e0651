"""Options of the commands that make a failure small."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from torchdelta.errors import UsageError

OutDirectory = Annotated[Path, typer.Option("--out", "-o", help="The directory for everything that is found.")]
Memory = Annotated[str | None, typer.Option(help="What a worker may hold: 2GB, 512MiB, …")]
NoData = Annotated[bool, typer.Option("--no-data", help="Random numbers stand for weights and data in the script.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds that the first query may take.")]
Queries = Annotated[int | None, typer.Option(help="At most so many queries.")]
Seconds = Annotated[float | None, typer.Option(help="At most so long.")]
Match = Annotated[str | None, typer.Option(help="A regular expression: of several failures, the one that is meant.")]
WithIssue = Annotated[bool, typer.Option("--issue", help="Write the text of an issue beside the script.")]


def require_directory(path: Path) -> None:
    """Raise UsageError where a directory cannot be made or written to."""
    # minutes of compiling are not to be lost to a place that could never be written
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror or error}; name another place") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"cannot write into {path}: name another place")
