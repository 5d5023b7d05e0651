"""What is asked: which program, which transform, judged how."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchdelta.errors import UsageError
from torchdelta.records.comparison import Scalar

STAGES = ("forward", "gradients", "steps")
VALUES = "values"
"""The stage of two values that were compared without running anything."""
IGNORABLE = ("aliasing", "device", "dtype", "integers", "requires_grad", "stride")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, complete enough to be asked again."""

    program: str
    transform: str
    options: dict[str, Scalar] = field(default_factory=dict)
    stages: tuple[str, ...] = ("forward", "gradients")
    policy: str = "noise"
    seed: int = 0
    ignore: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()
    """Clauses that are only reported by default and here decide: `stride`."""
    iterations: int = 1
    steps: int = 3
    optimizer: str = "adamw"
    loss: str | None = None
    deterministic: bool = False
    anomaly: bool = False

    def __post_init__(self) -> None:
        _only("stage", self.stages, STAGES if self.stages != (VALUES,) else (VALUES,))
        _only("clause to ignore", self.ignore, IGNORABLE)
        _only("clause to hold strictly", self.strict, ("stride",))
        if not self.stages:
            raise UsageError(f"no stage was asked for: name at least one of {', '.join(STAGES)}")
        for name, least in (("iterations", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")


def _only(what: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}: it is one of {', '.join(known)}")
