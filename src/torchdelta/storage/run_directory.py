"""The directory of a run that keeps its results: whose run it is, that no other run writes into it, what is in it.

    out/run.json               the question of the run; written before any result
    out/.torchdelta.lock       locked while the run goes on
    out/earlier-1/             the results of an earlier run, moved away by the next

A run may continue what `run.json` says is its own, and nothing else: the results of another program, transform or set
of options are never taken for the run's own. Files that no run is known to have written are never touched: they are
refused. Start reading at `RunDirectory.__enter__`.

    with RunDirectory(out, question=RunQuestion(command="minify", case=case, level="dynamo"), names=REDUCTION) as run:
        run.is_continued       # whether results of the same question are there, and are to be continued
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from torchdelta.errors import UsageError
from torchdelta.records.case import DYNAMO, Case
from torchdelta.records.codec import decode, encode
from torchdelta.records.file_locks import open_locked, remove_locked
from torchdelta.records.strict_json import FileFormat, is_unfinished

_RUN = "run.json"
_LOCK = ".torchdelta.lock"
_FORMAT = FileFormat(kind="run", version=1, remedy="name another directory")


@dataclass(frozen=True, kw_only=True)
class RunQuestion:
    """What a run was asked: results of one question are never taken for those of another."""

    command: str
    case: Case
    level: str = DYNAMO
    """The level of the graphs that are made smaller."""

    def __str__(self) -> str:
        return f"{self.command} of {self.case.program} under {self.case.transform}"


@dataclass(frozen=True, kw_only=True)
class ResultNames:
    """The names that a run gives to its results, as regular expressions."""

    files: str
    directories: str


REDUCTION = ResultNames(files=r"journal\.json", directories=r"best-[0-9a-f]{8}|twin")
"""The results of `td.minify`."""
DIAGNOSIS = ResultNames(
    files=r"report\.json|found\.json|\.?repro(-\d+)?\.(py|pt|md)|\w+\.traceback\.txt",
    directories=r"minify(-\d+)?|repro(-\d+)?_code",
)
"""The results of `torchdelta minify` and `torchdelta diagnose`, unfinished scripts included."""


class RunDirectory:
    """The directory of one run: `with` makes and locks it, and tells whether an earlier run is continued."""

    def __init__(self, path: Path, *, question: RunQuestion, names: ResultNames, resume: bool = False) -> None:
        """Store the settings. With `resume`, results of the same question are continued instead of moved away."""
        self.path, self._question, self._names, self._resume = path, question, names, resume
        self.is_continued = False
        self.notes: tuple[str, ...] = ()
        """Where the results of an earlier run were moved to, if there were any."""
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> RunDirectory:
        """Make and lock the directory, move the results of an earlier run away or continue them; return this object.

        `is_continued` and `notes` tell which. UsageError if the directory cannot be made or written to, if another run
        has locked it, if it has results without `run.json`, or something of another kind under the name of a result, or
        if `resume` is set and the earlier run was asked something else. ReportUnreadable if `run.json` is damaged or
        not ours.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(self.path / _LOCK)
        except OSError as error:
            raise UsageError(f"cannot write into {self.path}: {error.strerror or error}; name another place") from error
        if self._lock is None:
            raise UsageError(
                f"another run of torchdelta is writing into {self.path}: wait until it has ended, or name another place"
            )
        try:
            self._take_over()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the lock and remove its file; the results stay."""
        self._unlock()

    def _unlock(self) -> None:
        """End the lock and remove its file."""
        assert self._lock is not None
        remove_locked(self._lock)
        self._lock = None

    def _take_over(self) -> None:
        """With `resume`, continue the earlier run: set `is_continued`. Else move its results away and write `run.json`.

        Without an earlier run, only `run.json` is written. Unfinished files of an earlier run are removed. Raise
        UsageError if there are results without `run.json`, or if the run to continue was asked something else.
        """
        results = self._results()
        run = self.path / _RUN
        if run.exists():
            earlier: RunQuestion = decode(RunQuestion, _FORMAT.read(run), _RUN)
            self._sweep_unfinished()
            if self._resume:
                if earlier != self._question:
                    raise UsageError(
                        f"{self.path} is about {earlier}, or was asked with other options: resume with the same ones, "
                        "or name another directory"
                    )
                self.is_continued = True
                return
            self._move_away([*results, run])
        elif results:
            listed = ", ".join(path.name for path in results)
            raise UsageError(
                f"{self.path} has files that no run of torchdelta is known to have written ({listed}): "
                "name another directory, or move them away"
            )
        _FORMAT.write(run, encode(self._question), indent=1)

    def _results(self) -> list[Path]:
        """Return the paths in the directory that have names of results, sorted.

        UsageError if one of them is a link, a directory in place of a file, or the other way around: no run made that.
        """
        results = []
        for path in sorted(self.path.iterdir()):
            is_file = re.fullmatch(self._names.files, path.name) is not None
            if is_file or re.fullmatch(self._names.directories, path.name):
                if path.is_symlink() or path.is_dir() == is_file:
                    kind = "a file" if is_file else "a directory"
                    raise UsageError(f"{path} is not {kind} that torchdelta wrote: name another directory")
                results.append(path)
        return results

    def _move_away(self, paths: list[Path]) -> None:
        """Move results and `run.json`, the last of `paths`, to a new directory `earlier-N`, and set `notes` to say so.

        If `run.json` is the only one, it is removed instead, and `notes` stays as it is. UsageError if they cannot be
        moved; OSError if `run.json` cannot be removed.
        """
        *results, run = paths
        if not results:
            run.unlink()
            return
        number = 1 + max((int(match[1]) for match in map(_earlier_number, self.path.iterdir()) if match), default=0)
        place = self.path / f"earlier-{number}"
        try:
            place.mkdir()
            for path in paths:
                path.rename(place / path.name)
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"cannot move the results of an earlier run to {place}: {why}") from error
        self.notes = (f"the results of an earlier run are in {place}",)

    def _sweep_unfinished(self) -> None:
        """Remove the files here and in `minify*` that a run was still writing when it was killed."""
        for path in [*self.path.iterdir(), *self.path.glob("minify*/*")]:
            if is_unfinished(path):
                path.unlink(missing_ok=True)


def _earlier_number(path: Path) -> re.Match[str] | None:
    """Return the match of a name `earlier-N`, whose first group is N; None for any other name."""
    return re.fullmatch(r"earlier-(\d+)", path.name)
