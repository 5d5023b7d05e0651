"""How a worker comes to be, whichever way it does: what an overseer needs of it, and what a pool of the way itself.

Workers that a zygote forks: the parent's side of it. A zygote that died is started again.

Workers that are processes of their own from the beginning, for where there is no fork; one is always in reserve.
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
from torchdelta.isolate.directories import tail_of
from torchdelta.isolate.protocol import Lines, Message, line_of
from torchdelta.isolate.worker import Order
from torchdelta.isolate.zygote_start import new_zygote, zygote_of_this

_LOG_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What every worker finds done: the parent's import path, modules imported, and a compiler warmed up."""

    path: list[str]
    preload: list[str] = field(default_factory=list)
    warm: str = ""
    """The backend of torch.compile that has compiled something before."""


class Worker(Protocol):
    """A process that carries out one order."""

    @property
    def group(self) -> int | None:
        """The process group; None where there are none."""

    def wait(self, seconds: float) -> int | None:
        """Return the status once the worker and its group are gone, negative for a signal; None if it takes longer."""

    def end(self) -> None:
        """End the worker with its group, soon."""

    def dismiss(self) -> bool:
        """Leave it to others to see off a worker that has answered; False if there are none, and one has to wait."""

    def is_lost(self) -> bool:
        """Tell whether it ended because its zygote did, and through no fault that is known to be its own."""


class Starter(Protocol):
    """A way to start workers."""

    def start(self, order: Order) -> Worker:
        """Start a worker on an order; CancelledError once it is closed."""

    def abandon(self) -> None:
        """Give up on whoever does not end workers when asked to."""

    def close(self) -> None:
        """End whom nobody oversees, and start none from now on."""


def log_of(directory: Path) -> Path:
    """Return where zygotes and workers print to before their first order."""
    return directory / "start.log"


def why_not(directory: Path) -> str:
    """Return the last that was printed there: why something did not start."""
    return tail_of(log_of(directory), _LOG_BYTES)


_READY_S = 180.0


class ForkedWorker:
    """A worker as its zygote tells of it."""

    def __init__(self, zygote: _ZygoteHandle, number: int) -> None:
        self._zygote, self._number = zygote, number
        self._is_over = threading.Event()
        self._status: int | None = None
        self.group: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return the status once the worker and its group are gone; None if that takes longer."""
        if not self._is_over.wait(seconds):
            return None
        return -9 if self._status is None else self._status

    def end(self) -> None:
        """Ask the zygote to end the worker with its group: it alone knows that the number is still this worker's."""
        self._zygote.send({"end": self._number})

    def dismiss(self) -> bool:
        """Have the zygote see to it that the worker leaves: to free what it holds can take longer than the query."""
        self._zygote.send({"dismiss": self._number})
        return True

    def is_lost(self) -> bool:
        """Tell whether the zygote died before the worker did."""
        return self._is_over.is_set() and self._status is None

    def over(self, status: int | None) -> None:
        """Take note of the end."""
        self._status = status
        self._is_over.set()


