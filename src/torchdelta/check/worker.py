"""The task that a worker runs for `check`: it checks a named program, and its report goes back as plain data."""

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
from torchdelta.records.case import CheckOptions
from torchdelta.records.codec import decode, encode


def get_ready() -> None:
    """Tell `program.memory` that all objects are frozen before workers fork, so that no check has to count them."""
    expect_frozen()


def check_program(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Check the program of a request that `check_isolated` wrote; return its report and the warnings, encoded.

    The compiler settings of the request hold during the check, and `place` is told each part of it as it begins.
    """
    options = decode(CheckOptions, request["options"], "options")
    with settings.applied(request["settings"]), collected_warnings() as texts:
        report = run_check(prepare(request["program"], options=options, progress=place.tell))
    return {"report": encode(report), "warnings": texts}


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Keep the block's warnings from the terminal; yield a list, which gets their texts when the block ends.

    If the block raises, the list stays empty.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield texts
    texts += [warnings.formatwarning(each.message, each.category, each.filename, each.lineno) for each in caught]
