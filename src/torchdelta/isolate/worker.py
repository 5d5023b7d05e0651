"""A worker: a process that runs one query, writes its answer to a file, and exits.

`run_query` is the whole of it. The process comes from a zygote's fork (`zygote.py`), or it is a new Python that runs
`main` here. It leaves by `os._exit`, because the interpreter's own shutdown could crash on state that a task damaged.
"""

from __future__ import annotations

import contextlib
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
from torchdelta.isolate.directories import FILES_LOST, QueryDirectory
from torchdelta.isolate.protocol import Lines, Message, line_of, message_in, write_message
from torchdelta.records.failure import Failure
from torchdelta.records.trust import trust

_PAGE_COUNTS = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker needs to begin: the directory of its query, and how much memory it may use."""

    directory: str
    memory_bytes: int | None
    token: str
    """A text that the answer repeats, so that a file which the task wrote is not taken for its answer."""


def run_query(order: Order) -> NoReturn:
    """Run the query of a directory, write its answer or a description of its exception there, and exit this process.

    The status is 0; if the task calls `sys.exit`, it is that of the call, and no answer is written; if the answer
    cannot be written, because the directory is gone or its disk is full, it is `FILES_LOST`. Output goes to a file of
    the directory, and compilers use a cache in it. The parent is told when the preparations are done. An exception of
    the preparations passes through.
    """
    errors.catch_everything()
    errors.keep_full_texts(Path(order.directory).parent.parent)
    try:
        place = QueryDirectory(directory=Path(order.directory)).opened(lambda: _require_memory(order))
        _redirect_output(place.output)
        _print_stack_of_crash()
        del sys.argv[1:]  # the command line is not that of the program, which may read its own
        question = message_in(place.request.read_bytes())
        _set_up_compiler(place)
        place.tell_begun()
        _require_memory(order)  # below a limit that is used up already, Python could not say so
        _limit_memory(order)
        answer = _answer(question, place, order)
    except SystemExit as error:
        _exit(_exit_status(error))
    _send(answer, order)


def import_all(names: list[str]) -> None:
    """Import the modules among `names`, and call the functions (`package.module:function`), before a query needs them.

    Afterwards Python's garbage collector ignores all objects that exist by then. Exceptions are passed on.
    """
    # imported modules stay alive: looking for garbage among them would take a sixth of the time
    gc.disable()
    try:
        for name in names:
            if ":" in name:
                _load_function(name)()
            else:
                importlib.import_module(name)
    finally:
        # later collections skip frozen objects too, so their pages stay shared after a fork
        gc.freeze()
        gc.enable()


def main() -> NoReturn:
    """Run a spawned worker: import what the first message names, report `ready`, wait for the order, run it, and exit.

    Messages come in at stdin, and the report goes out at stdout. If stdin closes, the parent has ended, and so the
    process ends too.
    """
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
    process_groups.exit_when_closed(orders)
    run_query(Order(**received[1]))


def _answer(question: Message, place: QueryDirectory, order: Order) -> Message:
    """Call the task with its request and `place`; return `{"answer": …}`, or what `_describe` says about its exception.

    `question` has the name of the task, the request, and directories that are trusted from now on. An answer that is
    not a dict, or not strict JSON, counts as an exception of the task. SystemExit is passed on.
    """
    try:
        for directory in question.get("trusted", ()):  # its zygote may have been started before
            trust(directory)
        answer = {"answer": _load_function(question["task"])(question["request"], place)}
        if not isinstance(answer["answer"], dict):
            raise TypeError(f"{question['task']} answered with a {type(answer['answer']).__name__}, not a dict")
        # raises if the answer is not strict JSON, which is then the task's exception
        line_of(answer)
    except SystemExit:
        raise
    except BaseException as error:
        return _describe(error, order)
    else:
        return answer


def _load_function(task: str) -> Callable[..., Any]:
    """Import and return the function that `package.module:function` names; behind the colon, dots lead into classes.

    An exception of the import, and AttributeError for a name that is not there, are passed on.
    """
    module, _, name = task.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function


def _describe(error: BaseException, order: Order) -> Message:
    """Return the message about a task's exception: a dict with its type, message, traceback and `error` under `raised`.

    `error` is the name of its class, or nearest base class, in `torchdelta.errors`, or None. If memory ran out and the
    order has a limit for it, the message is `{"memory": text}` instead.
    """
    if order.memory_bytes is not None and _is_out_of_memory(error):
        return {"memory": errors.message_of(error)}
    kind = type(error)
    own_class = next((base.__name__ for base in kind.__mro__ if base.__module__ == errors.__name__), None)
    return {
        "raised": {
            "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            "message": errors.message_of(error),
            "traceback": errors.shortened_traceback("".join(traceback.format_exception(error))),
            "error": own_class,
        }
    }


def _redirect_output(output: Path) -> None:
    """Send what this process and its children print to the end of the file `output`, line by line; stdin is empty."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.close(descriptor)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        # a line that is still in a buffer when the process dies would be lost
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]


