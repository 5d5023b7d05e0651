"""Standard streams that a command cannot fail on: output to a closed pipe or a full disk is dropped.

The exit code of a command is its verdict, and its files are written before anything is printed. So `torchdelta check …
| head -1` must end as `torchdelta check …` does. `tolerant_streams` replaces the streams for one command:

    with tolerant_streams() as restore: …     # `restore()` puts the user's own streams back, for a script of `run`

A stream that was closed before the start (`>&-`) is replaced by the null device, because the next file that is opened
would get its number, and children would print into that file.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = ("stdout", "stderr")


class TolerantFile(io.FileIO):
    """A file that accepts everything: after the first error of a write, the rest is dropped."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the data and return how many bytes were written; never raise OSError.

        The first OSError is kept in `error`. From then on nothing is written, and the number of all bytes is returned.
        """
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(memoryview(data).cast("B"))


def tolerant(stream: TextIO | None) -> io.TextIOWrapper:
    """Return a stream that writes to the same place and never fails.

    If the given one is None or closed, or has no open descriptor, return one that drops everything. Characters that the
    encoding lacks are written as escapes.
    """
    if stream is None or stream.closed:
        return open(os.devnull, "w", encoding="utf-8")
    try:
        file = TolerantFile(stream.fileno(), "w", closefd=False)
    except OSError:  # the program has closed the descriptor
        return open(os.devnull, "w", encoding="utf-8")
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=file.isatty() or stream is sys.__stderr__,
    )


@contextmanager
def tolerant_streams() -> Iterator[Callable[[], None]]:
    """Replace `sys.stdout` and `sys.stderr` by tolerant streams in the block; yield a function that puts them back.

    Streams that were replaced already, for example by a test, stay. If stdout could not be written, for another reason
    than that its reader has ended, a line on stderr says so when the block ends.
    """
    _open_missing_descriptors()
    before = {name: getattr(sys, name) for name in _NAMES}
    own = {name: tolerant(old) for name, old in before.items() if old is getattr(sys, f"__{name}__")}

    def restore() -> None:
        for name, stream in own.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])

    for name, stream in own.items():
        if before[name] is not None:
            before[name].flush()
        setattr(sys, name, stream)
    try:
        yield restore
    finally:
        restore()
        if "stdout" in own and "stderr" in own:
            _print_error_of(own["stdout"], own["stderr"])


def _print_error_of(stdout: io.TextIOWrapper, stderr: io.TextIOWrapper) -> None:
    """Print to `stderr` that the output could not be written, if a write to `stdout` failed; not for a closed pipe."""
    raw = getattr(stdout.buffer, "raw", None)
    error = raw.error if isinstance(raw, TolerantFile) else None
    if error is not None and error.errno != errno.EPIPE:
        print(f"torchdelta: the output could not be written: {error.strerror}", file=stderr, flush=True)


def _open_missing_descriptors() -> None:
    """Open the null device in place of each of the descriptors 0, 1 and 2 that is closed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
