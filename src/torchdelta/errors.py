"""Everything torchdelta raises, under one root; an error carries what was achieved before it.

What code that is not ours may raise, a program's, a pass's or a compiler's, and we take for its failure.

In the caller's process what is no `Exception` is meant for somebody else: it skips a test, cancels a task or interrupts
everything. In a worker nobody else is there, and an extension in Rust panics by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdelta.records.report import Report


class TorchDeltaError(Exception):
    """The root: its message says what is wrong, where, and what to do."""

    def __init__(self, message: str, *, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


class UsageError(TorchDeltaError):
    """What was asked for makes no sense: an unknown name, a malformed policy, an unwritable file."""


class Refused(UsageError):
    """A user's script is not run, or not any further: the one exception that passes through it and is not its own."""


class ProgramError(TorchDeltaError):
    """The user's own program does not load, cannot be copied or fails when run eagerly."""


class EagerFails(ProgramError):
    """The user's own program fails when run eagerly."""


class EnvironmentUnfit(TorchDeltaError):
    """This machine cannot do it, for example because it has no C++ compiler."""


class ReportUnreadable(TorchDeltaError):
    """A file is not a report, or one of a schema that this version does not read."""


class ReproUnwritable(TorchDeltaError):
    """A finding that no script of torch alone can show; the message says what stands in the way."""


class NotEquivalent(TorchDeltaError, AssertionError):
    """A check that did not end as `equivalent`; `report` is always there."""

    report: Report


class Diverged(NotEquivalent):
    """The candidate computes something else."""


class Crashed(NotEquivalent):
    """The candidate raised or died."""


class CompilerFailed(Crashed):
    """A compiler raised, or what it made did, where the graph runs eagerly."""


class TimedOut(NotEquivalent):
    """The candidate did not finish in time."""


class Inconclusive(NotEquivalent):
    """The evidence decides nothing; the report says why."""


class NothingToMinify(TorchDeltaError):
    """No graph of the program shows a failure that could be made smaller."""


class SearchFailed(TorchDeltaError):
    """Looking for the culprit ended its process, although the check did not."""


_caught: tuple[type[BaseException], ...] = (Exception, SystemExit)


def caught_from_user_code() -> tuple[type[BaseException], ...]:
    """Return what is caught around code that is not ours: `except foreign.raised() as error`."""
    return _caught


def catch_everything() -> None:
    """Take whatever is raised in this process, from now on, for a failure."""
    global _caught
    _caught = (BaseException,)
