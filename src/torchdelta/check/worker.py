"""What a worker runs for `check`: a program by its name, whose report goes back as plain data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchdelta._torch.compile import settings
from torchdelta.check.prepare import prepare
from torchdelta.check.thorough import run_check
from torchdelta.isolate.directories import QueryDirectory
from torchdelta.program.memory import expect_frozen
from torchdelta.records.codec import encode


def get_ready() -> None:
    """Tell `memory` that what is imported before workers are forked is frozen, so that no check has to ask."""
    expect_frozen()


def check_program(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Check a program that is named; return its report and the warnings that were raised."""
    with settings.applied(request["settings"]), collected_warnings() as texts:
        report = run_check(prepare(request["program"], progress=place.tell, **request["words"]))
    return {"report": encode(report), "warnings": texts}


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Keep warnings from the terminal; the list has their texts once the block has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield texts
    texts += [warnings.formatwarning(each.message, each.category, each.filename, each.lineno) for each in caught]
