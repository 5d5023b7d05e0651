"""The zygote: one thread that has imported everything, forks a worker for each order, and buries it with its children.

It never runs an operation on several threads: a process that did must not fork. The worker of the next order is forked
beforehand, and waits for it.
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
class _Ward:
    """A worker in the zygote's care."""

    number: int
    process: int
    status: int | None = None
    was_asked: bool = False
    killed_at: float | None = None


class _Zygote:
    def __init__(self, orders: int, reports: int) -> None:
        self._orders, self._reports = orders, reports
        self._lines = Lines(orders)
        self._parent = os.getppid()
        self._wards: dict[int, _Ward] = {}
        self._reserve: tuple[int, int] | None = None
        self._has_buried = False
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, _notice)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def greet(self) -> None:
        """Read the first message, import what it names, and say so."""
        waiting: list[Message] = []
        while not waiting:
            more = self._lines.read()
            if more is None:
                os._exit(0)
            waiting = more
        greeting, *rest = waiting
        sys.path[:] = greeting["path"]
        worker.import_all(greeting["preload"])
        if greeting["warm"]:
            from torchdelta._torch.process import forking

            forking.warm_up(greeting["warm"])
        # collected now and never looked at again: pages that nobody writes to stay shared after a fork
        gc.collect()
        gc.freeze()
        self._reserve = self._fork()
        self._report({"ready": os.getpid()})
        for order in rest:
            self._obey(order)

    def serve(self) -> None:
        """Obey orders until the pipe closes, then end everybody."""
        while True:
            readable, _, _ = select.select([self._orders, self._woken], [], [], self._patience())
            if self._woken in readable:
                _drain(self._woken)
            self._reap()
            if self._orders in readable:
                orders = self._lines.read()
                if orders is None:
                    break
                for order in orders:
                    self._obey(order)
            # somebody whom the parent forked may hold the other end of the pipe
            if os.getppid() != self._parent:
                break
            self._settle()
            if not readable:
                self._use_leisure()
        self._end_everybody()

    def _use_leisure(self) -> None:
        if self._has_buried:
            self._has_buried = False
            self._end_strays()
        if self._reserve is None:
            self._reserve = self._fork()

    def _obey(self, order: Message) -> None:
        if "start" in order:
            self._start(order["start"], order["order"])
            return
        for ward in self._wards.values():
            if ward.number == order.get("end"):
                self._end(ward)
            elif ward.number == order.get("dismiss") and ward.killed_at is None:
                # it is leaving by itself; no signal, which it would comment on in its output
                ward.killed_at = time.monotonic() + process_groups.GRACE_S

    def _start(self, number: int, order: Message) -> None:
        line = line_of(order)
        while True:
            process, pipe = self._reserve or self._fork()
            self._reserve = None
            try:
                os.write(pipe, line)
                break
            except BrokenPipeError:  # somebody killed it while it waited
                continue
            finally:
                os.close(pipe)
        self._wards[process] = _Ward(number=number, process=process)
        self._report({"started": number, "process": process})

    def _fork(self) -> tuple[int, int]:
        """Fork a worker that waits for its order, and return it with the pipe for that."""
        zygote = os.getpid()
        for_worker, pipe = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                os.close(pipe)
                self._be_worker(zygote, for_worker)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(for_worker)
        return process, pipe

    def _be_worker(self, zygote: int, pipe: int) -> None:
        # a Ctrl-C at the terminal is not for this process, and its group can be ended as one
        os.setsid()
        process_groups.die_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (self._orders, self._reports, self._woken, self._waker):
            os.close(descriptor)
        orders = Lines(pipe).read()
        if orders is None:
            return
        os.close(pipe)
        worker.work(worker.Order(**orders[0]))

    def _reap(self) -> None:
        """Take note of every child that ended."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process in self._wards:
                ward = self._wards[process]
                ward.status = os.waitstatus_to_exitcode(status)
                self._end(ward)

    def _settle(self) -> None:
        now = time.monotonic()
        for ward in list(self._wards.values()):
            if ward.killed_at is not None and now >= ward.killed_at:
                process_groups.end_for_good(ward.process)
            if ward.status is not None and process_groups.is_gone(ward.process):
                del self._wards[ward.process]
                self._report({"ended": ward.number, "status": ward.status})
                self._has_buried = True

    def _end(self, ward: _Ward) -> None:
        if not ward.was_asked:
            ward.was_asked = True
            process_groups.ask_to_end(ward.process)
            ward.killed_at = time.monotonic() + process_groups.GRACE_S

    def _end_strays(self) -> None:
        """Kill who left a worker's group and lost its parent: no query has a right to daemons."""
        kept = {*self._wards, *(() if self._reserve is None else (self._reserve[0],))}
        while strays := [child for child in process_groups.children_of(os.getpid()) if child not in kept]:
            for stray in strays:
                os.kill(stray, signal.SIGKILL)
            # their children are adopted in turn, and found in the next round
            for stray in strays:
                os.waitpid(stray, 0)

    def _end_everybody(self) -> None:
        deadline = time.monotonic() + process_groups.GRACE_S
        for ward in self._wards.values():
            process_groups.ask_to_end(ward.process)
        while time.monotonic() < deadline and not all(map(process_groups.is_gone, self._wards)):
            time.sleep(_SOON_S)
            self._reap()
        for process in self._wards:
            process_groups.end_for_good(process)
        self._reserve = None
        self._wards = {}
        self._end_strays()

    def _patience(self) -> float:
        if any(ward.killed_at is not None for ward in self._wards.values()):
            return _SOON_S
        if self._reserve is None or self._has_buried:
            # forking takes as long as a short query: it is not done beside one
            return _SHORT_S if self._wards else 0.0
        return _PARENT_CHECK_S

    def _report(self, message: Message) -> None:
        try:
            os.write(self._reports, line_of(message))
        except BrokenPipeError:
            self._end_everybody()
            os._exit(0)


def _notice(*_: Any) -> None:
    """Do nothing: that a child ended is read from the wakeup descriptor."""


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 10):
            pass
    except BlockingIOError:
        return


def main() -> None:
    """Be a zygote: orders come in where input does, and reports go out where output does."""
    # threads that have nothing to do sleep, and leave the machine to the other workers
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_groups.adopt_orphans()
    orders, reports = os.dup(0), os.dup(1)
    # whatever prints while it is imported prints to the log, and not between reports
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    zygote = _Zygote(orders, reports)
    zygote.greet()
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
