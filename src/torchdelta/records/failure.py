"""A failure of the candidate, and its signature: the part of it that another run of the same bug has in common.

    RuntimeError: shape mismatch at 0x7f3a: [2, 3] and [4, 5]      (one run)
    RuntimeError: shape mismatch at 0x91bc: [8, 3] and [4, 1]      (another)
    exception/forward/RuntimeError: shape mismatch at …: [#, #] and [#, #]      (the signature of both)

Start reading at `Signature.is_same_as`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from torchdelta.errors import LONGEST, full_message_of, shortened, shortened_traceback

CLEAR = 1
"""A divergence is clear if its error is at least this many orders of magnitude above the allowed error."""
_DUMPED = re.compile(r"(target|args\[\d+\]|kwargs): ")
_VOLATILE = (
    (re.compile(r"\b0x[0-9a-fA-F]+"), "…"),
    (re.compile(r"(?<![\w.+~-])(?:[\w.+~-]*/)+"), ""),
    (re.compile(r"\b(cpp|triton)_fused_\w+"), r"\1_fused_…"),
    # an address or a hash without 0x; the conditions come first, so that words, plain numbers and fractions stay
    (re.compile(r"(?<!\d\.)\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def normalise(message: str) -> str:
    """Return the message with its volatile parts replaced, which differ between runs of the same failure.

    An address becomes `…`, a number `#`, the name of a fused kernel its start; directories of paths and line breaks go.
    """
    for pattern, replacement in _VOLATILE:
        message = pattern.sub(replacement, message)
    return message.strip()


def essence(message: str) -> str:
    """Return the part of a message that says what is wrong, as one line.

    That is what follows the first " error: " in its line, as a compiler prints it; or, if the first line ends in
    `raised:`, the next line that is not empty (that first line itself if none follows); or else the first paragraph,
    its lines joined, up to the dump of arguments that inductor appends.
    """
    lines = [line.strip() for line in message.strip().splitlines()]
    if errors := [line.partition(" error: ")[2] for line in lines if " error: " in line]:
        return errors[0]
    if lines and lines[0].endswith("raised:"):
        return next(filter(None, lines[1:]), lines[0])
    paragraph = itertools.takewhile(lambda line: line and not _DUMPED.match(line), lines)
    return " ".join(paragraph)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The identity of a failure, which other runs of the same bug share."""

    kind: str
    stage: str
    type: str
    message: str
    where: str = ""
    """File and line of an exception; empty if they are torch's or torchdelta's."""
    magnitude: int | None = None
    """Of a divergence: how many orders of magnitude the error is above the allowed error, at most `signatures.MOST`."""

    def __str__(self) -> str:
        beyond = "" if self.magnitude is None else f", 10^{self.magnitude} times the allowed error or more"
        return f"{self.kind}/{self.stage}/{self.type}{': ' if self.message else ''}{self.message}{beyond}"

    def is_like(self, other: Signature) -> bool:
        """Tell whether this failure and `other` may have the same cause, if one is of a program, and one of its part.

        Kind, type and message must be equal, and for divergences the stage too; `where` and `magnitude` do not count.
        """
        is_alike = (self.kind, self.type, self.message) == (other.kind, other.type, other.message)
        return is_alike and (self.kind != "divergence" or self.stage == other.stage)

    def is_same_as(self, other: Signature) -> bool:
        """Tell whether another failure is this one: kind, type, message and `where` are equal.

        For exceptions and divergences the stage must be equal too. If this is a clear divergence (`CLEAR`), the other
        must be clear as well; otherwise, or if one of them has no magnitude, the size of the error does not count.
        """
        is_same = (self.kind, self.type, self.message, self.where) == (
            other.kind,
            other.type,
            other.message,
            other.where,
        )
        # the stage of a process that died is often not known
        is_same = is_same and (self.stage == other.stage or self.kind not in ("exception", "divergence"))
        if not is_same or self.magnitude is None or other.magnitude is None:
            return is_same
        # a large error that shrinks to a doubtful one is another failure, or none
        return other.magnitude >= min(self.magnitude, CLEAR)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How the candidate failed.

    `kind` is `exception`, or how its process ended without one: `signal` (`type` is its name), `timeout`, `exit`
    (`type` is the status), `memory` (also if memory beyond a limit was refused), `output`, `files` (its
    own files were deleted, damaged or could not be written); `cancelled` means that the answer was no longer wanted.
    """

    kind: str
    type: str
    message: str
    signature: Signature
    traceback: str = ""

    def __str__(self) -> str:
        words = self.message or ("out of memory" if self.kind == "memory" else "(no message)")
        return f"{self.type}: {words}" if self.type else words

    def __post_init__(self) -> None:
        """Cut a very long traceback down to its end."""
        object.__setattr__(self, "traceback", shortened_traceback(self.traceback))

    @classmethod
    def of(cls, error: BaseException, *, stage: str, traceback: str = "", where: str = "") -> Failure:
        """Return the failure of a candidate that raised an exception in a stage.

        `where` is file and line of the exception, for the signature. A long message is cut.
        """
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return cls.of_exception(name, full_message_of(error), stage=stage, traceback=traceback, where=where)

    @classmethod
    def of_exception(cls, name: str, message: str, *, stage: str, traceback: str = "", where: str = "") -> Failure:
        """Return the failure of a candidate that raised an exception, given its name and its whole message.

        A long message is cut. The signature is made from the whole one, because the line that matters may be anywhere
        in it.
        """
        signature = Signature(
            kind="exception", stage=stage, type=name, message=normalise(essence(message)[:LONGEST]), where=where
        )
        return cls(kind="exception", type=name, message=shortened(message), signature=signature, traceback=traceback)

    @classmethod
    def of_signal(cls, name: str, *, stage: str) -> Failure:
        """Return the failure of a process that a signal ended."""
        return cls._of_end("signal", name, f"the process was ended by {name}", stage=stage)

    @classmethod
    def of_timeout(cls, deadline_s: float, *, stage: str) -> Failure:
        """Return the failure of a process that did not finish in time."""
        return cls._of_end("timeout", "", f"not finished after {deadline_s:g} s", stage=stage)

    @classmethod
    def of_exit(cls, status: int, *, stage: str) -> Failure:
        """Return the failure of a process that exited without an answer."""
        return cls._of_end("exit", str(status), f"the process exited with status {status} and no answer", stage=stage)

    @classmethod
    def of_memory(cls, limit_bytes: int, *, stage: str) -> Failure:
        """Return the failure of a process that used more memory than its limit."""
        limit = f"{limit_bytes / 2**20:.0f} MiB" if limit_bytes >= 2**20 else f"{limit_bytes} bytes"
        return cls._of_end("memory", "", f"more than {limit} of memory", stage=stage)

    @classmethod
    def of_refused_memory(cls, message: str, *, stage: str, traceback: str = "") -> Failure:
        """Return the failure of a process that was refused memory and reported so.

        The signature has no message: the same failure in a smaller program asks for another amount.
        """
        return replace(cls._of_end("memory", "", message, stage=stage), traceback=traceback)

    @classmethod
    def of_output(cls, limit_bytes: int, *, stage: str) -> Failure:
        """Return the failure of a process that printed more than its limit."""
        return cls._of_end("output", "", f"more than {limit_bytes / 2**20:.0f} MiB of output", stage=stage)

    @classmethod
    def of_files(cls, message: str, *, stage: str) -> Failure:
        """Return the failure of a process whose answer was lost, because its files were damaged or not writable."""
        return cls._of_end("files", "", message, stage=stage)

    @classmethod
    def of_cancelled(cls, *, stage: str) -> Failure:
        """Return the failure of a process that was ended because its answer was no longer wanted."""
        return cls._of_end("cancelled", "", "cancelled", stage=stage)

    @classmethod
    def _of_end(cls, kind: str, name: str, message: str, *, stage: str) -> Failure:
        """Return the failure of a process that ended without an exception.

        Its signature has no message, because the numbers in the message are limits.
        """
        # the numbers in these messages are limits, which are not part of the failure
        signature = Signature(kind=kind, stage=stage, type=name, message="")
        return cls(kind=kind, type=name, message=message, signature=signature)
