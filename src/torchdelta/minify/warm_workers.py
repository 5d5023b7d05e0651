"""Workers that are warm before the first query: they have imported everything, and a backend has compiled once.

This module needs no torch, so a command can start its workers before it imports torch itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchdelta.check.isolated import warm_pool
from torchdelta.isolate.pool import Pool

WORKER = "torchdelta.minify.worker"


def pool_for(transform: str | None, *, preload: Sequence[str] = (), from_here: bool = False) -> Pool:
    """Return a pool of two workers, not entered yet, which are ready for checks and minifying before their first query.

    They import what these need and the modules `preload`, and compile once: with inductor if that is the `transform`,
    and otherwise with the backend `eager`. With `from_here` they are forked from this process, which has to be a single
    thread.
    """
    return warm_pool(transform, workers=2, preload=(WORKER, *preload), from_here=from_here, warm="eager")
