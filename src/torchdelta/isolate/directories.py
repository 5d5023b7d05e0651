"""Where a query's files lie: one directory for each pool, and in it one for each query.

    <temporary directory>/torchdelta-<user>/
        pool-1f2e3d.lock          locked while the pool's process lives
        pool-1f2e3d/
            start.log             output of zygotes and workers before their first query
            query-0/
                request.json      the task and its request
                answer.json       the task's answer or exception; complete as soon as it exists
                told              a first line once the task begins, then the parts that it has begun, one a line
                output            everything that the worker and its children printed
                scratch/  cache/  the task's temporary files, and the compilers' caches

The parent reads these files, also after the worker has died: this is how a crash leaves evidence. It has `told` and
`output` open from the start (`QueryTraces`), so that a task that deletes its directory cannot take them away. A pool
removes its directory when it closes. The directory of a pool that was killed is removed by the next pool, which can
tell by the lock.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from torchdelta.errors import EnvironmentUnfit
from torchdelta.records.file_locks import open_locked, remove_locked

_PARTS_BYTES = 1 << 24
_BEGUN = "."
FILES_LOST = 74
"""The exit status of a worker that cannot write its files: EX_IOERR of sysexits."""
_LOCK_SUFFIX = ".lock"
_LOCK_ATTEMPTS = 5
"""A new file is locked at once, unless another pool is just sweeping: then one more attempt is enough."""


@dataclass(frozen=True, kw_only=True)
class QueryDirectory:
    """The files of one query. The worker writes them, and the parent reads them while it runs and afterwards."""

    directory: Path
    parts_descriptor: int | None = None
    """In a worker: the file of parts, which was opened before the task began."""
    before_part: Callable[[], None] = lambda: None
    """In a worker: called before a part is told, so that what the parts before it did is not blamed on it."""

    @property
    def request(self) -> Path:
        """The file with the task's name and its request."""
        return self.directory / "request.json"

    @property
    def answer(self) -> Path:
        """The file with the task's answer or its exception; it is complete as soon as it exists."""
        return self.directory / "answer.json"

    @property
    def output(self) -> Path:
        """The file with everything that the worker and its children printed."""
        return self.directory / "output"

    @property
    def scratch(self) -> Path:
        """The directory for the task's temporary files, removed after the query."""
        return self.directory / "scratch"

    @property
    def cache(self) -> Path:
        """The directory in which compilers cache their graphs for this query alone."""
        return self.directory / "cache"

    def create(self) -> None:
        """Make the query's directory, its scratch and its cache, and the empty files of parts and output.

        Raise FileExistsError if the directory exists already.
        """
        for directory in (self.directory, self.scratch, self.cache):
            directory.mkdir(mode=0o700)
        for file in (self.parts, self.output):
            file.touch(mode=0o600)

    def opened(self, before_part: Callable[[], None] = lambda: None) -> QueryDirectory:
        """Open the file of parts for appending, and return a copy of this record that has its descriptor; for a worker.

        `before_part` is kept in the copy. A task that deletes the file cannot close it, so that `tell` works all the
        same. Raise OSError if the file is missing.
        """
        return QueryDirectory(
            directory=self.directory,
            parts_descriptor=os.open(self.parts, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC),
            before_part=before_part,
        )

    def tell_begun(self) -> None:
        """Write the first line of the file of parts: the worker is ready, and its task begins."""
        self._write(_BEGUN)

    def tell(self, part: str) -> None:
        """Append a part's name to the file of parts, as one line, so that the parent knows where a worker died.

        A task calls this when the part begins; only in a worker (`opened`). `before_part` is called first. If the line
        cannot be written, the worker exits with `FILES_LOST`, because nothing that it finds afterwards could be read.
        """
        self.before_part()
        self._write(part)

    def _write(self, part: str) -> None:
        """Append one line to the file of parts, or exit with `FILES_LOST`."""
        assert self.parts_descriptor is not None
        try:
            # one unbuffered write: the line is in the file even if the next instruction crashes
            os.write(self.parts_descriptor, " ".join(part.split()).encode() + b"\n")
        except OSError:
            os._exit(FILES_LOST)

    @property
    def parts(self) -> Path:
        """The file of the parts that the task has begun."""
        return self.directory / "told"


