"""The task that a worker runs for `locate`: it searches a named program, and the location goes back as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchdelta._torch.compile import settings
from torchdelta.check.graphs import GraphRecorder, write_graphs
from torchdelta.check.prepare import prepare
from torchdelta.check.worker import collected_warnings
from torchdelta.errors import UsageError
from torchdelta.isolate.directories import QueryDirectory
from torchdelta.locate.locator import Locator
from torchdelta.records.case import CheckOptions
from torchdelta.records.codec import decode, encode
from torchdelta.records.report import Report


def locate_program(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Search the program of a request that `locate_isolated` wrote; return the encoded `location`, and `warnings`.

    The check is not run again, because its report is part of the request. If the request names a directory for graphs,
    those that dynamo captured are written into it; a UsageError of the writing is ignored. Other exceptions are not
    caught. `place` is told the name of each part.
    """
    options = decode(CheckOptions, request["options"], "options")
    recorder = GraphRecorder() if request["graphs"] is not None else None
    with settings.applied(request["settings"]), collected_warnings() as texts:
        check = prepare(request["program"], options=options, progress=place.tell)
        report = decode(Report, request["report"], "report")
        location = Locator(check=check, report=report, recorder=recorder).run()
        if recorder is not None and recorder.captured:
            # a graph that cannot be written is captured once more by the caller, whose error says why
            with suppress(UsageError):
                write_graphs(recorder.captured, Path(request["graphs"]))
    return {"location": encode(location), "warnings": texts}
