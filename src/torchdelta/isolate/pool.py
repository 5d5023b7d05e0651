"""A pool of workers: queries go in, typed outcomes come out, whatever the tasks do to their processes.

    with Pool(workers=2) as pool:
        outcome = pool.ask("package.module:function", {"x": 1}, deadline_s=60)
        outcome.answer      # what the function returned, or None
        outcome.failure     # how it failed: exception, signal, timeout, memory, output, exit, cancelled

Every query has a worker process and a directory (`directories.py`) of its own. A thread of the pool starts the worker
(`starters.py`) and watches it until there is an outcome (`supervisor.py`).

Start reading at `Pool.submit`; `Pool._run` is the life of one query.
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
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

from torchdelta.errors import EnvironmentUnfit, UsageError
from torchdelta.isolate.directories import PoolDirectory, QueryDirectory, QueryTraces, read_tail
from torchdelta.isolate.process_groups import default_memory_bytes
from torchdelta.isolate.protocol import Message, line_of
from torchdelta.isolate.starters import ForkingStarter, Readiness, SpawningStarter, Starter
from torchdelta.isolate.supervisor import Limits, Outcome, supervise
from torchdelta.isolate.worker import Order
from torchdelta.records.failure import Failure
from torchdelta.records.trust import trusted_directories

CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"
"""Whether workers are forked by default. On macOS a process that has loaded Apple's frameworks must not fork."""
SAME_INTERRUPT_S = 1.0
"""Interrupts within so many seconds are one Ctrl-C; a user who waits for longer may interrupt once more."""
_PRELOADED_ALWAYS = "torchdelta._torch.process.forking"


NO_END_S = 30 * 24 * 3600.0
"""The deadline of a query that has none: a month."""
_PARTS_BYTES = 1 << 16
_WAITED_TOO_LONG = ("timeout", "cancelled")
"""Failures that say nothing about whether a worker could start."""
_PULSE_S = 0.05
"""How often a part that a task reports is passed on."""


class Query:
    """A task that was submitted: it waits for a worker, runs, or has an outcome."""

    def __init__(self, *, place: QueryDirectory, future: Future[Outcome], is_cancelled: threading.Event) -> None:
        self._place, self._future, self._is_cancelled = place, future, is_cancelled

    @property
    def part(self) -> str:
        """The name of the part that the task began last, while it runs and afterwards; empty if no part has begun.

        Raises what `result` raises, once the query has ended.
        """
        if self.is_done():
            return self.result().part
        parts = read_tail(self._place.parts, _PARTS_BYTES).splitlines()[1:]
        return parts[-1] if parts else ""

    def is_done(self) -> bool:
        """Tell whether the query has ended: `result` will return an outcome, or raise, without waiting."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the query has ended, with or without an outcome; do not raise what `result` would raise."""
        # not `futures.wait`, which waits for a query that was cancelled before it began
        with suppress(CancelledError):
            self._future.exception()

    def cancel(self) -> None:
        """Have the query end soon, and return at once.

        Its outcome is the failure `cancelled`, unless another outcome comes first.
        """
        self._is_cancelled.set()
        self._future.cancel()

    def result(self) -> Outcome:
        """Wait for the outcome and return it; a query that was cancelled in time has the failure `cancelled`.

        After an answer or an exception of the task, the worker may still be exiting. Raise EnvironmentUnfit if no
        worker could be started, or if two died before the task began.
        """
        try:
            return self._future.result()
        except CancelledError:
            return Outcome(failure=Failure.of_cancelled(stage=""))


def wait_for_any(queries: Iterable[Query]) -> None:
    """Wait until at least one of the queries has ended; return at once if there are none.

    A query that was cancelled before it began counts only once a thread of the pool has taken it up.
    """
    wait([query._future for query in queries], return_when=FIRST_COMPLETED)


