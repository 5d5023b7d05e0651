"""What a guard saw: one record for each graph, and a summary of them all."""

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
"""What a guard may be told, for the words that are one of a few."""


@dataclass(frozen=True, kw_only=True)
class GuardedGraphRecord:
    """One graph that a compiler was given under guard."""

    number: int
    """In the order in which graphs came, from 1."""
    name: str
    """Where the graph comes from: the user's first line in it."""
    backend: str
    level: str
    """`dynamo`, or after AOTAutograd `forward`, `backward` or `inference`."""
    nodes: int
    verdict: Verdict | None = None
    """None where it was not checked, and `unchecked` says why."""
    unchecked: str = "it was compiled, and never called"
    reason: str = ""
    call: int = 0
    """Which call of the graph this is about, from 1; 0 is its compilation."""
    culprit: Culprit | None = None
    directory: str | None = None
    """Where its recording and its report are."""
    repro: str | None = None


@dataclass(frozen=True, kw_only=True)
class GuardSummary:
    """What came of a guarded run."""

    graphs: int
    checked: int
    verdicts: dict[str, int] = field(default_factory=dict)
    """How many graphs have each verdict."""
    unchecked: dict[str, int] = field(default_factory=dict)
    """How many graphs were not checked, by why not."""
    findings: tuple[GuardedGraphRecord, ...] = ()
    out: str | None = None
    """Where the index is, and a directory for each finding."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """What the checks cost."""
