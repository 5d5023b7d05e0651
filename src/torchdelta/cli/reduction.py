"""What the commands that make a failure small have in common."""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from torchdelta.cli.arguments import needing_torch, read_bytes
from torchdelta.engine.isolated import pool_for
from torchdelta.errors import UsageError
from torchdelta.isolate.born import is_alone
from torchdelta.isolate.pool import Pool
from torchdelta.isolate.worker import import_all
from torchdelta.records.case import DYNAMO, require_level

OutDirectory = Annotated[Path, typer.Option("--out", "-o", help="The directory for everything that is found.")]
Memory = Annotated[str | None, typer.Option(help="What a worker may hold: 2GB, 512MiB, …")]
NoData = Annotated[bool, typer.Option("--no-data", help="Random numbers stand for weights and data in the script.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the directory.")]
WithIssue = Annotated[bool, typer.Option("--issue", help="Write the text of an issue beside the script.")]


def read_limits(
    match: Annotated[
        str | None, typer.Option(help="A regular expression: of several failures, the one that is meant.")
    ] = None,
    level: Annotated[str, typer.Option(help="Whose graphs are made smaller: dynamo, or aot.")] = DYNAMO,
    timeout: Annotated[float, typer.Option(help="Seconds that the first query may take.")] = 600.0,
    queries: Annotated[int | None, typer.Option(help="At most so many queries.")] = None,
    seconds: Annotated[float | None, typer.Option(help="At most so long.")] = None,
    memory: Memory = None,
) -> dict[str, Any]:
    """Return what `minify` and `diagnose` of the engine are told about which failure, and at what cost."""
    for name, value in (("timeout", timeout), ("queries", queries), ("seconds", seconds)):
        if value is not None and value <= 0:
            raise UsageError(f"--{name} is a number above 0, not {value:g}")
    require_level(level)
    try:
        re.compile(match or "")
    except re.error as error:
        raise UsageError(f"--match {match!r} is no regular expression: {error}") from error
    return {
        "match": match,
        "level": level,
        "timeout_s": timeout,
        "queries": queries,
        "seconds": seconds,
        "memory_bytes": read_bytes(memory) if memory is not None else None,
    }


@contextmanager
def workers_for(transform: str, *, what: str) -> Iterator[Pool]:
    """Import torch once for this process and all workers, who get ready while it loads the program."""
    was_alone = is_alone()
    # read when torch is imported: threads that have nothing to do sleep, and leave the machine to the other workers
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # what is still there at the end goes with the process: to look for garbage in it first takes a second
    atexit.register(gc.freeze)
    # a spinner would have a thread, and nobody forks beside one
    with needing_torch(what), Live("loading torch", console=Console(stderr=True), auto_refresh=False, transient=True):
        import_all(["torchdelta.engine.api"])
    with pool_for(transform, from_here=was_alone) as pool:
        yield pool


def require_directory(path: Path) -> None:
    """Raise UsageError where a directory cannot be made or written to."""
    # minutes of compiling are not to be lost to a place that could never be written
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror or error}; name another place") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"cannot write into {path}: name another place")
