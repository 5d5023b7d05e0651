"""Compiled C++ kernels, kept between workers and runs, so that one source is compiled once.

Each worker has a private cache of graphs, because an answer must not come from an earlier run. A C++ kernel is another
thing: the same source, compiled by the same compiler with the same flags and headers, is the same library. So the call
of the compiler is what the store keeps. Its key holds everything that the result depends on, except headers: these are
known only after a compile, and each entry lists those that it used, with their size and time.

    share(directory_of_kernels())     # before the worker gets a private cache

An entry is one file, written beside its place and moved there, with a digest of its content: an entry that is cut
short, damaged or out of date is compiled anew. If anything about the store fails, the compiler runs as it would
without it. The kernels of other users are never taken: `is_private` says when a directory is trusted.

Start reading at `KernelStore.compile`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.cpp_builder
from torch._inductor.runtime.cache_dir_utils import cache_dir

MAX_BYTES = 1 << 29
"""The size that a store may reach. A kernel of inductor has 50 KB to 2 MB."""
_KEPT = 0.75
"""The share of `MAX_BYTES` that is left when old entries are removed."""
_SOURCES = (".cpp", ".cc", ".c", ".o")
_RESULTS = (".so", ".o")
_COMPILED_BY = ("cc1plus", "as", "collect2", "ld")
"""The programs that g++ calls."""
_ENVIRONMENT = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX")
"""Variables that change what g++ does."""

Stamp = tuple[str, int, int]
"""The path of a file, its size, and when it was changed, in nanoseconds."""


def directory_of_kernels() -> Path:
    """Return the directory of kernels in the present cache directory of inductor; it need not exist."""
    return Path(cache_dir()) / "torchdelta-kernels"


def share(directory: Path) -> None:
    """Make a directory, and let this process take compiled kernels from it and keep there what it compiles.

    For that, inductor's function that runs g++ is replaced. On other systems than Linux, or if the directory or its
    parent is not private (`is_private`), it is made all the same, but nothing is replaced. If it cannot be made,
    nothing happens; no OSError is raised.
    """
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sys.platform == "linux" and is_private(directory) and is_private(directory.parent):
            store = KernelStore(directory, torch._inductor.cpp_builder.run_compile_cmd)
            torch._inductor.cpp_builder.run_compile_cmd = store.compile


def is_private(directory: Path) -> bool:
    """Tell whether a directory belongs to this user and only this user may write to it.

    Raise OSError if it is missing.
    """
    about = directory.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One call of g++ that compiles or links sources into one result."""

    words: tuple[str, ...]
    sources: tuple[Path, ...]
    result: Path

    @classmethod
    def of(cls, command: str) -> Compilation | None:
        """Return the call that a command line makes, or None if its result is not a library or an object file.

        None too if it does not name exactly one result by `-o`, names no source, or compiles several sources at once.
        Object files are sources too, and any number of them may be linked.
        """
        words = shlex.split(command)
        if words.count("-o") != 1 or words[-1] == "-o":
            return None
        result = Path(words[words.index("-o") + 1])
        sources = tuple(Path(word) for word in words[1:] if word.endswith(_SOURCES) and Path(word) != result)
        # of several sources g++ would list the headers of the last one alone
        if result.suffix not in _RESULTS or not sources or sum(path.suffix != ".o" for path in sources) > 1:
            return None
        return cls(words=tuple(words), sources=sources, result=result)

    def key(self) -> str:
        """Return a digest of everything that the result depends on, except headers.

        That is the compiler, the flags, the content of the sources, the processor, Python, torch and the variables of
        `_ENVIRONMENT`. The paths of sources and result do not count. Raise OSError if a source cannot be read, or the
        compiler is not g++ itself.
        """
        places = {str(self.result): "result"} | {str(path): f"source {path.suffix}" for path in self.sources}
        parts = [
            *(places.get(word, word) for word in self.words),
            *(hashlib.sha256(path.read_bytes()).hexdigest() for path in self.sources),
            *(f"{name}={os.environ.get(name)}" for name in _ENVIRONMENT),
            *map(repr, _stamps_of_compiler(self.words[0])),
            _machine(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class KernelStore:
    """A directory of results of g++, by the key of the call."""

    def __init__(self, directory: Path, run: Callable[[str, str], None], max_bytes: int = MAX_BYTES) -> None:
        """Keep the directory, and `run`, which runs a command line in a directory and raises if that fails."""
        self.directory, self.max_bytes = directory, max_bytes
        self._run = run

    def compile(self, cmd_line: str, cwd: str) -> None:
        """Produce the result of a command line of g++, from the store if it has it, or else by running the command.

        The command runs in the directory `cwd`, and its result is added to the store, if that is possible. A command
        that has no key is only run. Raise what the compiler's failure raises.
        """
        compilation = Compilation.of(cmd_line)
        key = _key_of(compilation)
        if compilation is None or key is None:
            self._run(cmd_line, cwd)
            return
        content = self.load(key)
        if content is not None and _is_written(content, compilation.result):
            return
        headers = compilation.result.with_name(f".headers-{os.urandom(6).hex()}.d")
        self._run(f"{cmd_line} -MD -MF {shlex.quote(str(headers))}", cwd)
        # without a list of headers, an entry could be out of date
        with suppress(OSError, UnicodeError):
            self.add(key, compilation.result.read_bytes(), stamps(_used_headers(headers, compilation)))
        headers.unlink(missing_ok=True)

    def load(self, key: str) -> bytes | None:
        """Return the result under a key, or None if there is none, it is damaged, or one of its headers has changed.

        An entry that is returned counts as used now.
        """
        path = self._path(key)
        try:
            first, _, content = path.read_bytes().partition(b"\n")
            about = json.loads(first)
            is_whole = about["digest"] == hashlib.sha256(content).hexdigest()
            headers = [(str(name), int(size), int(time)) for name, size, time in about["headers"]]
            if not is_whole or stamps(name for name, _, _ in headers) != headers:
                return None
            os.utime(path)  # it was used last
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return content

    def add(self, key: str, content: bytes, headers: Sequence[Stamp]) -> None:
        """Keep a result, with the headers that it was compiled from; remove the entries used longest ago if it is full.

        Raise OSError if it cannot be written; then no part of it is left.
        """
        about = {"digest": hashlib.sha256(content).hexdigest(), "headers": headers}
        _write_whole(self._path(key), json.dumps(about).encode() + b"\n" + content)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove the entries that were used longest ago, if all of them together are larger than `max_bytes`.

        Then at most the share `_KEPT` of `max_bytes` is left.
        """
        entries = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                entries.append((path.stat(), path))
        size = sum(about.st_size for about, _ in entries)
        if size <= self.max_bytes:
            return
        for about, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
            path.unlink(missing_ok=True)
            size -= about.st_size
            if size <= _KEPT * self.max_bytes:
                return

    def _path(self, key: str) -> Path:
        return self.directory / key


def stamps(paths: Iterable[str]) -> list[Stamp]:
    """Return each path with the size of its file and the time of its last change. Raise OSError if one is missing."""
    return [(path, about.st_size, about.st_mtime_ns) for path in paths for about in (os.stat(path),)]


def _key_of(compilation: Compilation | None) -> str | None:
    """Return the key of a call; None without a call, or if a file is unreadable or the compiler is not g++ itself."""
    try:
        return None if compilation is None else compilation.key()
    except OSError:
        return None


def _is_written(content: bytes, result: Path) -> bool:
    """Write a result to its place, complete or not at all, and tell whether that succeeded."""
    try:
        _write_whole(result, content)
        result.chmod(0o755)
    except OSError:
        return False
    return True


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is complete as soon as it exists. Raise OSError if it cannot be written."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _used_headers(listing: Path, compilation: Compilation) -> list[str]:
    """Return the headers in a listing that g++ wrote as a rule for make, or none if objects were linked alone.

    Raise OSError if sources were compiled without a listing, or if a header has a relative path or one with a space.
    """
    if all(path.suffix == ".o" for path in compilation.sources):
        return []
    _, _, names = listing.read_text(encoding="utf-8").replace("\\\n", " ").partition(": ")
    sources = set(map(str, compilation.sources))
    headers = [name for name in names.split() if name not in sources]
    if not all(map(os.path.isabs, headers)) or "\\" in names:
        raise OSError("a header has no plain path")
    return headers


@functools.cache
def _stamps_of_compiler(name: str) -> tuple[Stamp, ...]:
    """Return the stamps of g++ and of the programs that it calls.

    Raise OSError if it is not found or is not GCC. A script counts as not GCC, because what it calls is not known.
    """
    path = shutil.which(name)
    if path is None:
        raise OSError(f"{name} is not found")
    with open(path, "rb") as file:
        if file.read(2) == b"#!":
            raise OSError(f"{name} is a script")
    programs = [path]
    for program in _COMPILED_BY:
        words = [path, f"-print-prog-name={program}"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        found = shutil.which(answer) if answer else None
        if found is None:
            raise OSError(f"{name} does not call {program}")
        programs.append(found)
    return tuple(stamps(programs))


@functools.cache
def _machine() -> str:
    """Return a text about the processor, Python and torch, which a compiled kernel depends on."""
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    # the clock changes from one moment to the next
    lines = [line for line in processor.splitlines() if not line.startswith(("cpu MHz", "bogomips", "processor"))]
    libraries = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libtorch*.so")))
    return "\n".join([platform.machine(), sys.version, torch.__version__, *map(repr, stamps(libraries)), *lines])
