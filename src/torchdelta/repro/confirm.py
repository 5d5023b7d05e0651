"""Run a script in a process of its own: nobody is told of one that did not fail there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

KEPT = 64 * 1024
"""Bytes of output, from its end."""
THERE = "the bug is there"
"""What a script says before it exits with 1: Python itself exits so when it cannot even read one."""


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """How a script ended."""

    status: int | None
    """None where it did not end in time."""
    output: str
    seconds: float

    @property
    def is_there(self) -> bool:
        """Whether the script showed the bug."""
        return self.status == 1 and THERE in self.output


def confirm(path: Path, *, deadline_s: float) -> Confirmed:
    """Run the script in a clean process; one that takes longer is ended, with everything that it started."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, str(Path(path).resolve())],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=Path(path).resolve().parent,
            start_new_session=True,
            # inductor's helper processes take longer to start than one small graph takes to compile
            env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ},
        )
        status: int | None = None
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - KEPT))
        output = printed.read().decode(errors="replace")
    return Confirmed(status=status, output=output, seconds=time.monotonic() - started)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