class Pool:
    """Workers for tasks that may crash, hang, eat memory or print without end; every task has a worker for itself.

    A task is named `package.module:function`. The function gets the request and a `QueryDirectory`, and returns a
    dict; request and answer are plain JSON. Before the first query, workers have imported the modules in `preload`,
    called its entries of the form `package.module:function`, and compiled once with the backend `warm`.

    With `forks` a zygote forks the workers; without, each worker is a new Python, which ignores `warm`. With
    `from_here` the zygote is a fork of this process. That requires that `zygote_start.is_forkable` was true, and that
    the process has only imported modules since.
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
        """Store the settings, and a copy of `sys.path` for the workers; processes start when the pool is entered.

        `workers` is how many queries run at once. The pool makes its directory in `root`, by default in one for this
        user among the temporary files. The class describes the other parameters.
        """
        self._readiness = Readiness(path=list(sys.path), preload=[*preload, _PRELOADED_ALWAYS], warm=warm)
        self.workers, self._forks, self._from_here = workers, forks, from_here
        self._directory = PoolDirectory(root)
        self._numbers = itertools.count()
        self._queries: set[Query] = set()
        self._stack = ExitStack()
        self._starter: Starter
        self._supervisors: ThreadPoolExecutor
        self._sweeper: ThreadPoolExecutor

    def __enter__(self) -> Pool:
        """Make the pool's directory, start the zygote or the first spawned worker, and return the pool.

        It does not wait until workers are ready. While the pool is open, SIGINTs that arrive together count as one
        (`merge_interrupts`). Leaving it cancels all queries, ends the workers and removes the directory. Raise
        EnvironmentUnfit if the directory's root belongs to another user.
        """
        with ExitStack() as stack:
            stack.enter_context(merge_interrupts())
            directory = stack.enter_context(self._directory).path
            if self._forks:
                self._starter = ForkingStarter(directory, self._readiness, from_here=self._from_here)
            else:
                self._starter = SpawningStarter(directory, self._readiness)
            self._sweeper = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torchdelta-sweeper"))
            self._supervisors = ThreadPoolExecutor(self.workers, thread_name_prefix="torchdelta-supervisor")
            stack.callback(self._supervisors.shutdown, cancel_futures=True)
            # runs before the shutdown, because a supervisor may be waiting for a zygote that is still importing
            stack.callback(self._starter.close)
            stack.callback(self._cancel_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel all queries, end the workers and the zygote, and remove the pool's directory."""
        self._stack.close()

    @property
    def directory(self) -> Path:
        """The directory of this pool's files, while the pool is open."""
        return self._directory.path

    def submit(self, task: str, request: Message, *, deadline_s: float, memory_bytes: int | None = None) -> Query:
        """Queue a task, named `package.module:function`, and return its query at once.

        The deadline counts from the start of its worker. With None for `memory_bytes` the limit is three quarters
        of the machine's memory, or none if its size is unknown. Raise UsageError if the name has no function, its
        module is `__main__` or a limit is not positive, and ValueError or TypeError if the request is not strict JSON.
        A task that cannot be imported fails in the worker.
        """
        module, _, function = task.partition(":")
        if not function or module == "__main__":
            raise UsageError(f"{task!r} cannot be imported in another process: name it package.module:function")
        trusted = [str(directory) for directory in trusted_directories()]
        question = line_of({"task": task, "request": request, "trusted": trusted})
        most = default_memory_bytes() if memory_bytes is None else memory_bytes
        limits = Limits(deadline_s=deadline_s, memory_bytes=most)
        place = QueryDirectory(directory=self._directory.path / f"query-{next(self._numbers)}")
        is_cancelled = threading.Event()
        future = self._supervisors.submit(self._run, place, question, limits, is_cancelled)
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
        """Run a task, wait for its outcome and return it; without `deadline_s` (None) the deadline is a month.

        Meanwhile `progress` is called with the name of the part that the task began last, when it has changed; short
        parts may be skipped. An exception while it waits, such as a KeyboardInterrupt, cancels the query. Raises what
        `submit` and `Query.result` raise.
        """
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

    def _run(self, place: QueryDirectory, question: bytes, limits: Limits, is_cancelled: threading.Event) -> Outcome:
        """Run one query in a worker, once more if the worker or its zygote died without a fault of the task.

        That is the case if the zygote died before there was an answer, or the worker before the task began. A cancelled
        query is not run again. `question` is the content of the file `request.json`. The query's directory is removed
        afterwards, in the background. Return the outcome. Raise EnvironmentUnfit if the second worker dies before the
        task begins too, or if the query's files cannot be written.
        """
        try:
            outcome, is_lost = self._run_once(place, question, limits, is_cancelled)
            if is_lost and not is_cancelled.is_set():
                # any query may have killed the zygote; if it dies again, this query did
                shutil.rmtree(place.directory, ignore_errors=True)
                outcome, _ = self._run_once(place, question, limits, is_cancelled)
        except OSError as error:
            raise EnvironmentUnfit(f"cannot write {place.directory}: {error.strerror or error}") from error
        finally:
            # in the background, because removing a compiler's files can take longer than forking
            self._sweeper.submit(shutil.rmtree, place.directory, ignore_errors=True)
        if not outcome.has_begun and outcome.failure is not None and outcome.failure.kind not in _WAITED_TOO_LONG:
            raise EnvironmentUnfit(
                f"a worker ended before its task began: {outcome.failure.message}{outcome.last_words}. Allow it more "
                "memory (--memory, ulimit -v) if that is the reason"
            )
        return outcome

    def _run_once(
        self, place: QueryDirectory, question: bytes, limits: Limits, is_cancelled: threading.Event
    ) -> tuple[Outcome, bool]:
        """Make the query's directory, run the query in a worker, and return (outcome, whether the query was lost).

        A query without an answer is lost in two cases: the zygote ended before it reported the worker's end; or the
        worker ended before the task began, and neither the deadline nor a cancellation ended it. Raise OSError if the
        query's files cannot be written.
        """
        place.create()
        place.request.write_bytes(question)
        token = os.urandom(8).hex()
        with closing(QueryTraces(place)) as traces:
            worker = self._starter.start(
                Order(directory=str(place.directory), memory_bytes=limits.memory_bytes, token=token)
            )
            abandon = self._starter.abandon
            outcome = supervise(worker, place, traces, limits, token=token, is_cancelled=is_cancelled, abandon=abandon)
        ended_early = outcome.failure is not None and outcome.failure.kind not in _WAITED_TOO_LONG
        return outcome, (worker.is_lost() and outcome.answer is None) or (ended_early and not outcome.has_begun)

    def _cancel_all(self) -> None:
        for query in list(self._queries):
            query.cancel()


@contextmanager
def merge_interrupts() -> Iterator[None]:
    """Return a context manager in which a SIGINT within `SAME_INTERRUPT_S` of the one that raised is dropped.

    A terminal and a parent process may both send one for the same Ctrl-C. Outside of the main thread, or if SIGINT has
    another handler than Python's default one, the context manager does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    last = float("-inf")

    def interrupt(_: int, __: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or do nothing within `SAME_INTERRUPT_S` of the SIGINT that raised last."""
        nonlocal last
        now = time.monotonic()
        if now - last > SAME_INTERRUPT_S:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
