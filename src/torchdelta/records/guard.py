"""The records of a guard: one for each graph that it watched, and a summary of them all."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict

CHOICES: dict[str, tuple[object, ...]] = {
    "check": ("values", "errors", "off"),
    "on_failure": ("raise", "fallback", "report"),
    "record": ("on_failure", "always"),
    "minify": (False, True, "wait"),
    "graph": ("dynamo", "aten"),
}
"""The values that an option of a guard may have, for options with few values."""


@dataclass(frozen=True, kw_only=True)
class GuardedGraphRecord:
    """One graph that was handed to a guarded compiler."""

    number: int
    """Its place in the order of compilation, from 1."""
    name: str
    """Its origin: the first line of the user's code in it."""
    backend: str
    level: str
    """`dynamo`, or after AOTAutograd `forward`, `backward` or `inference`."""
    nodes: int
    verdict: Verdict | None = None
    """None if it was not checked; then `unchecked` says why."""
    unchecked: str = "it was compiled, and never called"
    reason: str = ""
    call: int = 0
    """The call of the graph that the verdict is about, from 1; 0 is its compilation."""
    culprit: Culprit | None = None
    directory: str | None = None
    """The directory of its recording and its report."""
    repro: str | None = None


@dataclass(frozen=True, kw_only=True)
class GuardSummary:
    """The result of a guarded run."""

    graphs: int
    checked: int
    verdicts: dict[str, int] = field(default_factory=dict)
    """How many graphs have each verdict."""
    unchecked: dict[str, int] = field(default_factory=dict)
    """How many graphs were not checked, by the reason."""
    findings: tuple[GuardedGraphRecord, ...] = ()
    out: str | None = None
    """The directory of the index, which has one directory for each finding."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """The time that the checks took."""
