"""Switch compilation off in one thread, while other threads compile and run compiled code.

Torch has one stance for the whole process. `eager_here` replaces it by an object that looks eager to its own thread,
and like the replaced stance to all others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import DynamoStance

_ATTRIBUTE = "_stance"
_EAGER = DynamoStance("force_eager")
_LOCK = threading.Lock()
"""Held while the stance is replaced, because two threads at once would drop each other's stance."""


@contextmanager
def eager_here() -> Iterator[None]:
    """Run the body eagerly in this thread, code that was compiled before included; other threads are not affected.

    Torch's stance is replaced in the meantime. Afterwards it is the one from before, or another that was set since and
    is still in use.
    """
    namespace = vars(eval_frame)
    with _LOCK:
        namespace[_ATTRIBUTE] = own = _ThreadStance(namespace[_ATTRIBUTE])
    try:
        yield
    finally:
        with _LOCK:
            own.thread = None
            # a stance that was put on top later may still be in use; its owner then removes this one too
            namespace[_ATTRIBUTE] = _without_ended(namespace[_ATTRIBUTE])


class _ThreadStance:
    """Eager for the thread that created it, and the stance below for all others; `thread` is None once it has ended."""

    def __init__(self, others: Any) -> None:
        self.others = others
        self.thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the eager stance to the thread that created this, to others of the one below."""
        return getattr(_EAGER if self.thread == threading.get_ident() else self.others, name)


def _without_ended(stance: Any) -> Any:
    """Return the topmost stance that has not ended: the given one, or one below it."""
    while isinstance(stance, _ThreadStance) and stance.thread is None:
        stance = stance.others
    return stance
