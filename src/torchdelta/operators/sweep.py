"""A sweep over torch's database of operators: each operator in each dtype is one query to a worker.

A worker that dies is the verdict on its operator. `SweepFile` keeps the rows on disk as they come, a header and then
one line an operator, so that a sweep can be resumed. `sweep` is where to start reading. This process needs no torch
for it: only the workers import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdelta.errors import EnvironmentUnfit, ReportUnreadable, UsageError
from torchdelta.isolate.pool import Pool, Query
from torchdelta.isolate.supervisor import Outcome
from torchdelta.operators.isolated import WORKER
from torchdelta.records.case import require_seed
from torchdelta.records.codec import decode, encode
from torchdelta.records.failure import Failure
from torchdelta.records.operators import SCHEMA_VERSION, Sweep, SweepRow
from torchdelta.records.report import environment_without_torch
from torchdelta.records.strict_json import from_text, to_text
from torchdelta.records.verdict import Verdict

NAME = "swept.jsonl"
_TORCH = "torch"
_SCHEMA = "schema_version"


class SweepFile:
    """The rows of a sweep in a file of a directory: `swept` has them by operator and dtype, and `add` adds one.

    The file begins with a header: the version of torch, and `words`, the questions. With `resume`, rows of an earlier
    sweep are read first.
    """

    def __init__(self, directory: Path, words: Mapping[str, str], *, resume: bool) -> None:
        """Make the directory; write the header of a new file, or read the rows of one that is there.

        An empty file counts as new. UsageError if the file cannot be written, or if it is there and `resume` is False,
        is damaged, or has another torch or other questions in its header.
        """
        self._path = directory / NAME
        self._header = {_SCHEMA: SCHEMA_VERSION, _TORCH: environment_without_torch().torch, "words": dict(words)}
        self.swept: dict[tuple[str, str], SweepRow] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > 0:
                self._continue(resume=resume)
            else:
                self._append(self._header)
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror or error}; name another place") from error

    def add(self, swept: SweepRow) -> None:
        """Add a row to `swept`, in place of one with the same operator and dtype, and append it to the file.

        EnvironmentUnfit if the file cannot be written.
        """
        self.swept[swept.op, swept.dtype] = swept
        try:
            self._append(encode(swept))
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot write {self._path}: {error.strerror or error}. Make room, and go on by --resume"
            ) from error

    def _append(self, data: Any) -> None:
        """Append data to the file as one line of strict JSON."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_text(data) + "\n")

    def _continue(self, *, resume: bool) -> None:
        """Read the rows of an earlier sweep into `swept`, and cut an incomplete last line off the file.

        If even the header is incomplete, write it anew, because nothing was swept. UsageError without `resume`, if the
        file has no complete line and does not begin with `{`, if a line cannot be read, or if the header differs in its
        schema, its torch or its questions. Of two rows for one operator and dtype the later counts.
        """
        if not resume:
            raise UsageError(f"{self._path} has a sweep: continue it by --resume, or name another directory")
        text = self._path.read_bytes()
        complete = text.rfind(b"\n") + 1
        lines = text[:complete].decode(errors="replace").splitlines()
        if not lines and text.startswith(b"{"):  # the header itself was cut off: nothing was swept
            os.truncate(self._path, 0)
            self._append(self._header)
            return
        if not lines:
            raise UsageError(f"{self._path} is not a sweep: name another directory")
        self._require_same(self._read(lines[0], 1))
        for number, line in enumerate(lines[1:], start=2):
            try:
                swept = decode(SweepRow, self._read(line, number), "swept")
            except ReportUnreadable as error:
                raise UsageError(f"{self._path}, line {number}: {error}; remove the line, or the file") from error
            self.swept[swept.op, swept.dtype] = swept
        # a process that was killed while writing left half a line: that operator is checked again
        os.truncate(self._path, complete)

    def _read(self, line: str, number: int) -> dict[str, Any]:
        """Return the JSON object in line `number` as a dict; UsageError if it is not JSON or not an object."""
        try:
            data = from_text(line)
        except ValueError as error:
            raise UsageError(f"{self._path}, line {number}, is not JSON: remove the line, or the file") from error
        if not isinstance(data, dict):
            raise UsageError(f"{self._path}, line {number}, is not a record of a sweep: remove the line, or the file")
        return data

    def _require_same(self, header: Mapping[str, Any]) -> None:
        """Raise UsageError if the header of an earlier sweep has another schema, another torch or other questions."""
        if header.get(_SCHEMA) != SCHEMA_VERSION or not isinstance(header.get("words"), dict):
            raise UsageError(f"{self._path} is not a sweep that this torchdelta can continue: name another directory")
        before, now = _questions(header), _questions(self._header)
        for name in dict.fromkeys([*now, *before]):
            if before.get(name) != now.get(name):
                was, is_now = before.get(name) or "none", now.get(name) or "none"
                raise UsageError(
                    f"{self._path} was asked with {name} {was}, not {is_now}: ask the same, or name another directory"
                )


