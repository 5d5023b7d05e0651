"""What a worker runs: a check, a search or a query, whose answer goes back as plain data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchdelta._torch import settings
from torchdelta.engine import api
from torchdelta.engine.asking import prepare_subject
from torchdelta.engine.named_op import named_op
from torchdelta.engine.opcheck import check_op
from torchdelta.execute.memory import expect_frozen
from torchdelta.execute.named import import_place
from torchdelta.isolate.place import Place
from torchdelta.minify.subject import Subject
from torchdelta.records.case import Case
from torchdelta.records.codec import decode, encode


def get_ready() -> None:
    """Spare every check a question: what is imported before workers are forked is frozen."""
    expect_frozen()


def check_subject(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Check a subject that lies in files."""
    case = decode(Case, request["case"], "case")
    torch.set_num_threads(request["threads"])
    with settings.applied(request["settings"]), _silenced():
        for module in request["imports"]:
            import_place(module)
        subject = Subject.read(Path(request["subject"]), allow=request["allow"])
        return {"report": encode(prepare_subject(subject, case, case.transform, place.tell).run())}


def check_program(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Check a program that is named."""
    with settings.applied(request["settings"]), _counted() as caught:
        report = api.check(request["program"], progress=place.tell, **request["words"])
    return {"report": encode(report), "warnings": caught}


def locate_program(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Name the culprit in a program that is named."""
    with settings.applied(request["settings"]), _counted() as caught:
        location = api.locate(request["program"], progress=place.tell, **request["words"])
    return {"location": encode(location), "warnings": caught}


def check_operator(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Check an operator that is named."""
    seed = request["seed"]
    with _counted() as caught:
        named = named_op(request["op"], seed=seed, **request["call"])
        report = check_op(named.op, named.args, named.kwargs, seed=seed, progress=place.tell, **request["words"])
    return {"report": encode(report), "warnings": caught}


@contextmanager
def _silenced() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _counted() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield texts
    texts += [warnings.formatwarning(each.message, each.category, each.filename, each.lineno) for each in caught]
