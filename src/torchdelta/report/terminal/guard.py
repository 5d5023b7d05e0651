"""What came of a guarded run, on one screen: how many graphs were checked, and each that is wrong with its culprit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchdelta.records.guard import GuardedGraphRecord, GuardSummary
from torchdelta.records.passes import PassFinding, PassSummary
from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import MARK, STYLE, Remark, count, culprit_remarks, labelled

_COLUMNS = 80
_FINDINGS = 4
_LINES = 5
"""More of one kind are not a screen any more."""


def print_guarded(summary: GuardSummary, watched: PassSummary | None = None, console: Console | None = None) -> None:
    """Print what a run came to, on stderr unless told otherwise: stdout is the script's."""
    console = console or _console_for_stderr()
    parts: list[RenderableType] = [_headline(summary, watched), _indented(_counts(summary, watched))]
    parts += _shown([_finding(seen) for seen in summary.findings], _where(summary))
    if watched is not None:
        parts += _shown([_pass(found) for found in watched.findings], "")
    if remarks := [*_remarks(summary, watched)]:
        parts += [Text(), _indented(remarks)]
    console.print(Group(*parts), highlight=False)


def _console_for_stderr() -> Console:
    # the script may have put something else in place of sys.stderr
    stream = sys.__stderr__
    return Console(file=stream, width=min(_COLUMNS, Console(file=stream).width if stream and stream.isatty() else 80))


def _headline(summary: GuardSummary, watched: PassSummary | None) -> Text:
    passes = [Verdict.DIVERGED for _ in watched.findings] if watched is not None else []
    verdicts = [*map(Verdict, summary.verdicts), *passes]
    worst = max(verdicts, key=lambda verdict: verdict.severity, default=None)
    if worst is None and watched is not None and watched.checked:
        return Text.assemble(("torchdelta run", "bold"), "  no pass changes what is computed")
    if worst is None:
        return Text.assemble(("torchdelta run  nothing was checked", "bold yellow"))
    return Text.assemble(("torchdelta run  ", "bold"), (worst.value, f"bold {STYLE[worst]}"))


def _counts(summary: GuardSummary, watched: PassSummary | None) -> Iterator[Remark]:
    if summary.graphs or watched is None:
        ends = ", ".join(f"{many} {name}" for name, many in summary.verdicts.items())
        checked = f", {summary.checked} checked{f': {ends}' if ends else ''}" if summary.graphs else ""
        yield "graphs", f"{summary.graphs} seen{checked}" if summary.graphs else "none: nothing in it was compiled"
    whys = sorted(summary.unchecked.items(), key=lambda item: -item[1])
    yield from _first(
        [("not checked" if place == 0 else "", f"{many}: {why}") for place, (why, many) in enumerate(whys)]
    )
    if watched is not None:
        yield "passes", _passes(watched)


def _passes(watched: PassSummary) -> str:
    if not watched.passes:
        return "none: inductor ran no pass"
    wrong = len(watched.findings)
    looked_at = f"{count(watched.graphs, 'graph')} ({watched.changed} changed, {watched.checked} checked)"
    end = (
        f"{count(wrong, 'pass changes', 'passes change')} what is computed"
        if wrong
        else "none changes what is computed"
    )
    return f"{watched.passes} over {looked_at}: {end}"


def _finding(seen: GuardedGraphRecord) -> RenderableType:
    assert seen.verdict is not None
    when = (
        "when it was compiled" if seen.call == 0 else "on its first call" if seen.call == 1 else f"on call {seen.call}"
    )
    what = f"  graph {seen.number} {when}: {seen.backend}, {seen.level}, {count(seen.nodes, 'node')}"
    remarks: list[Remark] = []
    if seen.culprit is None:
        remarks += [("from", _near(seen.name))] if seen.name else []
    remarks += _why(seen.culprit, seen.reason)
    if seen.directory is not None:
        remarks.append(("report", _near(seen.directory)))
    if seen.repro is not None:
        remarks.append(("repro", _near(seen.repro)))
    return Group(_marked(seen.verdict, what), _indented(remarks))


def _pass(found: PassFinding) -> RenderableType:
    what = f"  pass {found.name}, {found.phase}, of {found.graph}"
    return Group(_marked(Verdict.DIVERGED, what), _indented(_why(found.culprit, found.reason)))


def _marked(verdict: Verdict, what: str) -> Text:
    return Text.assemble((f"{MARK[verdict]} {verdict.value}", STYLE[verdict]), what)


def _why(culprit: Culprit | None, reason: str) -> list[Remark]:
    if culprit is None:
        return [("why", reason)] if reason else []
    return [*culprit_remarks([culprit], show_all=True)]


def _remarks(summary: GuardSummary, watched: PassSummary | None) -> Iterator[Remark]:
    notes = [*summary.notes, *(watched.notes if watched is not None else ())]
    yield from _first([("note", note) for note in notes])
    if summary.out is not None:
        yield "all of it", _where(summary)
    if summary.seconds:
        yield "cost", f"checks took {summary.seconds:.1f} s"


def _where(summary: GuardSummary) -> str:
    return _near(os.path.join(summary.out, "index.jsonl")) if summary.out is not None else ""


def _first(remarks: Sequence[Remark]) -> Iterator[Remark]:
    yield from remarks[:_LINES]
    if len(remarks) > _LINES:
        yield "", f"and {len(remarks) - _LINES} more"


def _shown(findings: Sequence[RenderableType], where: str) -> Iterator[RenderableType]:
    for finding in findings[:_FINDINGS]:
        yield Text()
        yield finding
    if len(findings) > _FINDINGS:
        yield Text(f"and {len(findings) - _FINDINGS} more{f': {where}' if where else ''}", style="dim")


def _indented(remarks: Iterator[Remark] | Sequence[Remark]) -> RenderableType:
    return Padding(labelled(remarks), (0, 0, 0, 2), expand=False)


def _near(path: str) -> str:
    """Return a path as from here, where it lies below."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))
