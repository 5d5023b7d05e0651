"""Exit codes, the same for every command that ends in a verdict."""

from __future__ import annotations

from torchdelta.records.verdict import Verdict

USAGE = 2
INTERNAL = 70
"""A mistake of torchdelta's own: sysexits' EX_SOFTWARE, because Python's own 1 would say that the program diverged."""

EXIT_OF = {
    Verdict.EQUIVALENT: 0,
    Verdict.DIVERGED: 1,
    Verdict.INCONCLUSIVE: 3,
    Verdict.CRASHED: 4,
    Verdict.TIMED_OUT: 4,
}
