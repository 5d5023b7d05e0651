"""The result of a reduction: a small graph, the report of its check, and the script that shows the failure.

A failure that no graph shows has the user's own program as its result. A script is offered only if it fails in a clean
process: `MinifiedResult.with_script` falls back on larger results until one does.
"""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from torchdelta.errors import ReproUnwritable
from torchdelta.records.case import Case
from torchdelta.records.failure import Signature
from torchdelta.records.report import Reduction, Report, Repro
from torchdelta.records.signatures import keep_only
from torchdelta.repro import script
from torchdelta.repro.confirm import CleanProcess, begin
from torchdelta.repro.finding import Evidence, Finding, ProgramFinding
from torchdelta.repro.issue import issue_text

LOST = 0.02
"""The accepted chance that a script misses a flaky failure."""
HUNG_S = 30.0
"""How long a script waits for a candidate that hangs."""
CONFIRMED_S = 300.0
"""How long the run that confirms a script may take."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A script that is being run, under another name until it is finished or dropped."""

    path: Path
    """Its final path."""
    data: bool
    """Whether it has the user's data."""
    written: script.WrittenScript
    runner: CleanProcess

    def finish(self, *, deadline_s: float) -> Repro:
        """Wait for its run, move its files to their final paths, and return the path and whether the failure showed.

        A run that takes longer than `deadline_s`, counted from its start, does not show it.
        """
        showing = self.runner.wait(deadline_s=deadline_s)
        if self.written.tensors_path is not None:
            self.written.tensors_path.replace(self.path.with_suffix(".pt"))
        self.written.path.replace(self.path)
        return Repro(path=str(self.path), confirmed=showing.is_there)

    def drop(self) -> None:
        """End its run and remove its files, and the folders of copies that are empty then."""
        self.runner.end()
        for path in (self.written.path, self.written.tensors_path, *self.written.added_copies):
            if path is not None:
                path.unlink(missing_ok=True)
        folders = {folder for copy in self.written.added_copies for folder in copy.parents}
        own = self.path.resolve().parent
        for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
            if own in folder.parents and not any(folder.iterdir()):
                folder.rmdir()


@dataclass(frozen=True, kw_only=True)
class MinifiedResult(ABC):
    """A program that shows the failure, and the report of its check: a graph, or the user's own program."""

    case: Case
    report: Report
    signature: Signature
    reduction: Reduction | None = None
    """The costs of the reduction, or None if there was none."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the compiler that differ from torch's defaults."""
    also_seen: tuple[Signature, ...] = ()
    """Other failures that queries showed, and that were not followed."""
    notes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    """The memory that a worker was allowed to hold."""
    clean: CleanProcess | None = field(default=None, repr=False)
    """A process that waits for the script as long as this object lives."""
    draft: Draft | None = field(default=None, repr=False)
    """The script, if its run began during the reduction."""

    @property
    @abstractmethod
    def finding(self) -> Evidence:
        """The finding that a script has to show: this program, and the report without divergences of other signatures.

        A flaky failure is tried so often that the chance to miss it is at most `LOST`. A hang is given `HUNG_S`.
        """

    def larger(self) -> Iterator[MinifiedResult]:
        """Yield larger results that show the same failure, the smallest first; here none, but subclasses have some."""
        yield from ()

    def begin(self, path: str | os.PathLike[str], *, data: bool = True) -> Draft:
        """Write the script under a hidden name and begin to run it; return the draft, which may still be dropped.

        It runs in `clean` if that still waits for a script, or in a new process. Without `data`, random numbers replace
        the user's. Raise ReproUnwritable if no script of torch alone can show the failure.
        """
        path = Path(path)
        written = script.write(self.finding, path, data=data, under=f".{path.name}")
        return Draft(path=path, data=data, written=written, runner=begin(written.path, self.clean))

    def write(self, path: str | os.PathLike[str], *, data: bool = True, deadline_s: float = CONFIRMED_S) -> Repro:
        """Write a script that shows the failure with torch alone, as `with_script` does, and return path and outcome.

        Raise ReproUnwritable if there can be no such script.
        """
        return self.with_script(path, data=data, deadline_s=deadline_s)[1]

    def with_script(
        self, path: str | os.PathLike[str], *, data: bool = True, deadline_s: float = CONFIRMED_S
    ) -> tuple[MinifiedResult, Repro]:
        """Write a script and run it in a clean process; return the result that it is of, its path and the outcome.

        If the failure does not show there or there can be no script, larger results are tried, the smallest first, and
        the first whose script shows it is returned. If none does, the script of the smallest result that has one is
        written and run again, and that result is returned. Without `data`, random numbers replace the user's. Raise the
        first ReproUnwritable if there can be no script of any of them.
        """
        refusal: ReproUnwritable | None = None
        first: MinifiedResult | None = None
        tensors = Path(path).with_suffix(".pt")
        # a larger result is made only if the script before it did not fail
        for result in itertools.chain((self,), self.larger()):
            had_tensors = tensors.exists()
            try:
                repro = result._write(path, data=data, deadline_s=deadline_s)
            except ReproUnwritable as error:
                refusal = refusal or error
                continue
            if repro.confirmed:
                return result, repro
            first = first or result
            if not had_tensors:  # the next script may need none
                tensors.unlink(missing_ok=True)
        if first is None:
            assert refusal is not None
            raise refusal
        return first, first._write(path, data=data, deadline_s=deadline_s)

    def _write(self, path: str | os.PathLike[str], *, data: bool, deadline_s: float) -> Repro:
        """Write and run the script of this result alone; return its path and whether the failure showed.

        A `draft` of the same path and `data` whose run is not over is finished instead, and one of another path or
        `data` is dropped. Raise ReproUnwritable if no script of torch alone can show the failure.
        """
        draft = self.draft
        if draft is not None and (draft.path, draft.data) != (Path(path), data):
            draft.drop()
        if draft is None or draft.runner.is_over:
            draft = self.begin(path, data=data)
        return draft.finish(deadline_s=deadline_s)

    def issue(self, path: str | os.PathLike[str], *, data: bool = True) -> str:
        """Return the text of an issue with the script at that path, which was written with or without `data`.

        The script is read, so it must exist. Raise ReproUnwritable if no script of torch alone can show the failure.
        """
        return issue_text(self.finding, Path(path), data=data)

    def _words(self) -> dict[str, Any]:
        """Return the keyword arguments of a finding that do not depend on its kind.

        They are the case, the report without divergences of other signatures, the compiler's settings, the number of
        tries of a flaky failure, `HUNG_S` as deadline for a hang, and the memory limit if there is one.
        """
        rate = self.reduction.rate if self.reduction is not None else 1.0
        failure = self.report.failure
        limits: dict[str, Any] = {"deadline_s": HUNG_S} if failure is not None and failure.kind == "timeout" else {}
        if self.memory_bytes is not None:
            limits["memory_bytes"] = self.memory_bytes
        return {
            "case": self.case,
            "report": keep_only(self.report, self.signature),
            "tries": 1 if rate == 1.0 else math.ceil(math.log(LOST) / math.log(1.0 - rate)),
            "config": self.settings,
            **limits,
        }