class QueryTraces:
    """The parts and the output of one query, as its parent reads them, whatever the task does to the files."""

    def __init__(self, place: QueryDirectory) -> None:
        """Open the file of parts and that of output, in the directory of a query, for reading."""
        self._parts, self._output = place.parts.open("rb"), place.output.open("rb")

    def close(self) -> None:
        """Close both files."""
        self._parts.close()
        self._output.close()

    @property
    def has_begun(self) -> bool:
        """Whether the file of parts has a line: the worker was ready, and its task has begun."""
        return bool(self._lines())

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that the task has begun, in their order; empty if there are none."""
        return tuple(self._lines()[1:])

    @property
    def output_bytes(self) -> int:
        """How many bytes the worker and its children have printed so far."""
        return os.fstat(self._output.fileno()).st_size

    def output_tail(self, max_bytes: int) -> str:
        """Return the last `max_bytes` of the output."""
        return _tail_of(self._output, max_bytes)

    def _lines(self) -> list[str]:
        """Return the lines of the file of parts so far; the first only says that the task has begun.

        Only the first `_PARTS_BYTES` of the file are read.
        """
        self._parts.seek(0)
        return self._parts.read(_PARTS_BYTES).decode(errors="replace").splitlines()


def read_tail(path: Path, max_bytes: int) -> str:
    """Return the last `max_bytes` of a text file, or an empty string if it cannot be read or is not a regular file."""
    try:
        # a task may put a directory in its place, or a pipe, which would be waited for
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return _tail_of(file, max_bytes)
    except OSError:
        return ""


def _tail_of(file: IO[bytes], max_bytes: int) -> str:
    """Return the last `max_bytes` of an open file as text; bytes that are not UTF-8 are replaced."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - max_bytes))
    return file.read().decode(errors="replace")


class PoolDirectory:
    """The directory of one pool: `with` makes and locks it, and removes it at the end."""

    def __init__(self, root: Path | None = None) -> None:
        """Keep the root, by default one for this user among the temporary files; nothing is made before `with`."""
        self._root = root or _default_root()
        self._lock: IO[bytes] | None = None
        self.path = self._root

    def __enter__(self) -> PoolDirectory:
        """Make and lock a new directory with a random name, whose path is then in `path`, and return this object.

        The root is made if it does not exist, and directories that ended pools left in it are removed. Raise
        EnvironmentUnfit if the root belongs to another user, if files in it cannot be locked, or if it or the directory
        cannot be made.
        """
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(self._root)
            sweep(self._root)
            self._lock = self._lock_new_path()
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot make a directory for workers in {self._root}: {error.strerror or error}. Make room, or point "
                "TMPDIR to a directory that you can write to"
            ) from error
        return self

    def _lock_new_path(self) -> IO[bytes]:
        """Choose a `path` that no other pool has, and return its file of the lock, locked.

        Raise EnvironmentUnfit if no file in the root can be locked.
        """
        for _ in range(_LOCK_ATTEMPTS):
            self.path = self._root / f"pool-{os.urandom(6).hex()}"
            path = self.path.with_suffix(_LOCK_SUFFIX)
            if (lock := open_locked(path)) is not None:
                return lock
            path.unlink(missing_ok=True)
        raise EnvironmentUnfit(
            f"files in {self._root} cannot be locked, as on some network disks: point TMPDIR to a local disk"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the directory with everything in it, and end the lock."""
        assert self._lock is not None
        _remove(self.path, self._lock)
        self._lock = None


def sweep(root: Path) -> None:
    """Remove the directories of pools in `root` that no open pool has locked, and their lock files."""
    for path in root.glob(f"pool-*{_LOCK_SUFFIX}"):
        lock = open_locked(path)
        if lock is not None:
            _remove(path.with_suffix(""), lock)


def _default_root() -> Path:
    """Return the path of the directory for this user's pools, among the temporary files; it is not made.

    Raise EnvironmentUnfit if this machine has no directory to which temporary files can be written.
    """
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise EnvironmentUnfit(f"{error.strerror}: make room, or point TMPDIR to a directory with some") from error
    # one root for each user, so that no user can remove or prepare the files of another user's pools
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return temporary / f"torchdelta-{user}"


def _require_own(root: Path) -> None:
    """Raise EnvironmentUnfit if a directory belongs to another user; do nothing on systems without user ids."""
    if hasattr(os, "getuid") and root.stat().st_uid != os.getuid():
        raise EnvironmentUnfit(f"{root} belongs to another user: remove it, or point TMPDIR to a directory of your own")


def _remove(directory: Path, lock: IO[bytes]) -> None:
    """Remove a directory and then the file of its lock, and close the lock.

    If something in the directory cannot be removed yet, the file of the lock stays too, and the next sweep tries again.
    """
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        lock.close()
    else:
        remove_locked(lock)
