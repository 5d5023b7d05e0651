"""A failure and what makes two failures the same one."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

CLEAR = 1
"""Orders of magnitude beyond what is allowed from which on nobody would call a divergence near."""
_DUMPED = re.compile(r"(target|args\[\d+\]|kwargs): ")
_VOLATILE = (
    (re.compile(r"\b0x[0-9a-fA-F]+"), "…"),
    (re.compile(r"(?<![\w.+~-])(?:[\w.+~-]*/)+"), ""),
    (re.compile(r"\b(cpp|triton)_fused_\w+"), r"\1_fused_…"),
    (re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def normalise(message: str) -> str:
    """Return the message without addresses, directories, numbers and line breaks: what two runs have in common."""
    for pattern, replacement in _VOLATILE:
        message = pattern.sub(replacement, message)
    return message.strip()


def essence(message: str) -> str:
    """Return what of a message says what is wrong: a compiler's first error, or the first paragraph.

    A wrapper's own line does not count, and neither does the dump of arguments that inductor appends.
    """
    lines = [line.strip() for line in message.strip().splitlines()]
    if errors := [line.partition(" error: ")[2] for line in lines if " error: " in line]:
        return errors[0]
    if lines and lines[0].endswith("raised:"):
        return next(filter(None, lines[1:]), lines[0])
    said = itertools.takewhile(lambda line: line and not _DUMPED.match(line), lines)
    return " ".join(said)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What makes two failures the same failure."""

    kind: str
    stage: str
    type: str
    message: str
    where: str = ""
    """File and line of an exception, where they are neither torch's nor torchdelta's."""
    magnitude: int | None = None
    """Of a divergence: how many orders of magnitude it lies beyond what is allowed, as far as that tells."""

    def __str__(self) -> str:
        beyond = "" if self.magnitude is None else f", beyond what is allowed by 10^{self.magnitude} or more"
        return f"{self.kind}/{self.stage}/{self.type}{': ' if self.message else ''}{self.message}{beyond}"

    def is_like(self, seen: Signature) -> bool:
        """Tell whether a part of a program may fail so because the whole fails like that."""
        same = (self.kind, self.type, self.message) == (seen.kind, seen.type, seen.message)
        return same and (self.kind != "divergence" or self.stage == seen.stage)

    def is_same_as(self, seen: Signature) -> bool:
        """Tell whether another failure is this one; it may be larger, and hardly smaller."""
        same = (self.kind, self.type, self.message, self.where) == (seen.kind, seen.type, seen.message, seen.where)
        # in which stage a process was that died is often not known
        same = same and (self.stage == seen.stage or self.kind not in ("exception", "divergence"))
        if not same or self.magnitude is None or seen.magnitude is None:
            return same
        # what was far off must not become what barely is: that is another failure, or none
        return seen.magnitude >= min(self.magnitude, CLEAR)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How the candidate failed.

    `kind` is `exception`, or how its process ended without one: `signal` (`type` is its name), `timeout`, `exit`
    (`type` is the status), `memory` (also where it was refused more than a limit allows), `output`; `cancelled` means
    that nobody wanted the answer any more.
    """

    kind: str
    type: str
    message: str
    signature: Signature
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, *, stage: str, traceback: str = "", where: str = "") -> Failure:
        """Describe an exception that the candidate raised in a stage."""
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return cls.of_exception(name, str(error), stage=stage, traceback=traceback, where=where)

    @classmethod
    def of_exception(cls, name: str, message: str, *, stage: str, traceback: str = "", where: str = "") -> Failure:
        """Describe an exception that was raised in another process."""
        signature = Signature(
            kind="exception", stage=stage, type=name, message=normalise(essence(message)), where=where
        )
        return cls(kind="exception", type=name, message=message, signature=signature, traceback=traceback)

    @classmethod
    def of_signal(cls, name: str, *, stage: str) -> Failure:
        """Describe a process that a signal ended."""
        return cls._made("signal", name, f"the process was ended by {name}", stage=stage)

    @classmethod
    def of_timeout(cls, deadline_s: float, *, stage: str) -> Failure:
        """Describe a process that did not finish in time."""
        return cls._made("timeout", "", f"not finished after {deadline_s:g} s", stage=stage)

    @classmethod
    def of_exit(cls, status: int, *, stage: str) -> Failure:
        """Describe a process that left without an answer."""
        return cls._made("exit", str(status), f"the process exited with status {status} and no answer", stage=stage)

    @classmethod
    def of_memory(cls, limit_bytes: int, *, stage: str) -> Failure:
        """Describe a process that held more memory than it might."""
        return cls._made("memory", "", f"more than {limit_bytes / 2**20:.0f} MiB of memory", stage=stage)

    @classmethod
    def of_refused_memory(cls, message: str, *, stage: str, traceback: str = "") -> Failure:
        """Describe a process that was refused memory, and said so itself: who asks for less dies of the same."""
        made = cls._made("memory", "", message, stage=stage)
        return replace(made, traceback=traceback)

    @classmethod
    def of_output(cls, limit_bytes: int, *, stage: str) -> Failure:
        """Describe a process that printed without end."""
        return cls._made("output", "", f"more than {limit_bytes / 2**20:.0f} MiB of output", stage=stage)

    @classmethod
    def of_cancelled(cls, *, stage: str) -> Failure:
        """Describe a process that was ended because its answer was no longer wanted."""
        return cls._made("cancelled", "", "cancelled", stage=stage)

    @classmethod
    def _made(cls, kind: str, name: str, message: str, *, stage: str) -> Failure:
        # the numbers of these messages are limits, and no part of what happened
        signature = Signature(kind=kind, stage=stage, type=name, message="")
        return cls(kind=kind, type=name, message=message, signature=signature)
