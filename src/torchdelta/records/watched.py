"""What came of watching the passes of a compiler."""

from __future__ import annotations

from dataclasses import dataclass

from torchdelta.records.passes import PassFinding


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Every pass that was seen, and those that change what is computed."""

    passes: int = 0
    graphs: int = 0
    """Over how many graphs they ran; each phase has its own."""
    changed: int = 0
    """How many of the graphs they changed at all."""
    checked: int = 0
    """How many of those were held against what they were, on real inputs."""
    findings: tuple[PassFinding, ...] = ()
    notes: tuple[str, ...] = ()
