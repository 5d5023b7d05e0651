"""Compilation switched off in one thread, while others go on compiling, and running what they compiled.

Torch has one stance for the whole process. While somebody asks here, another stands in its place that answers each
thread by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import DynamoStance

_PLACE = "_stance"
_EAGER = DynamoStance("force_eager")
_TAKING_TURNS = threading.Lock()
"""Two threads that come at once would take each other's stance away."""


@contextmanager
def eager_here() -> Iterator[None]:
    """Run what is inside eagerly, what was compiled before too; in other threads everything is as without."""
    place = vars(eval_frame)
    with _TAKING_TURNS:
        place[_PLACE] = own = _ForOneThread(place[_PLACE])
    try:
        yield
    finally:
        with _TAKING_TURNS:
            own.thread = None
            # who came later may still be here, and puts back what is below
            place[_PLACE] = _below_those_over(place[_PLACE])


class _ForOneThread:
    """Eager for the thread that made it, and for any other what stood there before."""

    def __init__(self, others: Any) -> None:
        self.others = others
        self.thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(_EAGER if self.thread == threading.get_ident() else self.others, name)


def _below_those_over(stance: Any) -> Any:
    while isinstance(stance, _ForOneThread) and stance.thread is None:
        stance = stance.others
    return stance
