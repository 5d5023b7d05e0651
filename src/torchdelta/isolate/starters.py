"""How a pool starts its workers: forked from a zygote (`ForkingStarter`), or as new Pythons (`SpawningStarter`).

A fork takes milliseconds, and a new Python imports torch for seconds. But forking needs `os.fork` and a zygote that
may fork, which Windows and macOS do not offer (`pool.CAN_FORK`). Both ways have the same interface, `Starter` and
`Worker`, which is all that `pool.py` and `supervisor.py` use. Spawning cannot end daemons that left a worker's process
group, and cannot start with a warm compiler.

`_ZygoteHandle` is the parent's side of the messages that `zygote.py` documents.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torchdelta.errors import EnvironmentUnfit
from torchdelta.isolate import process_groups
from torchdelta.isolate.directories import read_tail
from torchdelta.isolate.protocol import Lines, Message, line_of
from torchdelta.isolate.worker import Order
from torchdelta.isolate.zygote_start import fork_zygote, start_zygote

_LOG_BYTES = 1 << 12
_READY_S = 180.0
"""How long a zygote may take to import everything."""
_HAS_GROUPS = sys.platform != "win32"
_SOON_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The preparations of every worker before its query: import path set, modules imported, compiler warmed up."""

    path: list[str]
    preload: list[str] = field(default_factory=list)
    warm: str = ""
    """The backend of torch.compile with which a zygote compiles once, or empty."""


class Worker(Protocol):
    """A process that runs one query."""

    @property
    def group(self) -> int | None:
        """The process group, or None if it is not known or the system has none."""

    def wait(self, seconds: float) -> int | None:
        """Wait until the worker and its group are gone, and return the exit status, or None if that takes longer.

        The status is negative if a signal ended the worker.
        """

    def end(self) -> None:
        """Begin to end the worker with its group: SIGTERM now, SIGKILL after a grace period."""

    def dismiss(self) -> bool:
        """Let a worker that has answered exit unobserved. Return False if the caller must wait for its end instead."""

    def is_lost(self) -> bool:
        """Tell whether the worker ended because its zygote ended."""


class Starter(Protocol):
    """A way to start workers."""

    def start(self, order: Order) -> Worker:
        """Start a worker on an order and return it. Raise CancelledError if the starter is closed."""

    def abandon(self) -> None:
        """Give up the zygote, which did not end a worker that it was told to end."""

    def close(self) -> None:
        """End the processes that have no order, and start no more."""


def start_log(directory: Path) -> Path:
    """Return the file to which zygotes and workers print before their first order."""
    return directory / "start.log"


def read_start_log(directory: Path) -> str:
    """Return the last `_LOG_BYTES` of the file `start_log`, which say why a process did not start.

    Return an empty string if there is no such file.
    """
    return read_tail(start_log(directory), _LOG_BYTES)


# forked workers


class ForkingStarter:
    """Starts workers through a zygote, and starts a new zygote when one dies."""

    def __init__(self, directory: Path, readiness: Readiness, *, from_here: bool = False) -> None:
        """Start the first zygote, as a fork of this process if `from_here`, and do not wait until it is ready."""
        self._directory, self._readiness = directory, readiness
        self._lock = threading.Lock()
        self._is_closed = False
        # only the first zygote may be a fork of this process, which has threads from here on
        self._zygote = _ZygoteHandle(directory, readiness, from_here=from_here)

    def start(self, order: Order) -> ForkedWorker:
        """Have the zygote fork a worker for an order, and return the worker; a zygote that died is replaced before.

        This waits until the zygote is ready. Raise CancelledError if a new zygote is needed and the starter is closed,
        and EnvironmentUnfit if zygotes do not start.
        """
        while True:
            worker = self._ready_zygote().start(order)
            if worker is not None:
                return worker

    def abandon(self) -> None:
        """Kill the zygote, and with it its workers."""
        self._zygote.kill()

    def close(self) -> None:
        """End the zygote and its workers, and start no more."""
        self._is_closed = True
        self._zygote.close()

    def _ready_zygote(self) -> _ZygoteHandle:
        """Wait until the zygote takes orders, and return it; one that has died is replaced.

        Raises what `_replace` raises.
        """
        with self._lock:
            while not self._zygote.is_ready():
                self._replace()
            return self._zygote

    def _replace(self) -> None:
        """Start a new zygote in place of the one that died, without waiting until it is ready.

        If the dead one never got ready although it had no compiler to warm up, raise EnvironmentUnfit with the end of
        the log. If it had one, the new zygote and all later ones do not warm it up. Raise CancelledError if this
        starter is closed.
        """
        if self._is_closed:
            raise CancelledError
        if not self._zygote.was_ready:
            if not self._readiness.warm:
                log = read_start_log(self._directory)
                raise EnvironmentUnfit(f"the process that workers are forked from does not start:\n{log}")
            # the compiler that crashed while it warmed up may be the one under test: start without it
            self._readiness = Readiness(path=self._readiness.path, preload=self._readiness.preload)
        self._zygote = _ZygoteHandle(self._directory, self._readiness)
        if self._is_closed:  # meanwhile, by another thread
            self._zygote.close()


