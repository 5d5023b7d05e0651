"""Check, locate, minify, repro: each step builds on the one before, and keeps what it found if a later one fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchdelta._torch.compile import settings
from torchdelta.check.check import Check
from torchdelta.check.isolated import check_isolated
from torchdelta.check.prepare import prepare
from torchdelta.errors import EnvironmentUnfit, NothingToMinify, ReproUnwritable, TorchDeltaError, UsageError
from torchdelta.isolate.pool import Pool
from torchdelta.locate.isolated import WORKER as LOCATE_WORKER
from torchdelta.locate.isolated import locate_isolated
from torchdelta.locate.locator import Locator
from torchdelta.minify.journal import Journal
from torchdelta.minify.minifier import TIMEOUT_S, Minifier
from torchdelta.minify.queries import plain_settings, spec_of
from torchdelta.minify.reducer import Budget
from torchdelta.minify.result import MinifiedGraph
from torchdelta.minify.workers import pool_for
from torchdelta.records.case import DYNAMO
from torchdelta.records.codec import read_report, write_report
from torchdelta.records.location import Location
from torchdelta.records.recording import recording_of
from torchdelta.records.report import Culprit, Report
from torchdelta.records.signatures import signatures_of
from torchdelta.records.verdict import Verdict

REPORT, REPRO = "report.json", "repro.py"
FOUND = "found.json"
"""What check and locate said, for who goes on from there."""


@dataclass(kw_only=True)
class Diagnosis:
    """One diagnosis; `run` answers it and leaves its directory behind."""

    program: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    words: dict[str, Any]
    """What else `torchdelta.check` is told."""
    out: Path
    timeout_s: float = TIMEOUT_S
    memory_bytes: int | None = None
    budget: Budget = field(default_factory=Budget)
    match: str | None = None
    level: str = DYNAMO
    with_data: bool = True
    with_issue: bool = False
    is_resumed: bool = False
    """Whether to go on with what is in the directory."""
    does_all: bool = False
    """Whether every group of failures gets a script, and not only the first."""
    progress: Callable[[str], None] = lambda _: None
    workers: Pool | None = None
    """Workers that are there already."""
    notes: list[str] = field(default_factory=list)
    found: Report | None = None
    """What the check said."""
    minified: list[MinifiedGraph] = field(default_factory=list)

    def run(self) -> Report:
        """Diagnose; what is the user's or the machine's fault is raised, everything else is on the report."""
        self.out.mkdir(parents=True, exist_ok=True)
        transform = self.words.get("transform")
        begun = (
            nullcontext(self.workers)
            if self.workers is not None
            else pool_for(spec_of(transform), preload=(LOCATE_WORKER,))
        )
        with begun as self.pool:
            self.check = self._prepared()
            return self._diagnosed()

    def _diagnosed(self) -> Report:
        report = self._found_before() or self._checked()
        self._keep(report)
        if not report.verdict.is_failure:
            return report
        if not report.culprits:
            report = self._step("locate", report, self._located)
        write_report(report, self.out / FOUND)
        report = self._step("minify", report, self._reproduced)
        report = replace(report, notes=tuple(dict.fromkeys((*report.notes, *self.notes))))
        self._keep(report)
        return report

    def _found_before(self) -> Report | None:
        """Return what an earlier diagnosis of the same case left in the directory."""
        path = self.out / FOUND
        if not self.is_resumed or not path.exists():
            return None
        report = read_report(path)
        if report.case != self.check.case:
            raise UsageError(
                f"{path} is about {report.case.program} under {report.case.transform}, asked otherwise: "
                "resume with the same words, or name another directory"
            )
        return report

    def _step(self, name: str, report: Report, step: Callable[[Report], Report]) -> Report:
        """Take one step more; where it fails, what was found so far stands, and says so."""
        self.progress(name)
        try:
            found = step(report)
        except (UsageError, EnvironmentUnfit):
            raise
        except TorchDeltaError as error:
            self.notes.append(f"{name}: {error}")
            return report
        except Exception as error:  # a mistake of ours must not cost the user what was found before it
            self.notes.append(f"{name} failed by a mistake of torchdelta's own: {type(error).__name__}: {error}")
            (self.out / f"{name}.traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
            return report
        self._keep(found)
        return found

    def _prepared(self) -> Check:
        return prepare(self.program, self.args, self.kwargs, **{**self.words, "progress": self.progress})

    @property
    def _is_named(self) -> bool:
        """Whether another process can build all of it again."""
        extras = (self.words.get(word) for word in ("optimizer", "loss"))
        has_names = all(extra is None or isinstance(extra, str) for extra in extras)
        return has_names and isinstance(self.program, str) and isinstance(self.words.get("transform"), str)

    def _checked(self) -> Report:
        """Check where a crash does no harm: a named program as a whole, a live one by its graphs first."""
        if isinstance(self.program, str) and self._is_named:
            seen = check_isolated(
                self.program,
                self.words,
                self.check.case,
                timeout_s=self.timeout_s,
                memory_bytes=self.memory_bytes,
                settings=plain_settings(settings.changed_settings()),
                pool=self.pool,
                progress=self.progress,
            )
            return seen.report
        deadly = self._minifying().died() if spec_of(self.words.get("transform")) is not None else None
        return deadly if deadly is not None else self.check.run()

    def _located(self, report: Report) -> Report:
        if report.verdict is not Verdict.DIVERGED:
            return report
        if isinstance(self.program, str) and self._is_named:
            location = locate_isolated(
                self.program,
                self.words,
                pool=self.pool,
                timeout_s=self.timeout_s,
                memory_bytes=self.memory_bytes,
                settings=plain_settings(settings.changed_settings()),
                progress=self.progress,
            )
        else:
            location = Locator(check=self._prepared()).run()
        return with_location(report, location)

    def _minifying(self, culprit: Culprit | None = None, number: int = 1) -> Minifier:
        out = self.out / ("minify" if number == 1 else f"minify-{number}")
        return Minifier(
            check=self._prepared(),
            transform=self.words.get("transform"),
            timeout_s=self.timeout_s,
            memory_bytes=self.memory_bytes,
            budget=self.budget,
            match=self.match,
            level=self.level,
            out=out,
            is_resumed=self.is_resumed and Journal(directory=out).is_there,
            culprit=culprit,
            expected=signatures_of(self.found) if self.found is not None else (),
            imports=module_of(self.program),
            pool=self.pool,
            script=self._script(number),
            with_data=self.with_data,
            tell=lambda progress: self.progress(f"minify: {progress}"),
        )

    def _reproduced(self, report: Report) -> Report:
        self.found = report
        groups: Sequence[Culprit | None] = groups_of(report.culprits) or [None]
        if len(groups) > 1 and not self.does_all:
            self.notes.append(
                f"{len(groups)} operations go wrong by themselves: the first was minified, --all does each"
            )
            groups = groups[:1]
        for number, culprit in enumerate(groups, 1):
            try:
                small = self._minifying(culprit, number).run()
            except NothingToMinify as error:
                if number == 1:
                    raise
                self.notes.append(str(error))
                continue
            self.minified.append(small)
            report = self._written(report, small, number)
        return report

    def _written(self, report: Report, small: MinifiedGraph, number: int) -> Report:
        self.notes += small.notes
        if small.also_seen:
            self.notes.append(f"also seen, and not followed: {'; '.join(map(str, small.also_seen))}")
        if number == 1:
            report = replace(report, reduction=small.reduction)
            self._keep(report)
        self.progress("repro")
        path = self._script(number)
        try:
            repro = small.write(path, data=self.with_data)
        except ReproUnwritable as error:
            self.notes.append(f"there is no script: {error}")
            return report
        if not repro.confirmed:
            self.notes.append(f"{path.name} did not show the failure in a clean process")
        if self.with_issue:
            path.with_suffix(".md").write_text(small.issue(path, data=self.with_data), encoding="utf-8")
        return replace(report, repro=repro) if number == 1 else report

    def _script(self, number: int) -> Path:
        return self.out / (REPRO if number == 1 else f"repro-{number}.py")

    def _keep(self, report: Report) -> None:
        write_report(report, self.out / REPORT)


def with_location(report: Report, location: Location) -> Report:
    """Return the report with what a search found."""
    return replace(
        report,
        culprits=location.culprits,
        coverage=location.coverage,
        notes=tuple(dict.fromkeys((*report.notes, *location.notes))),
    )


def groups_of(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Return the first culprit of each reason: one operation that is wrong in many places is one reason."""
    found: dict[tuple[str, str | None], Culprit] = {}
    for culprit in culprits:
        found.setdefault((culprit.op, culprit.stage), culprit)
    return list(found.values())


def module_of(program: object) -> tuple[str, ...]:
    """Return where a named program is defined: operators that its graphs call may be, too."""
    if not isinstance(program, str):
        return ()
    return (program if recording_of(program) is not None else program.rpartition(":")[0],)
