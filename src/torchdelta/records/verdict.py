"""The five answers, and which of several is the worst."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NoReturn


class Verdict(enum.Enum):
    """An answer without a truth value: `if verdict:` is a TypeError, because no two answers are one yes."""

    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    DIVERGED = "diverged"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"

    def __bool__(self) -> NoReturn:
        raise TypeError(f"a verdict has no truth value: compare it, as in `verdict is Verdict.{self.name}`")

    @property
    def severity(self) -> int:
        """0 for equivalent; the higher, the worse."""
        return _SEVERITY[self]

    @property
    def is_failure(self) -> bool:
        """Whether the candidate does something else, or does not come to an end."""
        return self in (Verdict.DIVERGED, Verdict.TIMED_OUT, Verdict.CRASHED)


_SEVERITY = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; of none at all, `inconclusive`: nothing passes vacuously."""
    return max(verdicts, key=lambda verdict: verdict.severity, default=Verdict.INCONCLUSIVE)
