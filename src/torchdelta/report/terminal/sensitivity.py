"""A sensitivity on a terminal: the module that loses most by being quantized first."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.sensitivity import LayerEffect, Sensitivity, worst_sqnr_db

_OUTPUTS = 4
"""Outputs that get a column of their own."""


def print_sensitivity(sensitivity: Sensitivity, console: Console | None = None) -> None:
    """Print what each module loses when it alone is quantized."""
    # a pipe or a log file has no width to fold at
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console.print(Group(*_parts(sensitivity)), highlight=False)


def _parts(sensitivity: Sensitivity) -> Iterator[RenderableType]:
    case = sensitivity.case
    together = worst_sqnr_db(sensitivity.together)
    yield Text.assemble((_headline(sensitivity), "bold"), f"  {case.program} under {case.transform}")
    if together is not None:
        yield Text(f"  all of them together leave {_decibels(together)} dB", style="dim")
    measured = [alone for alone in sensitivity.modules if not alone.reason]
    if measured:
        yield Text()
        yield _table(measured)
    for alone in sensitivity.modules:
        if alone.reason:
            yield Text.assemble("\n", ("not alone  ", "yellow"), f"{_name(alone)}: {alone.reason}")
    for note in sensitivity.notes:
        yield Text(f"\nnote  {note}", style="dim")


def _headline(sensitivity: Sensitivity) -> str:
    measured = [alone for alone in sensitivity.modules if not alone.reason and alone.sqnr_db is not None]
    if not measured:
        return "no module could be quantized alone"
    return f"{_name(measured[0])} loses most: quantized alone it leaves {_decibels(measured[0].sqnr_db)} dB"


def _table(measured: list[LayerEffect]) -> Table:
    paths = list(dict.fromkeys(effect.path for alone in measured for effect in alone.effects))
    shown = paths if 1 < len(paths) <= _OUTPUTS else []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("quantized alone", overflow="fold")
    table.add_column("SQNR dB" if len(paths) < 2 else "worst SQNR dB", justify="right", no_wrap=True)
    for path in shown:
        table.add_column(path, justify="right", no_wrap=True)
    table.add_column("operations", overflow="fold")
    for alone in measured:
        by_path = {effect.path: effect.sqnr_db for effect in alone.effects}
        each = (Text(_decibels(by_path.get(path))) for path in shown)
        table.add_row(Text(_name(alone)), Text(_decibels(alone.sqnr_db)), *each, Text(", ".join(alone.ops)))
    return table


def _name(alone: LayerEffect) -> str:
    return alone.module_path or "(outside of any module)"


def _decibels(value: float | None) -> str:
    if value is None:
        return "-"
    # what is untouched has no noise at all
    return "untouched" if value == math.inf else f"{value:.1f}"
