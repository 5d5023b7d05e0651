"""The result of a reduction: a small graph, the report of its check, and the script that shows the failure."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from torchdelta.records.case import Case
from torchdelta.records.failure import Signature
from torchdelta.records.report import Reduction, Report, Repro
from torchdelta.records.signatures import keep_only
from torchdelta.repro import script
from torchdelta.repro.confirm import CleanProcess, begin
from torchdelta.repro.finding import Finding
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
        """End its run and remove its files."""
        self.runner.end()
        for path in (self.written.path, self.written.tensors_path, *self.written.added_copies):
            if path is not None:
                path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class MinifiedGraph:
    """The smallest graph that a reduction found, and the report of its check."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    case: Case
    report: Report
    signature: Signature
    reduction: Reduction
    drawn: dict[int, str] = field(default_factory=dict)
    """For inputs that are random numbers instead of the user's, by place: the expression that draws them."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the compiler that differ from torch's defaults."""
    also_seen: tuple[Signature, ...] = ()
    """Other failures that queries showed, and that were not followed."""
    twin: GraphModule | None = None
    """A neighbour of the graph that passes."""
    notes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    """The memory that a worker was allowed to hold."""
    clean: CleanProcess | None = field(default=None, repr=False)
    """A process that waits for the script as long as this object lives."""
    draft: Draft | None = field(default=None, repr=False)
    """The script, if its run began during the reduction."""

    def begin(self, path: str | os.PathLike[str], *, data: bool = True) -> Draft:
        """Write the script under a hidden name and begin to run it; return the draft, which may still be dropped.

        Without `data`, random numbers replace the user's. Raise ReproUnwritable if no script of torch alone can show
        the failure.
        """
        path = Path(path)
        written = script.write(self.finding, path, data=data, under=f".{path.name}")
        return Draft(path=path, data=data, written=written, runner=begin(written.path, self.clean))

    def write(self, path: str | os.PathLike[str], *, data: bool = True, deadline_s: float = CONFIRMED_S) -> Repro:
        """Write a script that shows the failure with torch alone, run it in a clean process, and return the result.

        The result has the path, and whether the failure showed; a script that does not show it is kept. An unfinished
        `draft` of the same path and `data` is finished instead of a new run, and any other is dropped. Without `data`,
        random numbers replace the user's. Raise ReproUnwritable if there can be no such script.
        """
        draft = self.draft
        if draft is not None and (draft.path, draft.data) != (Path(path), data):
            draft.drop()
        if draft is None or draft.runner.is_over:
            draft = self.begin(path, data=data)
        return draft.finish(deadline_s=deadline_s)

    def issue(self, path: str | os.PathLike[str], *, data: bool = True) -> str:
        """Return the text of an issue with the script at that path, which was written with or without `data`."""
        return issue_text(self.finding, Path(path), data=data)

    @property
    def finding(self) -> Finding:
        """The finding that a script has to show: this graph, and the report without divergences of another signature.

        A flaky failure is tried so often that the chance to miss it is at most `LOST`. A hang is given `HUNG_S`.
        """
        rate = self.reduction.rate
        failure = self.report.failure
        limits: dict[str, Any] = {"deadline_s": HUNG_S} if failure is not None and failure.kind == "timeout" else {}
        if self.memory_bytes is not None:
            limits["memory_bytes"] = self.memory_bytes
        return Finding(
            graph=self.graph,
            inputs=self.inputs,
            case=self.case,
            report=keep_only(self.report, self.signature),
            tries=1 if rate == 1.0 else math.ceil(math.log(LOST) / math.log(1.0 - rate)),
            config=self.settings,
            **limits,
            inputs_from=self.drawn,
        )
