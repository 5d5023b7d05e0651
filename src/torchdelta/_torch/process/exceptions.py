"""Exceptions: where one comes from, and whether it is of memory that was refused."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

import torchdelta

_PLUMBING = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(torchdelta.__file__) + os.sep)

_REFUSED = ("can't allocate memory", "not enough memory")


def place_of(error: BaseException) -> str:
    """Return file and line of whoever raised it, or called torch when it was raised; empty where torch did by itself.

    A compiler wraps what it catches: it is the innermost exception that counts, and its frames begin where it was
    caught.
    """
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    frames = traceback.extract_tb(inner.__traceback__)
    own = [frame for frame in frames if _is_written(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation was refused."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED)
    )


def is_refused_memory(name: str, message: str) -> bool:
    """Tell the same of an exception that only its name and its words are left of."""
    return name.rpartition(".")[2] in ("MemoryError", "OutOfMemoryError") or any(each in message for each in _REFUSED)


def without_frames(error: Exception) -> Exception:
    """Return an exception without its frames, and those of whatever it comes from: they keep what was in them."""
    seen: BaseException | None = error
    while seen is not None:
        seen = seen.with_traceback(None).__cause__ or seen.__context__
    return error


def _is_written(file: str) -> bool:
    """Tell whether somebody wrote this file, other than torch and we."""
    if file.startswith(_PLUMBING) or not os.path.isfile(file):
        return False
    # what inductor generates lies in files, too: in folders of its caches, and is nobody's module
    known = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return "torchinductor" not in file and f"{os.sep}cache{os.sep}" not in file and file in known
