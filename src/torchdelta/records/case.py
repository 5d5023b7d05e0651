"""What is asked: which program, which transform, judged how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchdelta.errors import UsageError
from torchdelta.records.comparison import Scalar

STAGES = ("forward", "gradients", "steps")
DYNAMO, AOT = LEVELS = ("dynamo", "aot")
"""Whose graphs are made smaller: those that dynamo captures, or what AOTAutograd makes of them."""
DEFAULT_STAGES = ("forward", "gradients")
VALUES = "values"
"""The stage of two values that were compared without running anything."""
IGNORABLE = ("aliasing", "device", "dtype", "integers", "requires_grad", "stride")
STRICT = ("casts", "stride")
"""Clauses that are only reported unless a case holds them strictly."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, complete enough to be asked again."""

    program: str
    transform: str
    options: dict[str, Scalar] = field(default_factory=dict)
    stages: tuple[str, ...] = DEFAULT_STAGES
    policy: str = "noise"
    seed: int = 0
    ignore: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()
    """Clauses that are only reported by default and here decide."""
    iterations: int = 1
    steps: int = 3
    optimizer: str = "adamw"
    loss: str | None = None
    deterministic: bool = False
    anomaly: bool = False
    semantic: bool = True
    """Whether to ask the semantic question too, which takes a second application of the transform."""
    thorough: bool = False
    """Whether to ask the local question too: each node by itself."""

    def __post_init__(self) -> None:
        known_stages = STAGES if self.stages != (VALUES,) else (VALUES,)
        _require_known("stage", self.stages, known_stages)
        _require_known("clause to ignore", self.ignore, IGNORABLE)
        _require_known("clause to hold strictly", self.strict, STRICT)
        if not self.stages:
            raise UsageError(f"no stage was asked for: name at least one of {', '.join(STAGES)}")
        # each builds on the one before: the order in which they were named means nothing
        object.__setattr__(self, "stages", tuple(stage for stage in known_stages if stage in self.stages))
        for name in ("iterations", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be from 0 to 2**63 - 1, not {self.seed}")


def read_case(program: str, *, transform: str, **words: Any) -> Case:
    """Return the case that the words of `torchdelta.check` amount to, where program and transform are named."""
    for several in ("stages", "ignore", "strict"):
        if several in words:
            words[several] = words_of(words[several]) if words[several] is not None else DEFAULT_STAGES
    return Case(program=program, transform=transform, **words)


def words_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names given as a sequence, or as one text with commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else tuple(names)


def _require_known(what: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}: it is one of {', '.join(known)}")


def require_level(level: str) -> None:
    """Raise UsageError for a level of graphs that there is not."""
    if level not in LEVELS:
        raise UsageError(f"there is no level {level!r} of graphs: it is one of {', '.join(LEVELS)}")
