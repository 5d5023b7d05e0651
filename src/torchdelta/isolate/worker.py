"""A worker: one process for one query, set apart from everybody else, which answers or dies."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchdelta import errors
from torchdelta.isolate import process_groups
from torchdelta.isolate.directories import QueryDirectory
from torchdelta.isolate.protocol import Lines, Message, line_of, message_in, write_message

_PAGE_FIELDS = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is told when it begins."""

    directory: str
    memory_bytes: int | None


def work(order: Order) -> NoReturn:
    """Run the query of a place, and leave without the interpreter's farewell: what a task broke must not break that."""
    place = QueryDirectory(directory=Path(order.directory))
    errors.catch_everything()
    try:
        _redirect(place.output)
        _limit(order)
        asked = message_in(place.request.read_bytes())
        _set_up_compiler(place)
        answer = _answer(asked, place, order)
    except SystemExit as left:
        _leave(_status_of(left))
    write_message(place.answer, answer)
    _leave(0)


def import_all(names: list[str]) -> None:
    """Import modules before the first query needs them, and call what is named behind a colon."""
    # what is imported stays: to look for garbage in it takes a sixth of the time
    gc.disable()
    try:
        for name in names:
            if ":" in name:
                _function(name)()
            else:
                importlib.import_module(name)
    finally:
        # and what is frozen is not looked at later either, so that its pages stay shared after a fork
        gc.freeze()
        gc.enable()


def _answer(asked: Message, place: QueryDirectory, order: Order) -> Message:
    try:
        answer = {"answer": _function(asked["task"])(asked["request"], place)}
        if not isinstance(answer["answer"], dict):
            raise TypeError(f"{asked['task']} answered with a {type(answer['answer']).__name__}, not a dict")
        # an answer that strict JSON cannot hold is the task's mistake, and is told as one
        line_of(answer)
    except SystemExit:
        raise
    except BaseException as error:
        return _described(error, order)
    else:
        return answer


def _function(task: str) -> Callable[..., Any]:
    module, _, name = task.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _described(error: BaseException, order: Order) -> Message:
    if order.memory_bytes is not None and _is_out_of_memory(error):
        return {"memory": str(error)}
    kind = type(error)
    ours = next((base.__name__ for base in kind.__mro__ if base.__module__ == errors.__name__), None)
    return {
        "raised": {
            "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
            "error": ours,
        }
    }


def _redirect(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.close(descriptor)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        # a line that is still in a buffer when the process dies is a line that nobody reads
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]


def _limit(order: Order) -> None:
    # the last words of a crash and of a hang: where in Python it was
    faulthandler.enable()
    if sys.platform == "win32":
        return
    faulthandler.register(signal.SIGTERM, chain=True)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order.memory_bytes is not None and _PAGE_FIELDS.exists():
        # the overseer counts what is really held; this is for what is faster than it looks
        mapped = int(_PAGE_FIELDS.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * order.memory_bytes, hard))


def _set_up_compiler(place: QueryDirectory) -> None:
    from torchdelta._torch.process import forking

    forking.compile_in_threads()
    forking.use_private_cache(place.cache, scratch=place.scratch)


def _is_out_of_memory(error: BaseException) -> bool:
    from torchdelta._torch.process.exceptions import is_out_of_memory

    return is_out_of_memory(error)


def _status_of(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return (left.code or 0) & 0xFF
    print(left.code, file=sys.stderr)
    return 1


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)  # what C++ printed
    os._exit(status)


def _main() -> NoReturn:
    """Be a spawned worker: get ready, wait for an order, carry it out."""
    process_groups.die_with_parent(os.getppid())
    orders, reports = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    lines = Lines(orders)
    received: list[Message] = []
    while len(received) < 2:
        more = lines.read()
        if more is None:
            os._exit(1)
        if more and not received:
            sys.path[:] = more[0]["path"]
            import_all(more[0]["preload"])
            os.write(reports, line_of({"ready": os.getpid()}))
            os.close(reports)
        received += more
    process_groups.end_when_closed(orders)
    work(Order(**received[1]))


if __name__ == "__main__":
    _main()
