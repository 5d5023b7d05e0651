"""Workers that a zygote forks: the parent's side of it. A zygote that died is started again."""

from __future__ import annotations

import itertools
import subprocess
import threading
from concurrent.futures import CancelledError
from pathlib import Path

from torchdelta.errors import EnvironmentUnfit
from torchdelta.isolate import groups
from torchdelta.isolate.born import new_zygote, zygote_of_this
from torchdelta.isolate.protocol import Lines, Message, line_of
from torchdelta.isolate.starters import Readiness, log_of, why_not
from torchdelta.isolate.worker import Order

_READY_S = 180.0


class ForkedWorker:
    """A worker as its zygote tells of it."""

    def __init__(self, zygote: _Zygote, number: int) -> None:
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


class _Zygote:
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
            self._process.wait(10 * groups.GRACE_S)
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
                groups.end_for_good(worker.group)
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
        self._zygote = _Zygote(directory, readiness, from_here=from_here)

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

    def _living(self) -> _Zygote:
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
        self._zygote = _Zygote(self._directory, self._readiness)
        if self._is_closed:  # meanwhile, by another thread
            self._zygote.close()
