"""What every face on a terminal writes alike: verdicts, numbers, counts, what was asked, and remarks with labels.

Culprits on a terminal: which operation, where in the user's code, and by how much it is wrong by itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.case import VALUES, Case
from torchdelta.records.comparison import Scalar
from torchdelta.records.location import Location
from torchdelta.records.report import Culprit, Report
from torchdelta.records.verdict import Verdict

STYLE = {
    Verdict.EQUIVALENT: "green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.DIVERGED: "red",
    Verdict.TIMED_OUT: "magenta",
    Verdict.CRASHED: "magenta",
}
MARK = {
    Verdict.EQUIVALENT: "=",
    Verdict.INCONCLUSIVE: "?",
    Verdict.DIVERGED: "≠",
    Verdict.TIMED_OUT: "!",
    Verdict.CRASHED: "!",
}
# below it a table leaves less room for a name than most names need
TABLE_COLUMNS = 96

Remark = tuple[str, str | Text]
"""A label, and what there is to say."""


def console_for_stdout() -> Console:
    """Return a console on stdout; a pipe or a log file has no width to fold at."""
    return Console(width=None if sys.stdout.isatty() else 160)


def headline(report: Report | Location) -> RenderableType:
    """Return the verdict with what it is about, and what was asked."""
    case = report.case
    verdict = (report.verdict.value, f"bold {STYLE[report.verdict]}")
    what = case.program if case.stages == (VALUES,) else f"{case.program} under {case.transform}"
    asked = ", ".join([*_asked(case), f"torch {report.environment.torch}"])
    return Group(Text.assemble(verdict, f"  {what}"), Text(f"  {asked}", style="dim"))


def _asked(case: Case) -> Iterator[str]:
    yield from (f"{name}={value}" for name, value in case.options.items())
    yield f"policy {case.policy}"
    if case.ignore:
        yield f"ignoring {' and '.join(case.ignore)}"
    if case.strict:
        yield f"strict about {' and '.join(case.strict)}"
    if case.iterations > 1:
        yield f"{case.iterations} iterations"
    if "steps" in case.stages:
        yield f"{count(case.steps, 'step')} of {case.optimizer}"
    if case.loss:
        yield f"loss {case.loss}"
    if case.deterministic:
        yield "deterministic algorithms"
    if case.anomaly:
        yield "anomaly mode"
    yield f"seed {case.seed}"


def labelled(remarks: Iterable[tuple[str, str | Text]]) -> Table:
    """Return remarks beside their labels; what has no label is less important."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for label, text in remarks:
        grid.add_row(label, text if isinstance(text, Text) else Text(text, style="" if label else "dim"))
    return grid


def number(value: Scalar | None, digits: int = 4) -> str:
    """Write a value with that many digits, if it is a float."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def count(many: int, one: str, others: str = "") -> str:
    """Write how many there are of something."""
    return f"{many} {one if many == 1 else others or one + 's'}"


_CULPRITS = 3
_MORE = "(--all)"


def culprit_remarks(culprits: Sequence[Culprit], *, show_all: bool) -> Iterator[Remark]:
    """Yield what there is to say of each, the first ones only unless all are asked for."""
    shown = culprits if show_all else culprits[:_CULPRITS]
    for place, culprit in enumerate(shown):
        yield "culprit" if place == 0 else "then", _named(culprit)
        yield from (("", line) for line in _evidence(culprit))
    if len(culprits) > len(shown):
        yield "", f"and {len(culprits) - len(shown)} more {_MORE}"


def _named(culprit: Culprit) -> Text:
    if not culprit.node:
        return Text.assemble(("no single node", "bold"), f", in {culprit.stage or 'forward'}{_rung(culprit)}")
    module = f" of {culprit.module_path}" if culprit.module_path not in ("", culprit.node) else ""
    stage = f", in {culprit.stage}" if culprit.stage else ""
    return Text.assemble((f"{culprit.op}", "bold red"), f"  {culprit.node}{module}{stage}{_rung(culprit)}")


def _rung(culprit: Culprit) -> str:
    return f", on the rung {culprit.rung}" if culprit.rung else ""


def _evidence(culprit: Culprit) -> Iterator[Text]:
    if culprit.source_line:
        place, code = _source(culprit.source_line)
        yield Text(place)
        if code:
            yield Text(f"    {code}")
    yield Text(_error(culprit))
    if culprit.cause:
        yield Text.assemble(("cause: ", "bold"), culprit.cause)


def _error(culprit: Culprit) -> str:
    error = f"error {number(culprit.local_error)} by itself"
    if not culprit.noise:
        return f"{error}: {culprit.reason}" if culprit.reason else error
    times = culprit.reason or f"{culprit.local_error / culprit.noise:.3g} times"
    return f"{error}, noise {number(culprit.noise)}: {times}"


def _source(line: str) -> tuple[str, str]:
    """Return the place and the code; a file below the working directory is named as from there."""
    found = re.fullmatch(r"(.+?):(\d+): ?(.*)", line, re.DOTALL)
    if found is None:
        return line, ""
    file, here = found[1], os.path.join(os.getcwd(), "")
    return f"{file.removeprefix(here)}:{found[2]}", found[3]
