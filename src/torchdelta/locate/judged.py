"""What came of one pair of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policy import Tolerance
from torchdelta.records.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A pair, with its errors."""

    reference: Node
    candidate: Node
    how: str
    local: tuple[Comparison, ...] = ()
    local_gradients: tuple[Comparison, ...] = ()
    inherited: tuple[Comparison, ...] = ()
    culprit: Node | None = None
    """The reference's node whose work is not done, where the pair is wrong by itself."""


def inherited_from(name: str, reference: Any, own: Any) -> tuple[Comparison, ...]:
    """Return how far apart both sides are, each on its own values."""
    return tuple(Judge(policy=Tolerance()).compare(leaves_of(reference, name), leaves_of(own, name))[0])