def _print_stack_of_crash() -> None:
    """Let Python print its stack on a crash or SIGTERM, and write no core dumps; on Windows only a crash prints it."""
    faulthandler.enable()
    if sys.platform == "win32":
        return
    faulthandler.register(signal.SIGTERM, chain=True)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(order: Order) -> None:
    """Limit the address space to what is mapped now plus twice the order's `memory_bytes`.

    It is the present limit (`ulimit -v`) if that is lower. Nothing is limited if `memory_bytes` is None, and on systems
    without /proc.
    """
    if order.memory_bytes is None or not _PAGE_COUNTS.exists():
        return
    import resource

    # the supervisor measures memory in use; this limit stops allocations that are faster than its checks
    mapped = int(_PAGE_COUNTS.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = min((limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), default=sys.maxsize)
    resource.setrlimit(resource.RLIMIT_AS, (min(mapped + 2 * order.memory_bytes, most), hard))


def _require_memory(order: Order) -> None:
    """Exit with the answer that memory ran out if this process uses more than the order allows.

    The supervisor looks now and then, and might notice what one part used only in the next.
    """
    if order.memory_bytes is not None and process_groups.own_memory() > order.memory_bytes:
        _send({"memory": Failure.of_memory(order.memory_bytes, stage="").message}, order)


def _send(answer: Message, order: Order) -> NoReturn:
    """Write the answer with the order's token, and exit: with 0, or with `FILES_LOST` if it cannot be written."""
    try:
        write_message(QueryDirectory(directory=Path(order.directory)).answer, {**answer, "token": order.token})
    except OSError:
        _exit(FILES_LOST)
    _exit(0)


def _set_up_compiler(place: QueryDirectory) -> None:
    """Let compilers of this process work in threads, and keep caches and temporary files in the query's directory.

    Compiled C++ kernels alone are shared with other workers and runs.
    """
    from torchdelta._torch.compile import kernel_store
    from torchdelta._torch.process import forking

    kernel_store.share(kernel_store.directory_of_kernels())
    forking.compile_in_threads()
    forking.use_private_cache(place.cache, scratch=place.scratch)


def _is_out_of_memory(error: BaseException) -> bool:
    from torchdelta._torch.process.exceptions import is_out_of_memory

    return is_out_of_memory(error)


def _exit_status(error: SystemExit) -> int:
    """Return the exit status of a SystemExit as Python does: 0 for None, and the lowest 8 bits of an int.

    Any other code, such as a text, is printed to stderr, and the status is 1.
    """
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _exit(status: int) -> NoReturn:
    """Flush the buffers of Python and of C, and end this process without the interpreter's shutdown.

    Output that cannot be written, because a disk is full or the task closed the stream, is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)  # the buffers of C and C++
    os._exit(status)


if __name__ == "__main__":
    main()
