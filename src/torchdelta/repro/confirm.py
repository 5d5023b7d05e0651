"""Run a script in a process of its own: nobody is told of one that did not fail there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

KEPT = 64 * 1024
"""Bytes of output, from its end."""
_WAIT = """
import sys

sys.path[:] = filter(None, sys.path)  # where this process was started is not where the script lies
import atexit, gc, importlib, os, runpy

# inductor's helper processes take longer to start than one small graph takes to compile
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# nobody looks for garbage in what is imported, which stays, nor at the end: that takes longer than to leave
gc.disable()
for step in sys.argv[1:]:
    place, _, function = step.partition(":")
    found = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    if function:
        found[function]()
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
"""What a script says before it exits with 1: Python itself exits so when it cannot even read one."""


@dataclass(frozen=True, kw_only=True)
class ScriptOutcome:
    """How a script ended."""

    status: int | None
    """None where it did not end in time."""
    output: str
    seconds: float

    @property
    def is_there(self) -> bool:
        """Whether the script showed the bug."""
        return self.status == 1 and THERE in self.output


class CleanProcess:
    """A clean process that has imported torch, which takes longer than most scripts, and waits for one.

    `steps` are modules that it imports, and functions of modules or files (`module:function`, `file.py:function`) that
    it calls meanwhile. It runs a single script, and ends when nobody holds it any more.
    """

    def __init__(self, steps: Sequence[str] = ("torch",)) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 — lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WAIT, *steps],
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._begun: float | None = None
        self._end = weakref.finalize(self, _end, self._process, self._printed)

    @property
    def is_waiting(self) -> bool:
        """Whether it may still be given a script."""
        return self._begun is None and self._end.alive and self._process.poll() is None

    @property
    def is_over(self) -> bool:
        """Whether what it ran has been waited for, or ended."""
        return not self._end.alive

    def begin(self, path: Path) -> None:
        """Begin to run the script."""
        self._begun = time.monotonic()
        assert self._process.stdin is not None
        # one that died while it waited says so by its status
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{Path(path).resolve()}\n".encode())
            self._process.stdin.flush()

    def wait(self, *, deadline_s: float) -> ScriptOutcome:
        """Wait for its end; one that takes longer is ended, with everything that it started."""
        assert self._begun is not None
        status: int | None = None
        try:
            status = self._process.wait(max(0.0, self._begun + deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(self._process)
        seconds = time.monotonic() - self._begun
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - KEPT))
        output = self._printed.read().decode(errors="replace")
        self._end()
        return ScriptOutcome(status=status, output=output, seconds=seconds)

    def end(self) -> None:
        """End it, and what it runs."""
        self._end()


def begin(path: Path, clean: CleanProcess | None = None) -> CleanProcess:
    """Begin to run the script in a clean process, the one that waits for it if there is one."""
    runner = clean if clean is not None and clean.is_waiting else CleanProcess()
    runner.begin(path)
    return runner


def confirm(path: Path, *, deadline_s: float, clean: CleanProcess | None = None) -> ScriptOutcome:
    """Run the script in a clean process."""
    return begin(path, clean).wait(deadline_s=deadline_s)


def _end(process: subprocess.Popen[bytes], printed: IO[bytes]) -> None:
    _kill(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died before it had read everything
        process.stdin.close()
    printed.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
