"""Culprits on a terminal: which operation, where in the user's code, and by how much it is wrong by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from rich.text import Text

from torchdelta.records.report import Culprit
from torchdelta.report.marks import Remark, number

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
