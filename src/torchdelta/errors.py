"""Everything that torchdelta raises, under one root, and which exceptions of foreign code count as its failure.

An error carries the report that was complete before it, if there is one. Foreign code is that of a program, a pass or
a compiler. `caught_from_user_code` returns the classes to catch around it. In the caller's process an exception that
is not an `Exception` belongs to the caller: it skips a test, cancels a task or interrupts the run. In a worker it is
a failure like any other, because an extension in Rust panics by raising one (`catch_everything`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdelta.records.report import Report


class TorchDeltaError(Exception):
    """The root: its message says what is wrong, where, and what to do."""

    def __init__(self, message: str, *, report: Report | None = None) -> None:
        """Keep the message, `shortened`, and the report that was complete before the error, if there is one."""
        super().__init__(shortened(message))
        self.report = report


class UsageError(TorchDeltaError):
    """The request makes no sense: an unknown name, a malformed policy, a file that cannot be written."""


class Refused(UsageError):
    """A guard refuses to run a user's script any further. It passes through the script and is not the script's own."""


class ProgramError(TorchDeltaError):
    """The user's own program does not load, cannot be copied or fails when run eagerly."""


class EagerFails(ProgramError):
    """The user's own program fails when run eagerly, in the given stage; its exception is the `__cause__`."""

    def __init__(self, message: str, *, report: Report | None = None, stage: str = "") -> None:
        super().__init__(message, report=report)
        self.stage = stage


class EnvironmentUnfit(TorchDeltaError):
    """This machine cannot do it, for example because it has no C++ compiler."""


class ReportUnreadable(TorchDeltaError):
    """A file is not a report, or has a schema that this version does not read."""


class ReproUnwritable(TorchDeltaError):
    """No script of torch alone can show the finding; the message says why."""


class NotEquivalent(TorchDeltaError, AssertionError):
    """A check ended with another verdict than `equivalent`; `report` is always set."""

    report: Report


class Diverged(NotEquivalent):
    """The candidate computes something else."""


class Crashed(NotEquivalent):
    """The candidate raised or died."""


class CompilerFailed(Crashed):
    """A compiler or its compiled code raised, although the graph runs eagerly."""


class TimedOut(NotEquivalent):
    """The candidate did not finish in time."""


class Inconclusive(NotEquivalent):
    """The evidence does not decide; the report says why."""


class NothingToMinify(TorchDeltaError):
    """No graph of the program fails by itself, so there is no failure to make smaller."""


class SearchFailed(TorchDeltaError):
    """The search for the culprit ended its worker, although the check did not."""


_caught: tuple[type[BaseException], ...] = (Exception, SystemExit)


LONGEST = 4000
"""A longer message is cut, because a screen does not show it and every step would copy it."""
_SLACK = 1000
"""A text that was cut is longer than `LONGEST` by the words that say so, and is not cut again."""
_LONGEST_TRACEBACK = 64 << 10
_full_texts: Path | None = None


def message_of(error: BaseException) -> str:
    """Return the message of an exception of foreign code, `shortened`; empty if it has none."""
    return shortened(full_message_of(error))


def full_message_of(error: BaseException) -> str:
    """Return the whole message of an exception of foreign code.

    If its `__str__` raises an Exception, return a text with the class of that one instead.
    """
    try:
        return str(error)
    except Exception as failed:
        return f"(its message cannot be read: {type(failed).__name__})"


def describe(error: BaseException) -> str:
    """Return `CLASS: MESSAGE` of an exception of foreign code, the message `shortened`, or `CLASS (no message)`."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else f"{type(error).__name__} (no message)"


def shortened(text: str) -> str:
    """Return a text, or if it is longer than `LONGEST + _SLACK` its first and last `LONGEST // 2` characters.

    Between these two parts stand the number of characters that are left out, and the path of a file with the whole
    text. That file is written now, in the directory of `keep_full_texts`, by default among the temporary files. If it
    cannot be written, the result says why in place of the path.
    """
    if len(text) <= LONGEST + _SLACK:
        return text
    half = LONGEST // 2
    cut = len(text) - 2 * half
    # in a paragraph of its own, so that the first one is still a part of the text
    return f"{text[:half]}\n\n[{cut:,} characters are left out here; {_keep(text)}]\n\n{text[-half:]}"


def shortened_traceback(text: str) -> str:
    """Return the text of a traceback; if it is very long, its end, after a line that says how much is left out."""
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    return f"[{len(text) - _LONGEST_TRACEBACK:,} characters are left out]\n{text[-_LONGEST_TRACEBACK:]}"


def keep_full_texts(directory: Path) -> None:
    """Set the directory for the full texts of long messages (`shortened`); for workers, whose own is removed."""
    global _full_texts
    _full_texts = directory


def _keep(text: str) -> str:
    """Write a text to a file that is named by its content; return a clause that says where it is, or why it is not.

    The file is in the directory of `keep_full_texts`, by default among the temporary files. No OSError is raised.
    """
    data = text.encode(errors="backslashreplace")
    directory = _full_texts or Path(tempfile.gettempdir())
    path = directory / f"torchdelta-message-{hashlib.sha256(data).hexdigest()[:12]}.txt"
    # its name can be known beforehand: a link of another user must not lead to a file of this one
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
            file.write(data)
    except OSError as error:
        return f"they could not be written to {path}: {error.strerror or error}"
    return f"the whole text is in {path}"


def caught_from_user_code() -> tuple[type[BaseException], ...]:
    """Return the classes to catch around foreign code: Exception and SystemExit, or BaseException in a worker.

    It is used as `except errors.caught_from_user_code() as error`; `catch_everything` makes it BaseException.
    """
    return _caught


def catch_everything() -> None:
    """Let `caught_from_user_code` return BaseException in this process from now on; for workers."""
    global _caught
    _caught = (BaseException,)
