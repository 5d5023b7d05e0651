"""Causes by settings: one of the backend's liberties is taken away, and the difference is gone with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdelta._torch.partition import SaveEverything
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler


@dataclass(frozen=True)
class Cause:
    """A liberty, and the setting of inductor that takes it away."""

    what: str
    setting: str
    value: Any

    def __str__(self) -> str:
        written = self.value if isinstance(self.value, (bool, int, str)) else "…"
        return f"{self.what}: it vanishes with {self.setting}={written}"


# cheap explanations before broad ones: fusion off changes nearly everything that is generated
CAUSES = (
    Cause("narrowing casts are elided", "emulate_precision_casts", True),
    Cause("random numbers are drawn in another order", "fallback_random", True),
    Cause("another memory layout is chosen", "layout_optimization", False),
    Cause("values are recomputed in the backward", "custom_partitioner_fn", SaveEverything()),
    Cause("a pattern is replaced", "pattern_matcher", False),
    Cause("code is vectorised", "cpp.simdlen", 1),
    Cause("operations are fused", "max_fusion_size", 1),
)


def find_cause(transform: Transform, ask: Callable[[Transform], tuple[Verdict, str]]) -> tuple[Cause | None, int]:
    """Return the first liberty without which there is no difference, and how many were tried."""
    if not isinstance(transform, Compiler) or not transform.is_inductor:
        return None, 0
    for tried, cause in enumerate(CAUSES, start=1):
        if transform.config.get(cause.setting) == cause.value:
            continue
        if ask(transform.with_config({cause.setting: cause.value}))[0] is Verdict.EQUIVALENT:
            return cause, tried
    return None, len(CAUSES)
