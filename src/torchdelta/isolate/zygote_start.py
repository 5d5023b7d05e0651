"""How a zygote comes to be: as a new process, or as a fork of this one, whose imports it then need not repeat."""

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


def is_alone() -> bool:
    """Tell whether this process may be forked once it has imported torch: nobody else here has threads by then."""
    if sys.platform != "linux" or not all(isinstance(each, io.TextIOWrapper) for each in (sys.stdout, sys.stderr)):
        return False
    # whoever imported torch before may have run something in parallel
    return "torch" not in sys.modules and _has_one_thread()


def new_zygote(log: Path) -> subprocess.Popen[bytes]:
    """Start a zygote that has imported nothing yet, and prints to a file."""
    with log.open("ab") as printed:
        return subprocess.Popen(
            [sys.executable, "-m", "torchdelta.isolate.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            bufsize=0,
            start_new_session=True,
        )


def zygote_of_this(log: Path) -> subprocess.Popen[bytes] | ForkedZygote:
    """Fork a zygote from this process, which was alone; a new one if it has threads by now."""
    return ForkedZygote(log) if _has_one_thread() else new_zygote(log)


class ForkedZygote:
    """A zygote that was this process until now, held as a `subprocess.Popen` is."""

    def __init__(self, log: Path) -> None:
        for_orders, orders = os.pipe()
        reports, for_reports = os.pipe()
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or a worker would print it once more
        with warnings.catch_warnings():
            # newer Pythons warn of any thread, also of those of libraries that know how to fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _be_zygote(for_orders, for_reports, printed)
        for descriptor in (for_orders, for_reports, printed):
            os.close(descriptor)
        self.stdin = os.fdopen(orders, "wb", buffering=0)
        self.stdout = os.fdopen(reports, "rb", buffering=0)
        self._lock = threading.Lock()
        self._is_gone = False

    def kill(self) -> None:
        """End it at once."""
        with self._lock:
            if not self._is_gone:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; subprocess.TimeoutExpired if that takes longer."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_reaped():
            if time.monotonic() > until:
                assert timeout is not None
                raise subprocess.TimeoutExpired("zygote", timeout)
            time.sleep(_SOON_S)

    def _is_reaped(self) -> bool:
        with self._lock:
            if not self._is_gone:
                with contextlib.suppress(ChildProcessError):
                    self._is_gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
                    return self._is_gone
                self._is_gone = True  # the program waited for whatever child there was
            return True


def _be_zygote(orders: int, reports: int, printed: int) -> None:
    """Become a zygote, as a new process would; never returns to whom it was forked from."""
    try:
        os.setsid()
        for descriptor, place in ((orders, 0), (reports, 1), (printed, 2)):
            os.dup2(descriptor, place)
        # a lock is held, and a pipe open, as long as anybody has it
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):  # the one that the list was read from
                    os.close(descriptor)
        zygote.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _has_one_thread() -> bool:
    return threading.active_count() == 1
