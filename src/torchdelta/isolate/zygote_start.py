"""Start a zygote: as a new Python (`start_zygote`), or as a fork of this process (`fork_zygote`).

A fork has this process's imports already, which saves the seconds that importing torch takes. It is safe only in a
process that never had threads: `is_forkable` says so before torch is imported.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

from torchdelta.isolate import zygote

_SOON_S = 0.005


def is_forkable() -> bool:
    """Tell whether this process may fork a zygote after it has imported torch.

    It may on Linux, if it has one Python thread, has not imported torch yet, and stdout and stderr are ordinary text
    streams.
    """
    if sys.platform != "linux" or not all(isinstance(each, io.TextIOWrapper) for each in (sys.stdout, sys.stderr)):
        return False
    # if torch was imported before, an operation may have run in parallel
    return "torch" not in sys.modules and _has_one_thread()


def start_zygote(log: Path) -> subprocess.Popen[bytes]:
    """Start a zygote as a new Python that has not imported anything yet, and prints to the file `log`; return it.

    Orders are written to the process's stdin, and reports read from its stdout. It has a session of its own, so that
    Ctrl-C at the terminal does not reach it.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torchdelta.isolate.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            bufsize=0,
            start_new_session=True,
        )


def fork_zygote(log: Path) -> subprocess.Popen[bytes] | ForkedZygote:
    """Fork a zygote from this process, or start a new Python if this process has several threads by now; return it.

    It prints to the file `log`; orders go to its `stdin`, and reports come from its `stdout`.
    """
    return ForkedZygote(log) if _has_one_thread() else start_zygote(log)


class ForkedZygote:
    """A zygote that was forked from this process, with the part of `subprocess.Popen`'s interface that is needed."""

    def __init__(self, log: Path) -> None:
        """Fork the zygote, which prints to the file `log`; orders go to `stdin`, and reports come from `stdout`.

        In the fork this never returns.
        """
        orders_reader, orders = os.pipe()
        reports, reports_writer = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the fork would print the buffers once more
        with warnings.catch_warnings():
            # newer Pythons warn about any thread, also about threads of libraries that handle a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _become_zygote(orders_reader, reports_writer, output)
        for descriptor in (orders_reader, reports_writer, output):
            os.close(descriptor)
        self.stdin = os.fdopen(orders, "wb", buffering=0)
        self.stdout = os.fdopen(reports, "rb", buffering=0)
        self._lock = threading.Lock()
        self._is_gone = False

    def kill(self) -> None:
        """Send SIGKILL to the zygote; do nothing once its end is known."""
        with self._lock:
            if not self._is_gone:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the zygote's end. Raise subprocess.TimeoutExpired if that takes longer than `timeout` seconds."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_reaped():
            if time.monotonic() > until:
                assert timeout is not None
                raise subprocess.TimeoutExpired("zygote", timeout)
            time.sleep(_SOON_S)

    def _is_reaped(self) -> bool:
        """Return whether the process has ended, without waiting; if so, collect its status, and remember that."""
        with self._lock:
            if not self._is_gone:
                with contextlib.suppress(ChildProcessError):
                    self._is_gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
                    return self._is_gone
                self._is_gone = True  # the user's program has waited for all children already
            return True


def _become_zygote(orders: int, reports: int, output: int) -> None:
    """In the forked process: take over the pipes, close every other descriptor, run as a zygote, and exit.

    `orders` becomes stdin, `reports` stdout, and `output` stderr, to which an exception is printed.
    """
    try:
        os.setsid()
        for descriptor, standard in ((orders, 0), (reports, 1), (output, 2)):
            os.dup2(descriptor, standard)
        # a lock stays held, and a pipe open, as long as any process has its descriptor
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):  # the descriptor that the listing itself used
                    os.close(descriptor)
        zygote.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _has_one_thread() -> bool:
    return threading.active_count() == 1
