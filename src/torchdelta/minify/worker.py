"""The tasks that a worker runs for `minify`: it captures a program's graphs, or checks a subject that lies in files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdelta._torch.compile import settings
from torchdelta._torch.process import runtime
from torchdelta.check.graphs import write_graphs
from torchdelta.check.prepare import prepare
from torchdelta.isolate.directories import QueryDirectory
from torchdelta.minify.capture import graphs_of
from torchdelta.minify.queries import prepare_subject
from torchdelta.minify.subject import Subject
from torchdelta.program.loading import import_place
from torchdelta.records.case import Case, CheckOptions
from torchdelta.records.codec import decode, encode


def capture_program(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Load the program of a request, capture its graphs, and write them into the directory that the request names.

    Return `{"directory": …}` with that directory. `capture_isolated` wrote the request; its compiler settings hold
    meanwhile. `place` is told the name of each part.
    """
    options = decode(CheckOptions, request["options"], "options")
    with settings.applied(request["settings"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check = prepare(request["program"], options=options, progress=place.tell)
        captured = graphs_of(check, request["level"])
        write_graphs(captured, Path(request["graphs"]))
    return {"directory": request["graphs"]}


def check_subject(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Check the subject whose directory a request names, and return `{"report": …}` with the encoded report.

    `WorkerOracle.begin` wrote the request and the subject's files. Flags of torch are set for good, and settings of the
    compiler for the check; modules are imported first. `place` is told the name of each part of the check.
    """
    case = decode(Case, request["case"], "case")
    runtime.apply_flags(request["flags"])
    with settings.applied(request["settings"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in request["imports"]:
            import_place(module)
        subject = Subject.read(Path(request["subject"]), allow=request["allow"])
        return {"report": encode(prepare_subject(subject, case, case.transform, place.tell).run())}