def _questions(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that must be the same to resume a sweep: the version of torch, and the words."""
    return {_TORCH: header.get(_TORCH), **header["words"]}


ALL = "all"
DTYPES = ("float32", "bfloat16", "complex64", "int64")
GRADIENTS: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
PROBES = (
    "schema",
    "repeat",
    "gradients",
    "registration",
    "backward",
    "derivative",
    "fake",
    "aot/static",
    "aot/dynamic/min-cut",
)
"""The probes of a sweep by default. Of the traces, two suffice: the partitioner does not depend on sizes."""
AT = " on "
"""Stands between probe and sample in the part that a worker reports."""
_READY_S = 180.0
_PULSE_S = 0.02
_WAITING = 2
"""Queries under way for each worker: it is never idle, and few have to be cancelled at an interruption."""

Tell = Callable[[int, int, str], None]
"""Gets the progress: how many operators are done, of how many, and the one that is under way."""


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Which operators a sweep checks, in which dtypes and on how many samples, and what it asks about them."""

    operators: tuple[str, ...] = (ALL,)
    """Names of the database, patterns such as `linalg.*`, or `all`."""
    dtypes: tuple[str, ...] = DTYPES
    samples: int = 2
    probes: tuple[str, ...] = ()
    """Beginnings of their names; by default those of a sweep, and every one of a backend that is named."""
    backends: tuple[str, ...] = ()
    policy: str | None = None
    gradients: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError if there is less than one sample an operator, or if the seed is not one."""
        require_seed(self.seed)
        if self.samples < 1:
            raise UsageError(f"at least one sample of an operator is checked, not {self.samples}")

    @property
    def asks(self) -> tuple[str, ...]:
        """The beginnings of the names of the probes that are asked: `probes`, or the default ones if it is empty.

        The default ones are `PROBES`, and with backends also those of backends.
        """
        return self.probes or (*PROBES, *(("backend",) if self.backends else ()))

    @property
    def words(self) -> dict[str, str]:
        """Every option of the sweep as text, by its name, for the header of the file and for the record.

        Lists are joined by commas, and `probes` are those that are asked, the default ones included.
        """
        return {
            "operators": ",".join(self.operators),
            "dtypes": ",".join(self.dtypes),
            "samples": str(self.samples),
            "probes": ",".join(self.asks),
            "backends": ",".join(self.backends),
            "policy": self.policy or "",
            "gradients": self.gradients,
            "seed": str(self.seed),
        }

    @property
    def questions(self) -> dict[str, Any]:
        """The keywords of `check_op` as plain data: probes, backends, policy and gradients.

        The probes are those of `asks`. `gradients` is True for "yes", False for "no", or "auto".
        """
        return {
            "probes": list(self.asks),
            "backends": list(self.backends),
            "policy": self.policy,
            "gradients": GRADIENTS[self.gradients],
        }

    def query(self, name: str, dtype: str) -> dict[str, Any]:
        """Return the request that `worker.sweep_operator` takes, about one operator in one dtype."""
        return {"op": name, "dtype": dtype, "samples": self.samples, "seed": self.seed, "words": self.questions}


def sweep(
    request: SweepRequest,
    *,
    out: Path | None = None,
    resume: bool = False,
    workers: int = 2,
    timeout_s: float = 180.0,
    memory_bytes: int | None = None,
    pool: Pool | None = None,
    task: str = WORKER,
    tell: Tell = lambda *_: None,
) -> Sweep:
    """Check operators of the database in workers; return a `Sweep` with their rows, in the order of the request.

    With `out`, each row is appended to a file in that directory; with `resume`, operators that have a row there are not
    checked again. A worker that dies, or exceeds `timeout_s` (for one operator and dtype) or `memory_bytes`, is a row
    too. A given `pool` stays open; without one, `workers` are started for this sweep. `workers` also bounds the queries
    under way. `task` is the module whose functions they run. `tell` gets the progress. Ctrl-C while operators are
    checked ends the sweep early, with the rows so far and a note. UsageError if the request makes no sense or if `out`
    cannot be used; EnvironmentUnfit if a row cannot be written; RuntimeError if a worker fails to read the database.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchdelta-sweep-") as nowhere:
        # before a worker starts, because a sweep that cannot be resumed is an error at once
        rows = SweepFile(out or Path(nowhere), request.words, resume=resume)
        with nullcontext(pool) if pool is not None else pool_for_sweep(workers, task) as running:
            tell(0, 0, "loading torch's database of operators")
            wanted = tuple(_wanted(request, _operators(running, task, request)))
            sweeper = _Sweeper(
                request=request, pool=running, rows=rows, task=task, timeout_s=timeout_s, memory_bytes=memory_bytes
            )
            notes = sweeper.run(wanted, workers, tell)
    swept = tuple(rows.swept[each] for each in wanted if each in rows.swept)
    return Sweep(
        swept=swept,
        total=len(wanted),
        environment=environment_without_torch(),
        words=request.words,
        notes=notes,
        seconds=time.monotonic() - began,
    )


def pool_for_sweep(workers: int = 2, task: str = WORKER) -> Pool:
    """Return a new pool whose workers import the database and compile once with aot_eager before the first query."""
    return Pool(workers=workers, preload=(f"{task}:get_ready",), warm="aot_eager")


@dataclass(frozen=True, kw_only=True)
class _Sweeper:
    """Keeps workers busy with queries until all operators have their rows."""

    request: SweepRequest
    pool: Pool
    rows: SweepFile
    task: str
    timeout_s: float
    memory_bytes: int | None

    def run(self, wanted: Sequence[tuple[str, str]], workers: int, tell: Tell) -> tuple[str, ...]:
        """Check the operators of `wanted` (name and dtype) that have no row yet, add their rows, and return notes.

        One note says how many had a row before, another how many have none because of Ctrl-C, which is not raised.
        Queries that are under way at an interruption or error are cancelled. At most `_WAITING` times `workers` queries
        are under way at once. `tell` gets the progress. EnvironmentUnfit if a row cannot be written; errors of
        `swept_of` are raised too.
        """
        before = sum(each in self.rows.swept for each in wanted)
        waiting = [each for each in wanted if each not in self.rows.swept]
        under_way: dict[tuple[str, str], Query] = {}
        notes = (f"{before} of them were swept before, and are not swept again",) if before else ()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < _WAITING * workers:
                    each = waiting.pop(0)
                    under_way[each] = self._submit(*each)
                for each in [each for each, query in under_way.items() if query.is_done()]:
                    self.rows.add(swept_of(under_way.pop(each).result(), *each))
                tell(len(wanted) - len(waiting) - len(under_way), len(wanted), " ".join(next(iter(under_way), ())))
                time.sleep(_PULSE_S)
        except KeyboardInterrupt:
            done = sum(each in self.rows.swept for each in wanted)
            notes = (*notes, f"interrupted: {len(wanted) - done} of {len(wanted)} were not swept")
        finally:
            for query in under_way.values():
                query.cancel()
        return notes

    def _submit(self, name: str, dtype: str) -> Query:
        """Submit the query about one operator in one dtype to the pool, and return it without waiting."""
        return self.pool.submit(
            f"{self.task}:sweep_operator",
            self.request.query(name, dtype),
            deadline_s=self.timeout_s,
            memory_bytes=self.memory_bytes,
        )


def swept_of(outcome: Outcome, name: str, dtype: str) -> SweepRow:
    """Return the row of one operator from its query's outcome: the worker's own, or one that says how it died.

    The verdict of a death is TIMED_OUT or CRASHED. `probe` and `sample` are then the part and the arguments that were
    under way, and no sample counts as checked. Raises what `Outcome.read` raises.
    """
    result = outcome.read(SweepRow, "swept", program=f"sweeping {name}")
    if not isinstance(result, Failure):
        return result
    verdict = Verdict.TIMED_OUT if result.kind == "timeout" else Verdict.CRASHED
    probe, _, sample = outcome.part.partition(AT)
    return SweepRow(
        op=name,
        dtype=dtype,
        samples=0,
        verdict=verdict,
        probes={probe: verdict} if sample else {},
        probe=probe,
        reason=result.message,
        sample=sample,
        seconds=outcome.seconds,
    )


def _operators(pool: Pool, task: str, request: SweepRequest) -> Mapping[str, Sequence[str]]:
    """Ask a worker for torch's database, and return the dtypes of each operator by its name.

    The worker also tries the questions of the request: UsageError if they make no sense. RuntimeError if the worker
    dies, takes too long, or raises an error that is not torchdelta's.
    """
    outcome = pool.ask(f"{task}:list_operators", {"words": request.questions}, deadline_s=_READY_S)
    database = "torch's database of operators"
    operators = outcome.read(dict[str, tuple[str, ...]], "operators", program=database)
    if isinstance(operators, Failure):
        raise RuntimeError(f"{database} cannot be read: {operators.message}\n{outcome.output}")
    return operators


def _wanted(request: SweepRequest, operators: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield (operator, dtype) for each query: the pairs that `request` names in which the operator supports the dtype.

    UsageError if a dtype is supported by no operator of the database, if a name is unknown, or if there is no such
    pair.
    """
    known = {dtype for dtypes in operators.values() for dtype in dtypes}
    for dtype in request.dtypes:
        if dtype not in known:
            there = ", ".join(sorted(known))
            raise UsageError(f"no operator of the database supports a dtype {dtype!r}; there are {there}")
    names = dict.fromkeys(name for word in request.operators for name in _named(word, operators))
    pairs = [(name, dtype) for name in names for dtype in dict.fromkeys(request.dtypes) if dtype in operators[name]]
    if not pairs:
        raise UsageError(f"{', '.join(names)} supports none of {', '.join(request.dtypes)}: name others by --dtypes")
    yield from pairs


def _named(word: str, operators: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the operators that `word` stands for: one name, a pattern such as `linalg.*`, or `all`.

    A word that is not a name stands for all names that match it as a pattern, or begin with it and a dot.
    UsageError, with near names, if there are none.
    """
    if word == ALL:
        return list(operators)
    if word in operators:
        return [word]
    # a name that is not an operator stands for its variants
    if matches := [name for name in operators if fnmatch.fnmatchcase(name, word) or name.startswith(f"{word}.")]:
        return matches
    near = difflib.get_close_matches(word, operators, n=3)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise UsageError(f"torch's database has no operator {word!r}{hint}")
