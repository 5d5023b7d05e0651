"""Check, locate, minify, repro: the whole way from a failing program to one small script.

Each step builds on the results of the one before it, and keeps its own if a later step fails. `locate` gets the report
of the check, and `minify` the graphs that were captured on the way, so no check and no compile of the candidate is
repeated. `Diagnosis.run` is where to start reading.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torchdelta._torch.compile import settings
from torchdelta._torch.process import runtime
from torchdelta.check import exceptions
from torchdelta.check.check import Check
from torchdelta.check.graphs import GraphRecorder, ProgramGraphs
from torchdelta.check.isolated import check_isolated
from torchdelta.check.prepare import prepare
from torchdelta.errors import (
    EnvironmentUnfit,
    NothingToMinify,
    ProgramError,
    ReportUnreadable,
    ReproUnwritable,
    TorchDeltaError,
    UsageError,
)
from torchdelta.isolate.pool import Pool
from torchdelta.locate.isolated import WORKER as LOCATE_WORKER
from torchdelta.locate.isolated import locate_isolated
from torchdelta.locate.locator import Locator
from torchdelta.minify.capture import ProgramSubjects, capture_here, capture_isolated, read_captured
from torchdelta.minify.journal import Journal
from torchdelta.minify.minifier import Minifier
from torchdelta.minify.queries import spec_of
from torchdelta.minify.result import MinifiedResult
from torchdelta.minify.warm_workers import pool_for
from torchdelta.records.case import DYNAMO, CheckOptions, SearchLimits, case_of
from torchdelta.records.codec import read_report, write_report
from torchdelta.records.location import Location
from torchdelta.records.recording import recording_of
from torchdelta.records.report import Culprit, Report, compares_exceptions
from torchdelta.records.signatures import signatures_of
from torchdelta.records.strict_json import write_file
from torchdelta.records.verdict import Verdict
from torchdelta.storage.run_directory import DIAGNOSIS, RunDirectory, RunQuestion

REPORT, REPRO = "report.json", "repro.py"
FOUND = "found.json"
"""The report after check and locate, from which a resumed diagnosis continues."""


@dataclass(kw_only=True)
class Diagnosis:
    """One diagnosis; `run` answers it, and writes its results to the directory `out`."""

    program: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    options: CheckOptions
    """Complete options of the check."""
    out: Path
    limits: SearchLimits = field(default_factory=SearchLimits)
    with_data: bool = True
    with_issue: bool = False
    is_resumed: bool = False
    """Whether to continue from the results in the directory."""
    does_all: bool = False
    """Whether every group of failures gets a script, and not only the first."""
    progress: Callable[[str], None] = lambda _: None
    workers: Pool | None = None
    """A pool that was started earlier; None starts one."""
    notes: list[str] = field(default_factory=list)
    report: Report | None = None
    """The report after check and locate."""
    captured: ProgramSubjects | None = None
    """The graphs of the program, once a step has captured them."""
    minified: list[MinifiedResult] = field(default_factory=list)
    issues: list[Path] = field(default_factory=list)
    """The texts of issues that were written."""

    def run(self) -> Report:
        """Check the program; only if it fails, also locate, minify and write the script; return the report.

        The report is written to the directory `out` too, which is made. UsageError, EnvironmentUnfit, and errors of
        loading or checking the program are raised; other errors of locating and minifying become notes on the report.
        """
        question = RunQuestion(command="diagnose", case=case_of(self.program, self.options), level=self.limits.level)
        pool = (
            nullcontext(self.workers)
            if self.workers is not None
            else pool_for(spec_of(self.options.transform), preload=(LOCATE_WORKER,))
        )
        directory = RunDirectory(self.out, question=question, names=DIAGNOSIS, resume=self.is_resumed)
        with directory, pool as self.pool, runtime.preserved():
            self.notes += directory.notes
            return self._run_steps()

    @cached_property
    def _check_here(self) -> Check:
        """The check of a program that has to run in this process; building it loads the program."""
        return prepare(self.program, self.args, self.kwargs, options=self.options, progress=self.progress)

    @property
    def _named(self) -> str | None:
        """The name of the program if workers can load it and its options, and so no code of it runs in this process."""
        return self.program if isinstance(self.program, str) and self.options.is_named else None

    def _run_steps(self) -> Report:
        """Check, locate and minify, and return the report; after a check that did not fail, return its report at once.

        `report.json` is written on the way, and `found.json` before minifying. The check is left out if there is a
        report of an earlier diagnosis to resume, and locating if the report has culprits already. `notes` go onto
        the report.
        """
        report = self._read_earlier() or self._check()
        report = replace(report, notes=tuple(dict.fromkeys((*report.notes, *self.notes))))
        self._keep(report)
        if not report.verdict.is_failure:
            return report
        if not report.culprits:
            report = self._take_step("locate", report, self._locate)
        write_report(report, self.out / FOUND)
        report = self._take_step("minify", report, self._reproduce)
        report = replace(report, notes=tuple(dict.fromkeys((*report.notes, *self.notes))))
        self._keep(report)
        return report

    def _read_earlier(self) -> Report | None:
        """Return the report in `found.json` of an earlier diagnosis, or None if there is none or `is_resumed` is False.

        Also None if a SIGKILL ended the process of the earlier check, because the user or the system may have sent it.
        ReportUnreadable if the file cannot be read. That it is about the same case is known from the directory.
        """
        path = self.out / FOUND
        if not (self.is_resumed and path.exists()):
            return None
        report = read_report(path)
        is_killed = report.failure is not None and (report.failure.kind, report.failure.type) == ("signal", "SIGKILL")
        return None if is_killed else report

    def _take_step(self, name: str, report: Report, step: Callable[[Report], Report]) -> Report:
        """Call `step` with the report, write the report that it returns to `report.json`, and return that.

        UsageError and EnvironmentUnfit pass through. After any other Exception `report` itself is returned and a note
        is added; unless it is a TorchDeltaError, its traceback becomes a file in the directory. `name` is the step's
        name.
        """
        self.progress(name)
        try:
            extended = step(report)
        except (UsageError, EnvironmentUnfit):
            raise
        except TorchDeltaError as error:
            self.notes.append(f"{name}: {error}")
            return report
        except Exception as error:  # a mistake of ours must not cost the user the results of the steps before
            self.notes.append(f"{name} failed by a mistake of torchdelta's own: {type(error).__name__}: {error}")
            with suppress(OSError):  # a full disk may be the reason
                (self.out / f"{name}.traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
            return report
        self._keep(extended)
        return extended

    @property
    def _settings(self) -> dict[str, Any]:
        """The compiler's settings that were changed in this process and that a worker has to set too, by name."""
        return settings.plain_settings(settings.changed_settings())

    def _check(self) -> Report:
        """Check the program where a crash does no harm, if possible, and return the report.

        A named program with named options is checked in a worker, and any other in this process. In the latter case
        workers check its graphs first, if they can import the transform. The report of the first graph that ends its
        worker, hangs or takes too much memory is then returned instead. Graphs that were captured for that are kept in
        `captured`.
        """
        if self._named is not None:
            return check_isolated(
                self._named,
                self.options,
                timeout_s=self.limits.timeout_s,
                memory_bytes=self.limits.memory_bytes,
                settings=self._settings,
                pool=self.pool,
                progress=self.progress,
            ).report
        if spec_of(self.options.transform) is not None:
            minifier = self._minifier()
            death = minifier.report_death()
            self.captured = minifier.captured
            if death is not None:
                return death
        return exceptions.run(self._check_here)

    def _locate(self, report: Report) -> Report:
        """Search for culprits, and return the report with those that were found; unchanged if it is not DIVERGED.

        It gets coverage and notes of the search too; its verdict stays. A named program with named options is searched
        in a worker, and any other in this process. At the level `dynamo`, graphs that the search captures become
        `captured`, if there are none yet and any of them computes.
        """
        if report.verdict is not Verdict.DIVERGED:
            return report
        needs_graphs = self.captured is None and self.limits.level == DYNAMO
        captured: ProgramGraphs | None = None
        if self._named is not None:
            with tempfile.TemporaryDirectory(prefix="graphs-", dir=self.pool.directory) as directory:
                location = locate_isolated(
                    self._named,
                    self.options,
                    report,
                    pool=self.pool,
                    limits=self.limits,
                    settings=self._settings,
                    graphs=Path(directory) if needs_graphs else None,
                    progress=self.progress,
                )
                captured = _read_if_possible(self._named, Path(directory))
        else:
            recorder = GraphRecorder() if needs_graphs else None
            location = Locator(check=self._check_here, report=report, recorder=recorder).run()
            captured = ProgramGraphs.captured_here(recorder.captured) if recorder is not None else None
        if self.captured is None and captured is not None and (of_graphs := ProgramSubjects.of(captured)).subjects:
            self.captured = of_graphs
        return with_location(report, location)

    def _minifier(self, culprit: Culprit | None = None, number: int = 1) -> Minifier:
        """Return a minifier for one group of failures, not run yet; it begins with the culprit if there is one.

        `number` counts groups from 1 and names the script and the directory, which is `minify`, then `minify-2` and so
        on. The minifier resumes if the diagnosis does and that directory has a journal.
        """
        out = self.out / ("minify" if number == 1 else f"minify-{number}")
        return Minifier(
            case=case_of(self.program, self.options),
            capture=self._capture,
            transform=self.options.transform,
            limits=self.limits,
            captured=self.captured,
            out=out,
            is_resumed=self.is_resumed and Journal(directory=out).is_there,
            culprit=culprit,
            expected=signatures_of(self.report) if self.report is not None else (),
            # a script of the whole program shows its first failure
            program=self.program if isinstance(self.program, str) and number == 1 else None,
            options=self.options,
            report=self.report,
            imports=module_of(self.program),
            pool=self.pool,
            script=self._script(number),
            with_data=self.with_data,
            tell=lambda progress: self.progress(f"minify: {progress}"),
        )

    def _capture(self) -> ProgramSubjects:
        """Return the graphs of the program, captured where a crash does no harm, if possible."""
        if self._named is None:
            return capture_here(self._check_here, self.limits.level)
        return capture_isolated(self._named, self.options, limits=self.limits, settings=self._settings, pool=self.pool)

    def _reproduce(self, report: Report) -> Report:
        """Minify each group of failures and write its script; return the report with the first reduction and script.

        A group is the culprits of one operation and stage; without culprits there is one group. Without `does_all` only
        the first group is done, with a note if there are more. Results are appended to `minified`, and captured graphs
        are kept in `captured`. If the program raises eagerly, or no graph shows the failure of the first group, the
        script is the program itself; NothingToMinify if a script cannot build it. An error of the first group is
        raised. A TorchDeltaError of a later group becomes a note, except UsageError and EnvironmentUnfit.
        """
        self.report = report
        if compares_exceptions(report):
            whole = self._minifier().whole_program()
            if whole is None:
                raise NothingToMinify("a difference of exceptions is not made smaller: the program itself is the repro")
            self.notes.append("a difference of exceptions is not made smaller: the script is the program itself")
            self.minified.append(whole)
            return self._write_script(report, whole, 1)
        groups: Sequence[Culprit | None] = groups_of(report.culprits) or [None]
        if len(groups) > 1 and not self.does_all:
            self.notes.append(
                f"{len(groups)} operations go wrong by themselves: the first was minified, --all does each"
            )
            groups = groups[:1]
        for number, culprit in enumerate(groups, 1):
            minifier = self._minifier(culprit, number)
            try:
                small = minifier.run()
            except TorchDeltaError as error:
                # the results of the groups before must not be lost
                if number == 1 or isinstance(error, (UsageError, EnvironmentUnfit)):
                    raise
                self.notes.append(str(error))
                continue
            finally:
                self.captured = minifier.captured
            self.minified.append(small)
            report = self._write_script(report, small, number)
        return report

    def _write_script(self, report: Report, small: MinifiedResult, number: int) -> Report:
        """Write the script of one reduction, and with `with_issue` the text of an issue beside it; return the report.

        `number` is that of the group, from 1. For 1 the report gets the reduction, and the script if there is one; for
        others it is returned unchanged. If no script can be written, or it does not show the failure in a clean
        process, a note says so, and there is no issue; in the latter case the script stays. The notes of `small` are
        added to `notes`, and the path of the issue to `issues`.
        """
        path = self._script(number)
        if small.also_seen:
            self.notes.append(f"also seen, and not followed: {'; '.join(map(str, small.also_seen))}")
        if number == 1:
            report = replace(report, reduction=small.reduction)
            self._keep(report)
        self.progress("repro")
        try:
            small, repro = small.with_script(path, data=self.with_data)
        except ReproUnwritable as error:
            self.notes += (*small.notes, f"there is no script: {error}")
            return report
        self.notes += small.notes
        if number == 1:
            report = replace(report, reduction=small.reduction)
        if not repro.confirmed:
            no_issue = ", so no issue was written" if self.with_issue else ""
            self.notes.append(f"{path.name} did not show the failure in a clean process{no_issue}")
        elif self.with_issue:
            write_file(path.with_suffix(".md"), small.issue(path, data=self.with_data))
            self.issues.append(path.with_suffix(".md"))
        return replace(report, repro=repro) if number == 1 else report

    def _script(self, number: int) -> Path:
        """Return the path of the script of a group: `repro.py` for the first, then `repro-2.py` and so on."""
        return self.out / (REPRO if number == 1 else f"repro-{number}.py")

    def _keep(self, report: Report) -> None:
        """Write a report to `report.json` in the directory."""
        write_report(report, self.out / REPORT)


def _read_if_possible(program: str, directory: Path) -> ProgramGraphs | None:
    """Return the graphs of a program that a worker wrote, or None if they cannot be read: they are captured again."""
    try:
        return read_captured(program, directory)
    except (ReportUnreadable, ProgramError):
        return None


def with_location(report: Report, location: Location) -> Report:
    """Return a copy of the report with the location's culprits and coverage, and with the notes of both, each once."""
    return replace(
        report,
        culprits=location.culprits,
        coverage=location.coverage,
        notes=tuple(dict.fromkeys((*report.notes, *location.notes))),
    )


def groups_of(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Return the first culprit of each operation and stage: one operation that is wrong in many places is one bug."""
    groups: dict[tuple[str, str | None], Culprit] = {}
    for culprit in culprits:
        groups.setdefault((culprit.op, culprit.stage), culprit)
    return list(groups.values())


def module_of(program: object) -> tuple[str, ...]:
    """Return the module or file of a named program in a tuple, to be imported for operators that its graphs call.

    Of a recorded directory it is the directory itself; of a live program the tuple is empty.
    """
    if not isinstance(program, str):
        return ()
    return (program if recording_of(program) is not None else program.rpartition(":")[0],)
