"""What a command is doing, on stderr: a line with a spinner on a terminal, and elsewhere a plain line now and then.

stdout is for the answer alone. So while a command works, whatever the program prints goes to stderr:

    with stdout_set_aside(), ProgressLine("inductor", console_for(sys.stderr)) as progress:
        progress("candidate")       # ⠋ inductor: candidate, 12 s; next: semantic
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from torchdelta.records.printable import printable

PLAIN_EVERY_S = 20.0
"""The seconds between two plain lines: often enough that a CI system does not take the command for dead."""
_REFRESHES_PER_S = 8
_FIRST = "loading torch"
_ORDERS = (
    (_FIRST, "reference", "truth", "noise", "candidate", "semantic", "comparison"),
    ("check", "locate", "minify", "repro"),
)
"""The parts of a check and the steps of a diagnosis, in the order in which they begin."""
_NEXT = {part: following for order in _ORDERS for part, following in itertools.pairwise(order)}


class ProgressLine:
    """Shows the part that is under way until its context ends; call it with the name of each part as it begins."""

    def __init__(self, title: str, console: Console, *, plain_every_s: float = PLAIN_EVERY_S) -> None:
        """Keep the title, which is part of each line, and the console to print to; nothing is shown before `with`.

        `plain_every_s` is the time between two lines on a console that is not a terminal.
        """
        self.title, self.console, self.plain_every_s = title, console, plain_every_s
        self.part = _FIRST
        self._started = time.monotonic()
        self._has_ended = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> ProgressLine:
        """Start the clock, and a thread that shows the line on a terminal, or prints one every `plain_every_s`."""
        self._started = time.monotonic()
        if self.console.is_terminal:
            spinner = Spinner("dots")
            live = Live(
                console=self.console,
                transient=True,
                refresh_per_second=_REFRESHES_PER_S,
                get_renderable=lambda: self._spun(spinner),
            )
            self._stack.enter_context(live)
        else:
            thread = threading.Thread(target=self._print_lines, name="torchdelta-progress", daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._has_ended.set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread, and take the line from the terminal."""
        self._stack.close()

    def __call__(self, part: str) -> None:
        """Show another part from now on."""
        self.part = part

    @property
    def line(self) -> str:
        """The title, the part, the whole seconds since the start, and the part that comes next if that is known."""
        following = _NEXT.get(self.part.partition(":")[0])
        elapsed = f"{time.monotonic() - self._started:.0f} s"
        return printable(f"{self.title}: {self.part}, {elapsed}" + (f"; next: {following}" if following else ""))

    def _spun(self, spinner: Spinner) -> Spinner:
        spinner.update(text=Text(self.line))
        return spinner

    def _print_lines(self) -> None:
        """Print a line every `plain_every_s` until the context ends; this is what a thread runs."""
        while not self._has_ended.wait(self.plain_every_s):
            self.console.print(Text(f"torchdelta: {self.line}"), soft_wrap=True)


@contextmanager
def stdout_set_aside() -> Iterator[None]:
    """Return a context in which everything that this process and its children print to stdout goes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)