class ForkedWorker:
    """A worker that a zygote forked; the zygote reports its start and its end."""

    def __init__(self, zygote: _ZygoteHandle, number: int) -> None:
        self._zygote, self._number = zygote, number
        self._has_ended = threading.Event()
        self._status: int | None = None
        self.group: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return the exit status once the zygote has reported the worker's end; None if that takes over `seconds`.

        The status of a worker that was lost with its zygote is -9.
        """
        if not self._has_ended.wait(seconds):
            return None
        return -9 if self._status is None else self._status

    def end(self) -> None:
        """Tell the zygote to end the worker's group, and return at once.

        The zygote does it, because only the parent of a process knows that the id is not in use again.
        """
        self._zygote.send({"end": self._number})

    def dismiss(self) -> bool:
        """Tell the zygote to watch the exit, and return True: the caller need not wait for it.

        Freeing a worker's memory can take longer than the query.
        """
        self._zygote.send({"dismiss": self._number})
        return True

    def is_lost(self) -> bool:
        """Tell whether the zygote ended before it could report the worker's end."""
        return self._has_ended.is_set() and self._status is None

    def note_end(self, status: int | None) -> None:
        """Record that the worker has ended, with its exit status, or None if the zygote ended first."""
        self._status = status
        self._has_ended.set()


