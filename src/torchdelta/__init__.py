"""torchdelta: does it still compute the same thing?

The names below are the public face: `import torchdelta as td`, then `td.check(model, (x,), transform="inductor")`.
Names that need torch are resolved when first used, so importing the package is fast and reading a report needs no
torch. The functions behind them are in `api.py`, where to start reading.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchdelta.errors import (
    CompilerFailed,
    Crashed,
    Diverged,
    EnvironmentUnfit,
    Inconclusive,
    NotEquivalent,
    NothingToMinify,
    ProgramError,
    ReportUnreadable,
    ReproUnwritable,
    SearchFailed,
    TimedOut,
    TorchDeltaError,
    UsageError,
)
from torchdelta.records.codec import from_json, read_report, to_json, write_report
from torchdelta.records.location import Location
from torchdelta.records.report import SCHEMA_VERSION, Report
from torchdelta.records.trust import trust
from torchdelta.records.verdict import Verdict

if TYPE_CHECKING:
    from torchdelta.api import (
        assert_equivalent,
        assign_handles,
        capture,
        check,
        check_op,
        check_pipeline,
        compare,
        compare_captures,
        diagnose,
        guard,
        handles_of,
        locate,
        minify,
        read_capture,
        sensitivity,
        watch_passes,
    )
    from torchdelta.audit import faults
else:  # hidden from a type checker, which would accept any name of a module that has `__getattr__`

    def __getattr__(name: str) -> Any:
        """Return the public object of a name, imported now and kept; AttributeError if it is not in `__all__`."""
        if name not in __all__:
            raise AttributeError(f"module 'torchdelta' has no attribute {name!r}")
        if name == "faults":
            value: Any = importlib.import_module("torchdelta.audit.faults")
        else:
            value = getattr(importlib.import_module("torchdelta.api"), name)
        globals()[name] = value
        return value


__version__ = "0.1.0"

__all__ = [
    "SCHEMA_VERSION",
    "CompilerFailed",
    "Crashed",
    "Diverged",
    "EnvironmentUnfit",
    "Inconclusive",
    "Location",
    "NotEquivalent",
    "NothingToMinify",
    "ProgramError",
    "Report",
    "ReportUnreadable",
    "ReproUnwritable",
    "SearchFailed",
    "TimedOut",
    "TorchDeltaError",
    "UsageError",
    "Verdict",
    "assert_equivalent",
    "assign_handles",
    "capture",
    "check",
    "check_op",
    "check_pipeline",
    "compare",
    "compare_captures",
    "diagnose",
    "faults",
    "from_json",
    "guard",
    "handles_of",
    "locate",
    "minify",
    "read_capture",
    "read_report",
    "sensitivity",
    "to_json",
    "trust",
    "watch_passes",
    "write_report",
]


def __dir__() -> list[str]:
    return sorted(__all__)


class _Face(ModuleType):
    """Keeps public functions: importing the subpackage `compare` would otherwise replace the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; but ignore a module that has the name of a public object."""
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
