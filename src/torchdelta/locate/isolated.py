"""A search for the culprit in a worker: a candidate that dies meanwhile costs the worker alone.

This process needs no torch for it: only the worker imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchdelta.errors import SearchFailed
from torchdelta.isolate.pool import Pool
from torchdelta.records.case import CheckOptions, SearchLimits
from torchdelta.records.codec import encode
from torchdelta.records.failure import Failure
from torchdelta.records.location import Location
from torchdelta.records.report import Report

WORKER = "torchdelta.locate.worker"


def locate_isolated(
    program: str,
    options: CheckOptions,
    report: Report,
    *,
    pool: Pool,
    limits: SearchLimits,
    settings: Mapping[str, Any] | None = None,
    graphs: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Location:
    """Search for the culprits of a named program in a worker of `pool`, wait for it, and return the location.

    `report` is that of the check, which is not run again. `options` must have names only (`is_named`). `settings` are
    compiler settings that the worker has during the search. Graphs of dynamo that the search runs are written into the
    directory `graphs`; None writes none. Of `limits`, only time and memory count. `progress` gets the name of each part
    of the search. SearchFailed if the worker died, or exceeded a limit; a TorchDeltaError of the search is raised too,
    and RuntimeError for its other exceptions.
    """
    request = {
        "program": program,
        "options": encode(options),
        "report": encode(report),
        "settings": dict(settings or {}),
        "graphs": str(graphs) if graphs is not None else None,
    }
    outcome = pool.ask(
        f"{WORKER}:locate_program",
        request,
        deadline_s=limits.timeout_s,
        memory_bytes=limits.memory_bytes,
        progress=progress,
    )
    result = outcome.read(Location, "location", program=program)
    if isinstance(result, Failure):
        raise SearchFailed(f"the search ended without an answer: {result.message}{outcome.last_words}")
    return result
