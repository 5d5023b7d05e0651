"""The style that all terminal reports share: colours, marks, numbers, tables, remarks with labels, and culprits.

Each report is built of the pieces here, so that verdicts and culprits look the same in all of them:

    diverged  model under inductor              headline
      policy noise, seed 0, torch 2.13
    culprit   aten.gelu.default  gelu           remark_table(culprit_remarks(…))
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.case import VALUES, Case
from torchdelta.records.comparison import Scalar
from torchdelta.records.location import Location
from torchdelta.records.report import Culprit, Report, is_less_accurate
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
TABLE_COLUMNS = 96
"""On a narrower terminal the columns of numbers leave too little room for names, so entries are printed as lines."""
_MOST_CULPRITS = 3
"""At most so many culprits are shown unless all are asked for."""
_MORE = "(--all)"
Remark = tuple[str, str | Text]
"""A label and its text."""


def console_for_stdout() -> Console:
    """Return a console on stdout; a pipe or a log file gets 160 columns, because it has no width of its own."""
    return console_for(sys.stdout, width=None if sys.stdout.isatty() else 160)


def console_for(stream: TextIO | None, *, width: int | None = None) -> Console:
    """Return a console on a stream, which takes texts as they are: brackets in a name are not markup."""
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def relative_path(path: str) -> str:
    """Return a path relative to the working directory if it is below that; unchanged otherwise.

    It is unchanged too if the working directory was deleted.
    """
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except FileNotFoundError:
        return path


def headline(report: Report | Location) -> RenderableType:
    """Return two lines: the verdict with program and transform, and the settings of the run with the version of torch.

    A comparison of two values has no transform to show. A report of a candidate that is only less accurate says so.
    """
    case = report.case
    verdict = (report.verdict.value, f"bold {STYLE[report.verdict]}")
    subject = case.program if case.stages == (VALUES,) else f"{case.program} under {case.transform}"
    settings = ", ".join([*_settings(case), f"torch {report.environment.torch}"])
    kind = " (the same function, less accurate)" if isinstance(report, Report) and is_less_accurate(report) else ""
    return Group(Text.assemble(verdict, kind, f"  {subject}"), Text(f"  {settings}", style="dim"))


def _settings(case: Case) -> Iterator[str]:
    """Yield the settings of a case that matter for its verdict, each in a few words.

    The options of the transform, the policy and the seed are always there, the steps with their optimizer if that stage
    is compared, and some others if they differ from the default.
    """
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


def remark_table(remarks: Iterable[Remark]) -> Table:
    """Return a table without borders: remarks beside their bold labels; plain text without a label is dim."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for label, text in remarks:
        grid.add_row(label, text if isinstance(text, Text) else Text(text, style="" if label else "dim"))
    return grid


def plain_table() -> Table:
    """Return an empty table without borders, to which columns can be added."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def marked_lines(mark: Text, lines: Iterable[RenderableType]) -> Table:
    """Return a table without borders, of one row: the mark, and beside it all the lines; for a narrow terminal."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    grid.add_row(mark, Group(*lines))
    return grid


def number(value: Scalar | None, digits: int = 4) -> str:
    """Return a value as text; a float has that many significant digits, and None is a dash."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def count(many: int, one: str, others: str = "") -> str:
    """Return a number with its noun, such as "1 leaf" or "3 leaves"; without `others` the plural is `one` with "s"."""
    return f"{many} {one if many == 1 else others or one + 's'}"


def culprit_remarks(culprits: Sequence[Culprit], *, show_all: bool) -> Iterator[Remark]:
    """Yield a remark for each culprit and further ones, without a label, for its details.

    The label of the first is "culprit", that of the others "then". Unless `show_all`, only the first `_MOST_CULPRITS`
    are there, with the number of those left out.
    """
    shown = culprits if show_all else culprits[:_MOST_CULPRITS]
    for place, culprit in enumerate(shown):
        yield "culprit" if place == 0 else "then", _culprit_line(culprit)
        yield from (("", line) for line in _culprit_details(culprit))
    if len(culprits) > len(shown):
        yield "", f"and {len(culprits) - len(shown)} more {_MORE}"


def _culprit_line(culprit: Culprit) -> Text:
    """Return the operation, node, module, stage and rung of a culprit on one line, as far as they are known.

    A culprit without a node is called "no single node".
    """
    if not culprit.node:
        return Text.assemble(("no single node", "bold"), f", in {culprit.stage or 'forward'}{_rung_suffix(culprit)}")
    module = f" of {culprit.module_path}" if culprit.module_path not in ("", culprit.node) else ""
    stage = f", in {culprit.stage}" if culprit.stage else ""
    op = f"within {' → '.join(culprit.region)}" if culprit.region else culprit.op
    return Text.assemble((op, "bold red"), f"  {culprit.node}{module}{stage}{_rung_suffix(culprit)}")


def _rung_suffix(culprit: Culprit) -> str:
    """Return the text ", on the rung NAME", or an empty text if the culprit has no rung."""
    return f", on the rung {culprit.rung}" if culprit.rung else ""


def _culprit_details(culprit: Culprit) -> Iterator[Text]:
    """Yield lines about a culprit: its source line and code if known, its error, and its cause if known."""
    if culprit.source_line:
        place, code = _split_source_line(culprit.source_line)
        yield Text(place)
        if code:
            yield Text(f"    {code}")
    yield Text(_error_text(culprit))
    if culprit.cause:
        yield Text.assemble(("cause: ", "bold"), culprit.cause)


def _error_text(culprit: Culprit) -> str:
    """Return a text with a culprit's own error, its noise, and its reason or else the error in multiples of the noise.

    Without noise (0) there are only the error, and the reason if there is one.
    """
    error = f"error {number(culprit.local_error)} by itself"
    if not culprit.noise:
        return f"{error}: {culprit.reason}" if culprit.reason else error
    times = culprit.reason or f"{culprit.local_error / culprit.noise:.3g} times"
    return f"{error}, noise {number(culprit.noise)}: {times}"


def _split_source_line(line: str) -> tuple[str, str]:
    """Return (place, code) of a source line `file:line: code`; a path below the working directory becomes relative.

    A text of another form is returned as the place, with an empty code.
    """
    match = re.fullmatch(r"(.+?):(\d+): ?(.*)", line, re.DOTALL)
    if match is None:
        return line, ""
    return f"{relative_path(match[1])}:{match[2]}", match[3]
