"""The zygote: a process that has imported torch and everything else, and forks a worker from itself for each query.

A fork takes milliseconds where a new Python would import torch for seconds. The zygote has one thread and never runs
an operation on several threads, because a process that did must not fork. It forks the worker of the next order
beforehand (`_reserve`), and that worker waits for its order at a pipe.

The parent's side is `starters.py`. It sends one JSON message a line:

    {"path": …, "preload": …, "warm": …}    first: what to import, answered by {"ready": process}
    {"start": 3, "order": {…}}              answered by {"started": 3, "process": …}
    {"end": 3}                              SIGTERM to worker 3's group, SIGKILL after a grace period
    {"dismiss": 3}                          worker 3 has answered and is exiting; SIGKILL after the grace period

The zygote reports {"ended": 3, "status": …} once a worker and its whole group are gone. When the pipe of orders
closes, it ends all workers and itself.

Start reading at `_Zygote.serve`; `_Zygote._fork` is the fork.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from torchdelta.isolate import process_groups, worker
from torchdelta.isolate.protocol import Lines, Message, line_of

_SOON_S = 0.005
_SHORT_S = 0.05
_PARENT_CHECK_S = 1.0


@dataclass
class _WorkerProcess:
    """A worker that has an order: the order's number, the process, and how far its end has come."""

    number: int
    process: int
    status: int | None = None
    """The exit status, or None while the process runs."""
    is_terminated: bool = False
    """Whether its group was sent SIGTERM."""
    kill_at: float | None = None
    """When its group is sent SIGKILL, or None if it is not to be ended."""


