"""Ctrl-C that comes twice at once, from a terminal and from whoever passes it on, is one Ctrl-C.

Python's locks do not survive a second one within the first: a lock that is to be taken back while a wait ends is lost
to everybody, and whoever needs it next waits for ever.

A pool of workers: queries go in, typed outcomes come out, whatever the tasks do to their processes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from torchdelta.errors import UsageError
from torchdelta.isolate.directories import PoolDirectory, QueryDirectory
from torchdelta.isolate.process_groups import most_bytes
from torchdelta.isolate.protocol import Message, line_of
from torchdelta.isolate.starters import ForkingStarter, Readiness, SpawningStarter, Starter
from torchdelta.isolate.supervisor import Limits, Outcome, oversee
from torchdelta.isolate.worker import Order
from torchdelta.records.failure import Failure

TOGETHER_S = 1.0
"""Those that come within so long are one; who waits for longer, and is still there, may be interrupted once more."""


@contextmanager
def merged() -> Iterator[None]:
    """Interrupt this thread once however many interruptions come together, where Python itself would each time."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    last = float("-inf")

    def interrupt(_: int, __: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > TOGETHER_S:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


_NEEDED = "torchdelta._torch.process.forking"
# a process that loaded Apple's frameworks must not fork either
CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"


NO_END_S = 30 * 24 * 3600.0
"""The deadline of a query that has none: a month."""
_PULSE_S = 0.05
"""How often a part that a task reports is passed on."""


class Query:
    """A task under way."""

    def __init__(self, *, place: QueryDirectory, future: Future[Outcome], is_cancelled: threading.Event) -> None:
        self._place, self._future, self._is_cancelled = place, future, is_cancelled

    @property
    def part(self) -> str:
        """What the task told last, while it runs and afterwards."""
        return self.result().part if self.is_done() else self._place.told_last()

    def is_done(self) -> bool:
        """Tell whether there is an outcome."""
        return self._future.done()

    def cancel(self) -> None:
        """End it; its outcome says so, unless it was faster."""
        self._is_cancelled.set()
        self._future.cancel()

    def result(self) -> Outcome:
        """Wait for the outcome. By then nobody of a query that failed is left; a worker that answered is leaving."""
        try:
            return self._future.result()
        except CancelledError:
            return Outcome(failure=Failure.of_cancelled(stage=""))


def wait_for_any(queries: Iterable[Query]) -> None:
    """Wait until one of several queries has an outcome."""
    wait([query._future for query in queries], return_when=FIRST_COMPLETED)


class Pool:
    """Workers for tasks that may crash, hang, eat memory or print without end; each task has one for itself.

    A task is named `package.module:function`; the function gets the request and a `Place`, and returns a dict. Both
    are plain JSON. Workers find the modules of `preload` imported, its `package.module:function` called, and
    the backend `warm` has compiled before. With `from_here` they are forked from a fork of this process, who has to
    have been alone (`born.is_alone`), and to have done nothing since but to import.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        preload: Sequence[str] = (),
        warm: str = "",
        forks: bool = CAN_FORK,
        from_here: bool = False,
        root: Path | None = None,
    ) -> None:
        self._readiness = Readiness(path=list(sys.path), preload=[*preload, _NEEDED], warm=warm)
        self.workers, self._forks, self._from_here = workers, forks, from_here
        self._directory = PoolDirectory(root)
        self._numbers = itertools.count()
        self._queries: set[Query] = set()
        self._stack = ExitStack()
        self._starter: Starter
        self._overseers: ThreadPoolExecutor
        self._sweeper: ThreadPoolExecutor

    def __enter__(self) -> Pool:
        with ExitStack() as stack:
            stack.enter_context(merged())
            directory = stack.enter_context(self._directory).path
            if self._forks:
                self._starter = ForkingStarter(directory, self._readiness, from_here=self._from_here)
            else:
                self._starter = SpawningStarter(directory, self._readiness)
            self._sweeper = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torchdelta-sweeper"))
            self._overseers = ThreadPoolExecutor(self.workers, thread_name_prefix="torchdelta-overseer")
            stack.callback(self._overseers.shutdown, cancel_futures=True)
            # before anybody waits for overseers: one of them may wait for a zygote that is still importing
            stack.callback(self._starter.close)
            stack.callback(self._cancel_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def directory(self) -> Path:
        """Where everything of this pool lies while it lives."""
        return self._directory.path

    def submit(self, task: str, request: Message, *, deadline_s: float, memory_bytes: int | None = None) -> Query:
        """Have a task run as soon as a worker is free; the deadline counts from then."""
        module, _, function = task.partition(":")
        if not function or module == "__main__":
            raise UsageError(f"{task!r} is no task that another process can import: name it package.module:function")
        asked = line_of({"task": task, "request": request})
        limits = Limits(deadline_s=deadline_s, memory_bytes=memory_bytes or most_bytes())
        place = QueryDirectory(directory=self._directory.path / f"query-{next(self._numbers)}")
        is_cancelled = threading.Event()
        future = self._overseers.submit(self._run, place, asked, limits, is_cancelled)
        query = Query(place=place, future=future, is_cancelled=is_cancelled)
        self._queries.add(query)
        future.add_done_callback(lambda _: self._queries.discard(query))
        return query

    def ask(
        self,
        task: str,
        request: Message,
        *,
        deadline_s: float | None,
        memory_bytes: int | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """Run a task, wait for its outcome and return it; `progress` gets each part that the task reports."""
        query = self.submit(
            task, request, deadline_s=NO_END_S if deadline_s is None else deadline_s, memory_bytes=memory_bytes
        )
        part = ""
        try:
            while not query.is_done():
                if query.part != part:
                    part = query.part
                    progress(part)
                wait([query._future], timeout=_PULSE_S)
            return query.result()
        except BaseException:  # a Ctrl-C ends the query, not only the waiting
            query.cancel()
            raise

    def _run(self, place: QueryDirectory, asked: bytes, limits: Limits, is_cancelled: threading.Event) -> Outcome:
        outcome, is_lost = self._try(place, asked, limits, is_cancelled)
        if is_lost and not is_cancelled.is_set():
            # whose fault the zygote's death was is not known; if it happens again, it is this query's
            shutil.rmtree(place.directory)
            outcome, _ = self._try(place, asked, limits, is_cancelled)
        # nobody waits for that: to remove the files of a compiler can take longer than to fork
        self._sweeper.submit(shutil.rmtree, place.directory, ignore_errors=True)
        return outcome

    def _try(
        self, place: QueryDirectory, asked: bytes, limits: Limits, is_cancelled: threading.Event
    ) -> tuple[Outcome, bool]:
        place.lay_out()
        place.request.write_bytes(asked)
        worker = self._starter.start(Order(directory=str(place.directory), memory_bytes=limits.memory_bytes))
        outcome = oversee(worker, place, limits, is_cancelled=is_cancelled, abandon=self._starter.abandon)
        return outcome, worker.is_lost() and outcome.answer is None

    def _cancel_all(self) -> None:
        for query in list(self._queries):
            query.cancel()
