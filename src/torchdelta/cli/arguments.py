"""What the commands have in common: options as they are typed, files to write, warnings to count."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from torchdelta.errors import UsageError
from torchdelta.records.comparison import Scalar


def read_option(text: str) -> tuple[str, Scalar]:
    """Read `key=value`, the value as the number or truth value that it looks like."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"malformed option {text!r}: write -O key=value")
    return name, _scalar(value)


def _scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@contextmanager
def counting_warnings(console: Console) -> Iterator[None]:
    """Keep warnings from the terminal, and say how many there were."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    if caught:
        said = "1 warning; --verbose shows it" if len(caught) == 1 else f"{len(caught)} warnings; --verbose shows them"
        console.print(said, style="dim", highlight=False)


def require_writable(path: Path) -> None:
    """Raise UsageError where a file cannot be written."""
    # minutes of compiling are not to be lost to a path that could never be written
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; name a file in it")
    if path.exists() and not path.is_file():  # a pipe or a device needs no room beside it
        return
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: {path.parent} is not writable; name another place")
