"""A failure and what makes two failures the same one."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VOLATILE = (
    (re.compile(r"\b0x[0-9a-fA-F]+"), "…"),
    (re.compile(r"(?<![\w.+~-])(?:[\w.+~-]*/)+"), ""),
    (re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def normalise(message: str) -> str:
    """Return the message without addresses, directories, numbers and line breaks: what two runs have in common."""
    for pattern, replacement in _VOLATILE:
        message = pattern.sub(replacement, message)
    return message.strip()


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What makes two failures the same failure."""

    kind: str
    stage: str
    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.stage}/{self.type}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How the candidate failed: `kind` is `exception` (signals and timeouts have kinds of their own)."""

    kind: str
    type: str
    message: str
    signature: Signature
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, *, stage: str, traceback: str = "") -> Failure:
        """Describe an exception that the candidate raised in a stage."""
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        message = str(error)
        return cls(
            kind="exception",
            type=name,
            message=message,
            signature=Signature(kind="exception", stage=stage, type=name, message=normalise(message)),
            traceback=traceback,
        )
