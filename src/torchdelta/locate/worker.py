"""What a worker runs for `locate`: a program by its name, whose culprits go back as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdelta._torch.compile import settings
from torchdelta.check.worker import collected_warnings
from torchdelta.isolate.directories import QueryDirectory
from torchdelta.locate.locator import locate
from torchdelta.records.codec import encode


def locate_program(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Name the culprit in a program that is named; return the location and the warnings that were raised."""
    with settings.applied(request["settings"]), collected_warnings() as texts:
        location = locate(request["program"], progress=place.tell, **request["words"])
    return {"location": encode(location), "warnings": texts}
