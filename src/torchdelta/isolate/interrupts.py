"""Ctrl-C that comes twice at once, from a terminal and from whoever passes it on, is one Ctrl-C.

Python's locks do not survive a second one within the first: a lock that is to be taken back while a wait ends is lost
to everybody, and whoever needs it next waits for ever.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TOGETHER_S = 1.0
"""Those that come within so long are one; who waits for longer, and is still there, may be interrupted once more."""


@contextmanager
def merged() -> Iterator[None]:
    """Interrupt this thread once however many interruptions come together, where Python itself would each time."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    last = float("-inf")

    def interrupt(_: int, __: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > TOGETHER_S:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
