"""A search for the culprit in a worker: a candidate that dies meanwhile costs the worker alone.

This process needs no torch for it: only the worker imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchdelta.check.isolated import followed, last_line
from torchdelta.errors import SearchFailed
from torchdelta.isolate.pool import Pool
from torchdelta.records.codec import decode
from torchdelta.records.location import Location

WORKER = "torchdelta.locate.worker"


def locate_isolated(
    program: str,
    words: Mapping[str, Any],
    *,
    pool: Pool,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Location:
    """Name the culprit in a program that is named; SearchFailed where the search took its worker with it."""
    request = {"program": program, "words": dict(words), "settings": dict(settings or {})}
    outcome = followed(pool, f"{WORKER}:locate_program", request, timeout_s, memory_bytes, progress)
    if outcome.answer is not None:
        return decode(Location, outcome.answer["location"], "location")  # type: ignore[no-any-return]
    outcome.raise_own_error()
    assert outcome.failure is not None
    raise SearchFailed(f"the search ended without an answer: {outcome.failure.message}{last_line(outcome.output)}")