@dataclass(frozen=True, kw_only=True)
class WholeProgram(MinifiedResult):
    """The user's own program, for a failure that no graph shows by itself."""

    program: str
    """`path/file.py:factory` or `package.module:factory`."""
    is_anew: bool = True
    """Whether the script imports the user's modules anew for each side."""

    @property
    def finding(self) -> ProgramFinding:
        """The finding that a script has to show."""
        return ProgramFinding(program=self.program, is_anew=self.is_anew, **self._words())

    def larger(self) -> Iterator[MinifiedResult]:
        """Yield this program once more with `is_anew` false, or nothing if it is false already.

        Its script then imports the user's modules only once, because modules that register operators cannot be imported
        twice.
        """
        if self.is_anew:
            yield replace(self, is_anew=False, draft=None)


@dataclass(frozen=True, kw_only=True)
class MinifiedGraph(MinifiedResult):
    """The smallest graph that a reduction found, and the report of its check."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    reduction: Reduction
    drawn: dict[int, str] = field(default_factory=dict)
    """For inputs that are random numbers instead of the user's, by place: the expression that draws them."""
    twin: GraphModule | None = None
    """A neighbour of the graph that passes."""
    keeps_names: bool = False
    """Whether the script's inputs keep the names that they have in the graph."""
    imports: tuple[str, ...] = ()
    """Modules that the script imports in any case."""
    registering: tuple[str, ...] = ()
    """Modules that may register the backend: the script imports them if it does not fail without them."""
    fallbacks: Callable[[], Iterator[MinifiedResult]] = field(default=lambda: iter(()), repr=False)
    """Returns the larger results of the same reduction, and then the user's program, if it has a name."""

    @property
    def finding(self) -> Finding:
        """The finding that a script has to show: this graph, and the report without divergences of another signature.

        A flaky failure is tried so often that the chance to miss it is at most `LOST`. A hang is given `HUNG_S`.
        """
        return Finding(
            graph=self.graph,
            inputs=self.inputs,
            inputs_from=self.drawn,
            keeps_names=self.keeps_names,
            imports=self.imports,
            **self._words(),
        )

    def larger(self) -> Iterator[MinifiedResult]:
        """Yield this graph with imports that may register a backend, then with its names kept, then the `fallbacks`.

        The first is left out if there are no such imports or some are made already, the second if names are kept
        already.
        """
        if self.registering and not self.imports:
            yield replace(self, imports=self.registering, draft=None)
        if not self.keeps_names:
            yield replace(self, keeps_names=True, draft=None)
        yield from self.fallbacks()
