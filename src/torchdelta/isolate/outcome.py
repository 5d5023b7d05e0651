"""What came of a query: an answer, or a failure with the last that was heard of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchdelta import errors
from torchdelta.records.failure import Failure


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a query. Exactly one of `answer` and `failure` is there.

    `output` is the end of what worker and children printed, `part` what the task told last, `error` the class of
    torchdelta's own errors that it raised.
    """

    answer: dict[str, Any] | None = None
    failure: Failure | None = None
    output: str = ""
    part: str = ""
    seconds: float = 0.0
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.failure is None):
            raise ValueError("an outcome is either an answer or a failure")

    def raise_own_error(self) -> None:
        """Raise again, in the parent, what the task raised if it is one of torchdelta's own errors."""
        if self.error is not None and self.failure is not None:
            kind: type[errors.TorchDeltaError] = getattr(errors, self.error)
            raise kind(self.failure.message)
