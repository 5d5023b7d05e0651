"""What code that is not ours may raise, a program's, a pass's or a compiler's, and we take for its failure.

In the caller's process what is no `Exception` is meant for somebody else: it skips a test, cancels a task or interrupts
everything. In a worker nobody else is there, and an extension in Rust panics by one.
"""

from __future__ import annotations

_caught: tuple[type[BaseException], ...] = (Exception, SystemExit)


def raised() -> tuple[type[BaseException], ...]:
    """Return what is caught around code that is not ours: `except foreign.raised() as error`."""
    return _caught


def catch_everything() -> None:
    """Take whatever is raised in this process, from now on, for a failure."""
    global _caught
    _caught = (BaseException,)