class _Zygote:
    def __init__(self, orders: int, reports: int) -> None:
        """Keep the descriptors of both pipes, and have the end of each child (SIGCHLD) wake up `serve`.

        `orders` is where messages of the parent come in, and `reports` where those to the parent go out.
        """
        self._orders, self._reports = orders, reports
        self._lines = Lines(orders)
        self._parent = os.getppid()
        self._workers: dict[int, _WorkerProcess] = {}
        self._reserve: tuple[int, int] | None = None
        self._may_have_strays = False
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        os.set_blocking(self._wakeup_reader, False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)

    def get_ready(self) -> None:
        """Read the first message, import what it names, fork the worker in reserve, and report that orders may come.

        A compiler is warmed up if the message names one. Orders that came with the message are carried out. The process
        exits if the parent closes the pipe before the first message.
        """
        messages: list[Message] = []
        while not messages:
            more = self._lines.read()
            if more is None:
                os._exit(0)
            messages = more
        preparation, *orders = messages
        sys.path[:] = preparation["path"]
        worker.import_all(preparation["preload"])
        if preparation["warm"]:
            from torchdelta._torch.process import forking

            forking.warm_up(preparation["warm"])
        # collections skip frozen objects from now on: memory that is not written to stays shared after a fork
        gc.collect()
        gc.freeze()
        self._reserve = self._fork()
        self._report({"ready": os.getpid()})
        for order in orders:
            self._carry_out(order)

    def serve(self) -> None:
        """Carry out orders until their pipe closes or the parent ends; then end all workers, and return.

        In between, it collects children that ended, kills overdue groups, and uses idle time (`_do_idle_work`).
        """
        while True:
            readable, _, _ = select.select([self._orders, self._wakeup_reader], [], [], self._wait_s())
            if self._wakeup_reader in readable:
                _drain(self._wakeup_reader)
            self._reap()
            if self._orders in readable:
                orders = self._lines.read()
                if orders is None:
                    break
                for order in orders:
                    self._carry_out(order)
            # the pipe may stay open after the parent's end, because another child of the parent inherited it
            if os.getppid() != self._parent:
                break
            self._kill_overdue_and_report_ended()
            if not readable:
                self._do_idle_work()
        self._end_all()

    def _carry_out(self, order: Message) -> None:
        """Do what one message of the parent says: start a worker under a number, or end or dismiss the one with it.

        Ending sends SIGTERM now, and SIGKILL after a grace period. Dismissing plans only the SIGKILL, because the
        worker is exiting by itself. A number without a worker is ignored.
        """
        if "start" in order:
            self._start(order["start"], order["order"])
            return
        for child in self._workers.values():
            if child.number == order.get("end"):
                self._end(child)
            elif child.number == order.get("dismiss") and child.kill_at is None:
                # no SIGTERM, because it would print its stack into the output; it is exiting by itself
                child.kill_at = time.monotonic() + process_groups.GRACE_S

    def _start(self, number: int, order: Message) -> None:
        """Give an order to the worker in reserve, or to a new one if there is none or it died, and report its process.

        From then on the worker is known by `number`, and the reserve is empty.
        """
        line = line_of(order)
        while True:
            process, pipe = self._reserve or self._fork()
            self._reserve = None
            try:
                os.write(pipe, line)
                break
            except BrokenPipeError:  # it was killed while it waited
                continue
            finally:
                os.close(pipe)
        self._workers[process] = _WorkerProcess(number=number, process=process)
        self._report({"started": number, "process": process})

    def _fork(self) -> tuple[int, int]:
        """Fork a worker that waits for its order, and return its process id and the pipe into which to write the order.

        In the fork this never returns.
        """
        zygote = os.getpid()
        reader, pipe = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                os.close(pipe)
                self._become_worker(zygote, reader)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(reader)
        return process, pipe

    def _become_worker(self, zygote: int, pipe: int) -> None:
        """In the forked process: leave the zygote's group and pipes, wait for the order at `pipe`, run it and exit.

        It returns only if `pipe` closes without an order. On Linux the kernel kills the process if the zygote ends.
        """
        # a session of its own: Ctrl-C at the terminal does not reach it, and its group can be ended as one
        os.setsid()
        process_groups.die_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (self._orders, self._reports, self._wakeup_reader, self._wakeup_writer):
            os.close(descriptor)
        orders = Lines(pipe).read()
        if orders is None:
            return
        os.close(pipe)
        worker.run_query(worker.Order(**orders[0]))

    def _reap(self) -> None:
        """Collect the exit status of every child that has ended, without waiting, and end the rest of a worker's group.

        The status of a child that is not a worker is dropped.
        """
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process in self._workers:
                child = self._workers[process]
                child.status = os.waitstatus_to_exitcode(status)
                self._end(child)

    def _end(self, child: _WorkerProcess) -> None:
        """Send SIGTERM to a worker's group and set the time for SIGKILL; do nothing the second time."""
        if not child.is_terminated:
            child.is_terminated = True
            process_groups.terminate(child.process)
            child.kill_at = time.monotonic() + process_groups.GRACE_S

    def _kill_overdue_and_report_ended(self) -> None:
        """Send SIGKILL to groups whose time is up; report and forget the workers whose whole group is gone.

        If any worker was reported, `_do_idle_work` will look for strays.
        """
        now = time.monotonic()
        for child in list(self._workers.values()):
            if child.kill_at is not None and now >= child.kill_at:
                process_groups.kill(child.process)
            if child.status is not None and process_groups.is_gone(child.process):
                del self._workers[child.process]
                self._report({"ended": child.number, "status": child.status})
                self._may_have_strays = True

    def _do_idle_work(self) -> None:
        """Kill the daemons that ended workers left behind, and fork the worker in reserve if there is none.

        Daemons are looked for only if a worker has ended since the last time.
        """
        if self._may_have_strays:
            self._may_have_strays = False
            self._end_strays()
        if self._reserve is None:
            self._reserve = self._fork()

    def _end_strays(self) -> None:
        """Kill the zygote's children that are neither workers nor the reserve, and return when they are gone.

        These are processes that left a worker's group and whose parent ended: a query may not leave daemons. Without
        /proc none are found. One that runs as another user cannot be killed, and stays.
        """
        own = {*self._workers, *(() if self._reserve is None else (self._reserve[0],))}
        while strays := [child for child in process_groups.children_of(os.getpid()) if child not in own]:
            for stray in strays:
                try:
                    os.kill(stray, signal.SIGKILL)
                except PermissionError:
                    own.add(stray)
            # the zygote adopts their children in turn, and the next round finds them
            for stray in set(strays) - own:
                os.waitpid(stray, 0)

    def _end_all(self) -> None:
        """End every worker, and then the one in reserve and all strays; forget them, and return when they are gone.

        Workers get SIGTERM, and SIGKILL after a grace period; the others are killed by `_end_strays`.
        """
        deadline = time.monotonic() + process_groups.GRACE_S
        for child in self._workers.values():
            process_groups.terminate(child.process)
        while time.monotonic() < deadline and not all(map(process_groups.is_gone, self._workers)):
            time.sleep(_SOON_S)
            self._reap()
        for process in self._workers:
            process_groups.kill(process)
        self._reserve = None
        self._workers = {}
        self._end_strays()

    def _wait_s(self) -> float:
        """Return how many seconds `serve` may wait for messages before it has something else to do.

        - `_SOON_S` while a group is to be killed.
        - While idle work is left: `_SHORT_S` if workers run, and 0 if none does.
        - Otherwise `_PARENT_CHECK_S`, after which it checks that the parent lives.
        """
        if any(child.kill_at is not None for child in self._workers.values()):
            return _SOON_S
        if self._reserve is None or self._may_have_strays:
            # a fork takes as long as a short query, so it waits for a moment without one
            return _SHORT_S if self._workers else 0.0
        return _PARENT_CHECK_S

    def _report(self, message: Message) -> None:
        """Send a message to the parent; if the parent is gone, end all workers and exit this process."""
        try:
            os.write(self._reports, line_of(message))
        except BrokenPipeError:
            self._end_all()
            os._exit(0)


def _ignore_signal(*_: Any) -> None:
    """Do nothing: Python writes the signal's number to the wakeup pipe, which `serve` reads."""


def _drain(descriptor: int) -> None:
    """Read and drop everything that is in a non-blocking pipe."""
    try:
        while os.read(descriptor, 1 << 10):
            pass
    except BlockingIOError:
        return


def main() -> None:
    """Run as a zygote until the parent closes the pipe or ends, and exit: orders come at stdin, reports go to stdout.

    Interrupts (SIGINT) are ignored. Output of imported code goes to stderr.
    """
    # threads without work sleep, and leave the machine to the other workers
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_groups.adopt_orphans()
    orders, reports = os.dup(0), os.dup(1)
    # output during imports goes to the log instead of between the reports
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    zygote = _Zygote(orders, reports)
    zygote.get_ready()
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