class _ZygoteHandle:
    """A zygote as the parent sees it: messages go out through `send`, and a thread reads its reports."""

    def __init__(self, directory: Path, readiness: Readiness, *, from_here: bool = False) -> None:
        """Start a zygote, tell it what to import, and start the thread that reads its reports; do not wait for it.

        With `from_here` the zygote is a fork of this process, if that has one thread; otherwise it is a new Python.
        """
        self._directory = directory
        self._numbers = itertools.count()
        self._workers: dict[int, ForkedWorker] = {}
        self._lock = threading.Lock()
        self._is_ready_or_ended = threading.Event()
        self._has_ended = False
        self.was_ready = False
        self._process = (fork_zygote if from_here else start_zygote)(start_log(directory))
        self.send({"path": readiness.path, "preload": readiness.preload, "warm": readiness.warm})
        self._listener = threading.Thread(target=self._listen, name="torchdelta-zygote", daemon=True)
        self._listener.start()

    def is_ready(self) -> bool:
        """Wait until the zygote takes orders. Return False if it has ended, or takes too long; then it is killed."""
        if not self._is_ready_or_ended.wait(_READY_S):
            self._process.kill()
            return False
        return self.was_ready and not self._has_ended

    def start(self, order: Order) -> ForkedWorker | None:
        """Tell the zygote to fork a worker for an order, and return the worker at once; None if the zygote has ended.

        The worker's `group` is None until the zygote reports it.
        """
        with self._lock:
            if self._has_ended:
                return None
            number = next(self._numbers)
            forked = self._workers[number] = ForkedWorker(self, number)
        self.send({"start": number, "order": vars(order)})
        return forked

    def send(self, message: Message) -> None:
        """Send a message to the zygote; do nothing if it has ended or was closed."""
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(line_of(message))
        except (BrokenPipeError, ValueError):
            return

    def kill(self) -> None:
        """End the zygote at once; the kernel then ends its workers."""
        self._process.kill()

    def close(self) -> None:
        """Let the zygote end its workers and itself, wait for that, and kill it if it takes too long.

        A zygote that is not ready yet is killed at once.
        """
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.close()
        if not self.was_ready:
            # it is still importing, and has no workers yet
            self._process.kill()
        try:
            self._process.wait(10 * process_groups.GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listener.join()

    def _listen(self) -> None:
        """Handle the zygote's reports until it ends; then kill the workers that are left, and mark them as lost.

        This is what a thread runs. From the end on, `start` returns None and `is_ready` False.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        lines = Lines(self._process.stdout.fileno())
        while (reports := lines.read()) is not None:
            for report in reports:
                self._handle(report)
        self._process.wait()
        self._process.stdout.close()
        with self._lock:
            self._process.stdin.close()
            self._has_ended = True
            lost = list(self._workers.values())
        for worker in lost:
            if worker.group is not None:
                process_groups.kill(worker.group)
            worker.note_end(None)
        self._is_ready_or_ended.set()

    def _handle(self, report: Message) -> None:
        """Record what one report says: the zygote is ready, or a worker has started or ended.

        A start sets the worker's `group`; an end sets its exit status, and the worker is forgotten here.
        """
        if "ready" in report:
            self.was_ready = True
            self._is_ready_or_ended.set()
        elif "started" in report:
            self._workers[report["started"]].group = report["process"]
        else:
            with self._lock:
                worker = self._workers.pop(report["ended"])
            worker.note_end(report["status"])


# spawned workers


class SpawningStarter:
    """Starts workers as new Pythons, and each one before it is needed, while the last one works."""

    def __init__(self, directory: Path, readiness: Readiness) -> None:
        """Start the first worker in reserve, and do not wait until it is ready."""
        self._directory, self._readiness = directory, readiness
        self._lock = threading.Lock()
        self._is_closed = False
        self._reserve: SpawnedWorker | None = SpawnedWorker(directory, readiness)

    def start(self, order: Order) -> SpawnedWorker:
        """Give the order to the worker in reserve, or to a new one if that has ended, and return the worker.

        The next reserve is started too. This waits until the worker has imported everything. Raise CancelledError if
        the starter is closed, and EnvironmentUnfit if the worker ends before it takes the order.
        """
        with self._lock:
            if self._is_closed:
                raise CancelledError
            worker = self._reserve
            if worker is None or not worker.is_running():
                worker = SpawnedWorker(self._directory, self._readiness)
            self._reserve = SpawnedWorker(self._directory, self._readiness)
        try:
            worker.order(order)
        except EnvironmentUnfit:
            worker.wait(process_groups.GRACE_S)
            raise
        return worker

    def abandon(self) -> None:
        """Do nothing, because there is no zygote."""

    def close(self) -> None:
        """End the worker in reserve, wait until it is gone, and start no more; workers with an order go on."""
        with self._lock:
            self._is_closed = True
            reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.end()
            while reserve.wait(1) is None:
                pass


class SpawnedWorker:
    """A worker that is a new Python: it imports everything by itself, and then waits for its order."""

    def __init__(self, directory: Path, readiness: Readiness) -> None:
        """Start a new Python that prints to the start log, and tell it what to import; do not wait for that.

        The process has a session, and so a group, of its own. `readiness.warm` is ignored.
        """
        self._directory = directory
        with start_log(directory).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchdelta.isolate.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        self._kill_at: float | None = None
        self._send(line_of({"path": readiness.path, "preload": readiness.preload}))

    @property
    def group(self) -> int | None:
        """The process group, or None on a system without groups."""
        return self._process.pid if _HAS_GROUPS else None

    def is_running(self) -> bool:
        """Tell whether the process has not ended."""
        return self._process.poll() is None

    def order(self, order: Order) -> None:
        """Wait until the worker has imported everything, and give it its order; no deadline counts until then.

        Raise EnvironmentUnfit, with the end of the log, if it ends before.
        """
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            log = read_start_log(self._directory)
            raise EnvironmentUnfit(f"a worker does not start:\n{log}")
        self._send(line_of(vars(order)))

    def wait(self, seconds: float) -> int | None:
        """Return the exit status once the worker and its group are gone, or None if that takes longer than `seconds`.

        Other processes of the group are ended once the worker has ended. SIGKILL is sent here, when the time that `end`
        set has come. Without process groups (Windows) only the worker's end is waited for.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
            try:
                status = self._process.wait(min(_SOON_S, seconds))
            except subprocess.TimeoutExpired:
                continue
            self._close_pipes()
            if not _HAS_GROUPS or process_groups.is_gone(self._process.pid):
                return status
            self.end()
            time.sleep(_SOON_S)
        return None

    def end(self) -> None:
        """Send SIGTERM to the group, once, and set the time at which `wait` kills it.

        Without process groups (Windows) nothing is sent, and the next `wait` kills the worker at once.
        """
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (process_groups.GRACE_S if _HAS_GROUPS else 0)
            if _HAS_GROUPS:
                process_groups.terminate(self._process.pid)

    def dismiss(self) -> bool:
        """Return False: there is no zygote that could watch the exit."""
        return False

    def is_lost(self) -> bool:
        """Return False: there is no zygote whose end could end it."""
        return False

    def _kill(self) -> None:
        """Kill the worker's group at once; on Windows, the worker and its children."""
        if _HAS_GROUPS:
            process_groups.kill(self._process.pid)
        else:
            kill_tree = ["taskkill", "/T", "/F", "/PID", str(self._process.pid)]
            subprocess.run(kill_tree, check=False, capture_output=True)

    def _send(self, line: bytes) -> None:
        """Write a line to the worker's stdin; do nothing if the worker has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:  # it has ended, and its exit status says why
            return

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
