"""The versions of this process: torch, Python and platform, and whether torch is new enough."""

from __future__ import annotations

import platform

import torch

from torchdelta.errors import EnvironmentUnfit
from torchdelta.records.report import Environment

OLDEST = (2, 13)
"""The oldest torch that is tested."""


def require_supported() -> None:
    """Raise EnvironmentUnfit if this process has a torch older than `OLDEST`."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EnvironmentUnfit(
            f"torchdelta needs torch {oldest} or newer, and this is {torch.__version__}: upgrade torch"
        )


def environment() -> Environment:
    """Return the versions of torch and Python, and the platform, of this process."""
    return Environment(
        torch=torch.__version__, python=platform.python_version(), platform=f"{platform.system()} {platform.machine()}"
    )
