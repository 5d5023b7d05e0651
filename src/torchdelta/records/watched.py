"""What comes of watching the passes of a compiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchdelta.records.passes import PassFinding


# not frozen: it is read while the run that fills it goes on
@dataclass(kw_only=True, eq=False)
class Watched:
    """What was seen so far: every pass, and those that change what is computed."""

    findings: list[PassFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why."""
    passes: int = 0
    """How many ran."""
    graphs: int = 0
    """Over how many graphs; each phase has its own."""
    changed: int = 0
    """How many of the graphs passes changed at all."""
    checked: int = 0
    """How many of those were held against what they were, on real inputs, with an answer."""

    @property
    def seen(self) -> str:
        """How much was looked at, in one sentence."""
        return (
            f"{self.passes} passes over {self.graphs} graphs: {self.changed} were changed, and {self.checked} of those "
            "checked"
        )

    def note(self, words: str) -> None:
        """Say something once."""
        if words not in self.notes:
            self.notes.append(words)