class _ZygoteHandle:
    def __init__(self, directory: Path, readiness: Readiness, *, from_here: bool = False) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._workers: dict[int, ForkedWorker] = {}
        self._lock = threading.Lock()
        self._is_decided = threading.Event()
        self._has_ended = False
        self.was_ready = False
        self._process = (zygote_of_this if from_here else new_zygote)(log_of(directory))
        self.send({"path": readiness.path, "preload": readiness.preload, "warm": readiness.warm})
        self._listener = threading.Thread(target=self._listen, name="torchdelta-zygote", daemon=True)
        self._listener.start()

    def is_ready(self) -> bool:
        """Wait until it may be given orders; False if it died before, or takes too long."""
        if not self._is_decided.wait(_READY_S):
            self._process.kill()
            return False
        return self.was_ready and not self._has_ended

    def start(self, order: Order) -> ForkedWorker | None:
        """Have a worker forked; None if nobody is there to do it."""
        with self._lock:
            if self._has_ended:
                return None
            number = next(self._numbers)
            forked = self._workers[number] = ForkedWorker(self, number)
        self.send({"start": number, "order": vars(order)})
        return forked

    def send(self, message: Message) -> None:
        """Send a message; who is no longer there needs none."""
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(line_of(message))
        except (BrokenPipeError, ValueError):
            return

    def kill(self) -> None:
        """End it at once; the kernel ends its workers."""
        self._process.kill()

    def close(self) -> None:
        """Let it end its workers, and itself."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.close()
        if not self.was_ready:
            # still importing, and nobody's parent yet
            self._process.kill()
        try:
            self._process.wait(10 * process_groups.GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        lines = Lines(self._process.stdout.fileno())
        while (messages := lines.read()) is not None:
            for message in messages:
                self._note(message)
        self._process.wait()
        self._process.stdout.close()
        with self._lock:
            self._process.stdin.close()
            self._has_ended = True
            lost = list(self._workers.values())
        for worker in lost:
            if worker.group is not None:
                process_groups.end_for_good(worker.group)
            worker.over(None)
        self._is_decided.set()

    def _note(self, message: Message) -> None:
        if "ready" in message:
            self.was_ready = True
            self._is_decided.set()
        elif "started" in message:
            self._workers[message["started"]].group = message["process"]
        else:
            with self._lock:
                worker = self._workers.pop(message["ended"])
            worker.over(message["status"])


class ForkingStarter:
    """Starts workers through a zygote, which it keeps alive."""

    def __init__(self, directory: Path, readiness: Readiness, *, from_here: bool = False) -> None:
        self._directory, self._readiness = directory, readiness
        self._lock = threading.Lock()
        self._is_closed = False
        # only the first: by the time that it has died, this process has threads
        self._zygote = _ZygoteHandle(directory, readiness, from_here=from_here)

    def start(self, order: Order) -> ForkedWorker:
        """Have a worker forked, by a new zygote if the last one died."""
        while True:
            worker = self._living().start(order)
            if worker is not None:
                return worker

    def abandon(self) -> None:
        """Kill the zygote: it does not end a worker that it was asked to end."""
        self._zygote.kill()

    def close(self) -> None:
        """End the zygote and its workers, and start none from now on."""
        self._is_closed = True
        self._zygote.close()

    def _living(self) -> _ZygoteHandle:
        with self._lock:
            while not self._zygote.is_ready():
                self._replace()
            return self._zygote

    def _replace(self) -> None:
        if self._is_closed:
            raise CancelledError
        if not self._zygote.was_ready:
            if not self._readiness.warm:
                why = why_not(self._directory)
                raise EnvironmentUnfit(f"the process that workers are forked from does not start:\n{why}")
            # what it compiles to warm up may be the very thing that crashes: then workers start cold
            self._readiness = Readiness(path=self._readiness.path, preload=self._readiness.preload)
        self._zygote = _ZygoteHandle(self._directory, self._readiness)
        if self._is_closed:  # meanwhile, by another thread
            self._zygote.close()


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
            if not _HAS_GROUPS or process_groups.is_gone(self._process.pid):
                return status
            self.end()
            time.sleep(_SOON_S)
        return None

    def end(self) -> None:
        """End the worker with its group, soon."""
        if self._killed_at is None:
            self._killed_at = time.monotonic() + (process_groups.GRACE_S if _HAS_GROUPS else 0)
            if _HAS_GROUPS:
                process_groups.ask_to_end(self._process.pid)

    def dismiss(self) -> bool:
        """Tell that nobody else would see it off."""
        return False

    def is_lost(self) -> bool:
        """Tell that nobody else's death ends it."""
        return False

    def _kill(self) -> None:
        if _HAS_GROUPS:
            process_groups.end_for_good(self._process.pid)
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
            worker.wait(process_groups.GRACE_S)
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
