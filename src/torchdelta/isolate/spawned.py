"""Workers that are processes of their own from the beginning, for where there is no fork; one is always in reserve."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

from torchdelta.errors import EnvironmentUnfit
from torchdelta.isolate import groups
from torchdelta.isolate.protocol import line_of
from torchdelta.isolate.starters import Readiness, log_of, why_not
from torchdelta.isolate.worker import Order

_HAS_GROUPS = sys.platform != "win32"
_SOON_S = 0.01


class SpawnedWorker:
    """A worker that imports by itself, and then waits for its order."""

    def __init__(self, directory: Path, readiness: Readiness) -> None:
        self._directory = directory
        with log_of(directory).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchdelta.isolate.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        self._killed_at: float | None = None
        self._send(line_of({"path": readiness.path, "preload": readiness.preload}))

    @property
    def group(self) -> int | None:
        """The process group; None where there are none."""
        return self._process.pid if _HAS_GROUPS else None

    def is_waiting(self) -> bool:
        """Tell whether it still lives."""
        return self._process.poll() is None

    def order(self, order: Order) -> None:
        """Give it its order once it has imported everything, which is not what a deadline is for."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            why = why_not(self._directory)
            raise EnvironmentUnfit(f"a worker does not start:\n{why}")
        self._send(line_of(vars(order)))

    def wait(self, seconds: float) -> int | None:
        """Return the status once the worker and its group are gone; None if that takes longer."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._killed_at is not None and time.monotonic() >= self._killed_at:
                self._kill()
            try:
                status = self._process.wait(min(_SOON_S, seconds))
            except subprocess.TimeoutExpired:
                continue
            self._close_pipes()
            if not _HAS_GROUPS or groups.is_gone(self._process.pid):
                return status
            self.end()
            time.sleep(_SOON_S)
        return None

    def end(self) -> None:
        """End the worker with its group, soon."""
        if self._killed_at is None:
            self._killed_at = time.monotonic() + (groups.GRACE_S if _HAS_GROUPS else 0)
            if _HAS_GROUPS:
                groups.ask_to_end(self._process.pid)

    def dismiss(self) -> bool:
        """Tell that nobody else would see it off."""
        return False

    def is_lost(self) -> bool:
        """Tell that nobody else's death ends it."""
        return False

    def _kill(self) -> None:
        if _HAS_GROUPS:
            groups.end_for_good(self._process.pid)
        else:
            kill_tree = ["taskkill", "/T", "/F", "/PID", str(self._process.pid)]
            subprocess.run(kill_tree, check=False, capture_output=True)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:  # it died already, and says so by its status
            return

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class SpawningStarter:
    """Starts workers as new processes, the next one while the last one works."""

    def __init__(self, directory: Path, readiness: Readiness) -> None:
        self._directory, self._readiness = directory, readiness
        self._lock = threading.Lock()
        self._is_closed = False
        self._reserve: SpawnedWorker | None = SpawnedWorker(directory, readiness)

    def start(self, order: Order) -> SpawnedWorker:
        """Put the reserve to work, and call up the next."""
        with self._lock:
            if self._is_closed:
                raise CancelledError
            worker = self._reserve
            if worker is None or not worker.is_waiting():
                worker = SpawnedWorker(self._directory, self._readiness)
            self._reserve = SpawnedWorker(self._directory, self._readiness)
        try:
            worker.order(order)
        except EnvironmentUnfit:
            worker.wait(groups.GRACE_S)
            raise
        return worker

    def abandon(self) -> None:
        """Do nothing: nobody stands between the parent and its workers."""

    def close(self) -> None:
        """End the reserve, and start none from now on; whoever works is its overseer's to end."""
        with self._lock:
            self._is_closed = True
            reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.end()
            while reserve.wait(1) is None:
                pass
