"""What this process runs on, told without importing torch."""

from __future__ import annotations

import platform
from importlib import metadata

from torchdelta.records.report import Environment


def environment() -> Environment:
    """Describe the torch that is installed, Python and the platform."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return Environment(
        torch=version, python=platform.python_version(), platform=f"{platform.system()} {platform.machine()}"
    )
