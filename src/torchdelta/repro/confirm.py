"""Run a script in a clean process, to confirm that it shows the bug there before it is handed to the user.

Importing torch takes longer than most scripts, so a `CleanProcess` can be started early: it imports torch and waits
for the path of a script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

KEPT = 64 * 1024
"""Bytes of output that an outcome keeps, from its end."""
_WAIT = """
import sys

sys.path[:] = filter(None, sys.path)  # without the directory in which this process was started
import atexit, gc, importlib, os, runpy

# inductor's helper processes take longer to start than one small graph takes to compile
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# imported modules stay alive: looking for garbage among them, now or at exit, would only take time
gc.disable()
for step in sys.argv[1:]:
    place, _, function = step.partition(":")
    names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    if function:
        names[function]()
gc.freeze()
gc.enable()
atexit.register(gc.freeze)
path = sys.stdin.readline().rstrip("\\n")
if path:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    os.chdir(sys.path[0])
    runpy.run_path(path, run_name="__main__")
"""
THERE = "the bug is there"
"""A script prints this before it exits with 1. The status alone would not do, because Python exits with 1 on errors."""


@dataclass(frozen=True, kw_only=True)
class ScriptOutcome:
    """How a script ended: its exit status, its output and how long it ran."""

    status: int | None
    """None if it did not end in time."""
    output: str
    seconds: float

    @property
    def is_there(self) -> bool:
        """Whether the script showed the bug: it exited with 1 and printed `THERE`."""
        return self.status == 1 and THERE in self.output


class CleanProcess:
    """A process that imports torch and waits for one script, which it then runs.

    Before that it takes the `steps`: it imports modules, and calls functions of modules or files (`module:function`,
    `file.py:function`). It ends when this object is garbage-collected.
    """

    def __init__(self, steps: Sequence[str] = ("torch",)) -> None:
        """Start the process, which takes the `steps` and then waits for a script; a temporary file gets its output."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 — lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WAIT, *steps],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started_at: float | None = None
        self._end = weakref.finalize(self, _end, self._process, self._output)

    @property
    def is_waiting(self) -> bool:
        """Whether it lives and has not been given a script."""
        return self._started_at is None and self._end.alive and self._process.poll() is None

    @property
    def is_over(self) -> bool:
        """Whether it has been waited for or ended."""
        return not self._end.alive

    def begin(self, path: Path) -> None:
        """Send the path of the script to the process, which then runs it, and return without waiting.

        The deadline of `wait` counts from now. If the process has died, `wait` returns its status.
        """
        self._started_at = time.monotonic()
        assert self._process.stdin is not None
        # if it died while it waited, `wait` returns its status
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{Path(path).resolve()}\n".encode())
            self._process.stdin.flush()

    def wait(self, *, deadline_s: float) -> ScriptOutcome:
        """Wait for the script's end and return its outcome, with status None if it took longer than `deadline_s`.

        The time counts from `begin`, which must have been called. Of the output, the last `KEPT` bytes are returned.
        The process and its group are killed afterwards, so it can be waited for only once.
        """
        assert self._started_at is not None
        status: int | None = None
        try:
            status = self._process.wait(max(0.0, self._started_at + deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(self._process)
        seconds = time.monotonic() - self._started_at
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - KEPT))
        output = self._output.read().decode(errors="replace")
        self._end()
        return ScriptOutcome(status=status, output=output, seconds=seconds)

    def end(self) -> None:
        """End the process and the script that it runs."""
        self._end()


@contextlib.contextmanager
def ended(clean: CleanProcess) -> Iterator[CleanProcess]:
    """Yield a process, and end it afterwards, also if it still waits for a script."""
    try:
        yield clean
    finally:
        clean.end()


def begin(path: Path, clean: CleanProcess | None = None) -> CleanProcess:
    """Begin to run a script in a clean process and return that: `clean` if it still waits for one, or a new one."""
    runner = clean if clean is not None and clean.is_waiting else CleanProcess()
    runner.begin(path)
    return runner


def confirm(path: Path, *, deadline_s: float, clean: CleanProcess | None = None) -> ScriptOutcome:
    """Run a script in a clean process, wait for its end, and return its outcome.

    The status is None if it took longer than `deadline_s`. The process is `clean` if that still waits for a script, or
    a new one.
    """
    return begin(path, clean).wait(deadline_s=deadline_s)


def _end(process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    """Kill the process with its group, wait for its end, and close its pipe and its output file."""
    _kill(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended before it had read everything
        process.stdin.close()
    output.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, which leads its own group, and the group, if they still live; wait for the end of the process.

    Without groups (Windows) the process alone is killed.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
