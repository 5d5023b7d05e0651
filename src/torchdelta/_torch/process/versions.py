"""Which torch is here, and whether it is one that is promised to work."""

from __future__ import annotations

import platform

import torch

from torchdelta.errors import EnvironmentUnfit
from torchdelta.records.report import Environment

OLDEST = (2, 13)


def require_supported() -> None:
    """Raise EnvironmentUnfit on a torch older than the oldest tested."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EnvironmentUnfit(
            f"torchdelta needs torch {oldest} or newer, and this is {torch.__version__}: upgrade torch"
        )


def environment() -> Environment:
    """Describe what this process runs on."""
    return Environment(
        torch=torch.__version__, python=platform.python_version(), platform=f"{platform.system()} {platform.machine()}"
    )
