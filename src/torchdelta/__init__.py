"""torchdelta: does it still compute the same thing?

The names below are the public face. They are resolved when first used, so that importing the package is fast and
reading a report needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torchdelta.engine.api import assert_equivalent, check, compare
    from torchdelta.errors import (
        Crashed,
        Diverged,
        EnvironmentUnfit,
        Inconclusive,
        NotEquivalent,
        ProgramError,
        ReportUnreadable,
        TimedOut,
        TorchDeltaError,
        UsageError,
    )
    from torchdelta.records.codec import from_json, read_report, to_json, write_report
    from torchdelta.records.report import SCHEMA_VERSION, Report
    from torchdelta.records.verdict import Verdict

_HOMES = {
    "torchdelta.engine.api": ("assert_equivalent", "check", "compare"),
    "torchdelta.errors": (
        "Crashed",
        "Diverged",
        "EnvironmentUnfit",
        "Inconclusive",
        "NotEquivalent",
        "ProgramError",
        "ReportUnreadable",
        "TimedOut",
        "TorchDeltaError",
        "UsageError",
    ),
    "torchdelta.records.codec": ("from_json", "read_report", "to_json", "write_report"),
    "torchdelta.records.report": ("SCHEMA_VERSION", "Report"),
    "torchdelta.records.verdict": ("Verdict",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SCHEMA_VERSION",
    "Crashed",
    "Diverged",
    "EnvironmentUnfit",
    "Inconclusive",
    "NotEquivalent",
    "ProgramError",
    "Report",
    "ReportUnreadable",
    "TimedOut",
    "TorchDeltaError",
    "UsageError",
    "Verdict",
    "assert_equivalent",
    "check",
    "compare",
    "from_json",
    "read_report",
    "to_json",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'torchdelta' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
