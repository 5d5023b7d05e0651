"""The five verdicts, and the worst of several."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NoReturn


class Verdict(enum.Enum):
    """An answer without a truth value: `if verdict:` is a TypeError, because five answers are not a yes and a no."""

    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    DIVERGED = "diverged"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"

    def __bool__(self) -> NoReturn:
        """Raise TypeError: a verdict has no truth value."""
        raise TypeError(f"a verdict has no truth value: compare it, as in `verdict is Verdict.{self.name}`")

    @property
    def severity(self) -> int:
        """How bad the verdict is: 0 for equivalent, then 1 to 4 in the order of the members."""
        return _SEVERITY[self]

    @property
    def is_failure(self) -> bool:
        """Whether the candidate computes something else, crashes, or does not finish in time."""
        return self in (Verdict.DIVERGED, Verdict.TIMED_OUT, Verdict.CRASHED)


_SEVERITY = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; `inconclusive` if there are none, because nothing passes vacuously."""
    return max(verdicts, key=lambda verdict: verdict.severity, default=Verdict.INCONCLUSIVE)
