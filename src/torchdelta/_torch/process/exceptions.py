"""Exceptions: the line of the user's code that one comes from, and whether machine or compiler are to blame for it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

import torchdelta
from torchdelta.errors import message_of

_PLUMBING = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(torchdelta.__file__) + os.sep)

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")
_NO_KERNEL = (
    "could not run 'aten::",
    "is not currently implemented for the",
    "is not currently supported on",
    "no kernel image is available",
    "not compiled with",
    "not implemented for '",
    "not linked with support for",
)
"""What torch says, in lower case, if a device or a build of torch lacks a kernel."""
_COMPILERS = (
    "torch._dynamo.",
    "torch._export.",
    "torch._functorch.",
    "torch._higher_order_ops.",
    "torch._inductor.",
    "torch._subclasses.",
    "torch.export.",
    "torch.fx.",
    "triton.",
)
"""Modules whose exceptions come from compiling, and not from the program."""


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error was raised through, as `file.py:12`; "" if none.

    `_is_user_file` tells which code is the user's. Only the frames of the innermost `__cause__` count, because a
    compiler wraps the exceptions that it catches.
    """
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    frames = traceback.extract_tb(inner.__traceback__)
    own = [frame for frame in frames if _is_user_file(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that an allocation failed: by its class, or by a RuntimeError's message."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in message_of(error) for words in _OUT_OF_MEMORY)
    )


def names_out_of_memory(name: str, message: str) -> bool:
    """Tell whether an exception meant that an allocation failed: by its class name, or by its message alone."""
    is_named = name.rpartition(".")[2] in ("MemoryError", "OutOfMemoryError")
    return is_named or any(words in message for words in _OUT_OF_MEMORY)


def is_lack_of_machine(error: BaseException) -> bool:
    """Tell whether an exception means that memory, a device or a kernel for it is missing here.

    Every `torch.AcceleratorError` counts, and every error that `is_out_of_memory` accepts. A RuntimeError,
    NotImplementedError or AssertionError counts if its message has one of the words `_NO_KERNEL`.
    """
    is_of_torch = isinstance(error, (RuntimeError, NotImplementedError, AssertionError))
    is_missing = is_of_torch and any(words in message_of(error).lower() for words in _NO_KERNEL)
    return is_out_of_memory(error) or is_missing or isinstance(error, torch.AcceleratorError)


def is_of_compiler(kind: type[BaseException]) -> bool:
    """Tell whether a class of exceptions, or a base of it, is defined in a module of a compiler (`_COMPILERS`).

    Such an exception means that compiling failed, or wraps what a backend raised.
    """
    return any(f"{base.__module__}.".startswith(_COMPILERS) for base in kind.__mro__)


def kinds_of(error: BaseException) -> tuple[type[BaseException], ...]:
    """Return the class of an exception, and of those that it wraps if it is a compiler's own, the outermost first.

    Each class comes once; the first that is not a compiler's own is the last. A compiler wraps an exception with and
    without a `__cause__`, or keeps it as an `inner_exception`.
    """
    kinds: dict[type[BaseException], None] = {}
    current: BaseException | None = error
    while current is not None:
        kinds[type(current)] = None
        if not is_of_compiler(type(current)):
            break
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
    return tuple(kinds)


def without_frames(error: Exception) -> Exception:
    """Remove the frames of an exception, and of all causes and contexts behind it, in place; return the exception.

    The frames would keep local variables alive.
    """
    known: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in known:
            known.add(id(current))
            current.with_traceback(None)
            pending += [current.__cause__, current.__context__]
    return error


def _is_user_file(file: str) -> bool:
    """Tell whether a file exists and is an imported module that is neither torch's nor ours nor in a cache."""
    if file.startswith(_PLUMBING) or not os.path.isfile(file):
        return False
    # inductor's generated code lies in files of its cache folders, which are not imported modules
    known = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return "torchinductor" not in file and f"{os.sep}cache{os.sep}" not in file and file in known
