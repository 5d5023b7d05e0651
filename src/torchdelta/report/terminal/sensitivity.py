"""The result of a sensitivity run on a terminal: how much each module loses if it alone is quantized.

The module that loses most comes first. Start with `print_sensitivity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.printable import printable
from torchdelta.records.sensitivity import LayerEffect, Sensitivity, worst_sqnr_db
from torchdelta.report.terminal.style import console_for_stdout, plain_table

_MOST_OUTPUTS = 4
"""With at most so many outputs, each has a column of its own."""


def print_sensitivity(sensitivity: Sensitivity, console: Console | None = None) -> None:
    """Print a table of the modules with the SQNR that is left if each alone is quantized."""
    console = console or console_for_stdout()
    sensitivity = printable(sensitivity)
    console.print(Group(*_parts(sensitivity)), highlight=False)


def _parts(sensitivity: Sensitivity) -> Iterator[RenderableType]:
    """Yield the parts in order: headline, table, the modules that could not be measured, and notes.

    Below the headline is the SQNR when all modules are quantized together, if that was measured.
    """
    case = sensitivity.case
    together = worst_sqnr_db(sensitivity.together)
    yield Text.assemble((_headline(sensitivity), "bold"), f"  {case.program} under {case.transform}")
    if together is not None:
        yield Text(f"  all of them together leave {_decibels(together)} dB", style="dim")
    measured = [layer for layer in sensitivity.modules if not layer.reason]
    if measured:
        yield Text()
        yield _table(measured)
    for layer in sensitivity.modules:
        if layer.reason:
            yield Text.assemble("\n", ("not alone  ", "yellow"), f"{_module_name(layer)}: {layer.reason}")
    for note in sensitivity.notes:
        yield Text(f"\nnote  {note}", style="dim")


def _headline(sensitivity: Sensitivity) -> str:
    """Return a sentence on the module that loses most, which comes first, or that none could be quantized alone."""
    measured = [layer for layer in sensitivity.modules if not layer.reason and layer.sqnr_db is not None]
    if not measured:
        return "no module could be quantized alone"
    return f"{_module_name(measured[0])} loses most: quantized alone it leaves {_decibels(measured[0].sqnr_db)} dB"


def _table(measured: list[LayerEffect]) -> Table:
    """Return a table with a row for each module: the SQNR of its worst output, and its operations.

    Each output has a column of its own if there are two to `_MOST_OUTPUTS`. SQNRs are in dB; an infinite one is
    "untouched", and a missing one a dash.
    """
    paths = list(dict.fromkeys(effect.path for layer in measured for effect in layer.effects))
    shown = paths if 1 < len(paths) <= _MOST_OUTPUTS else []
    table = plain_table()
    table.add_column("quantized alone", overflow="fold")
    table.add_column("SQNR dB" if len(paths) < 2 else "worst SQNR dB", justify="right", no_wrap=True)
    for path in shown:
        table.add_column(path, justify="right", no_wrap=True)
    table.add_column("operations", overflow="fold")
    for layer in measured:
        by_path = {effect.path: effect.sqnr_db for effect in layer.effects}
        cells = (Text(_decibels(by_path.get(path))) for path in shown)
        table.add_row(Text(_module_name(layer)), Text(_decibels(layer.sqnr_db)), *cells, Text(", ".join(layer.ops)))
    return table


def _module_name(layer: LayerEffect) -> str:
    """Return the path of a module, or "(outside of any module)" if it is empty."""
    return layer.module_path or "(outside of any module)"


def _decibels(value: float | None) -> str:
    """Return an SQNR as text: "-" for None, "untouched" for infinity, otherwise with one decimal."""
    if value is None:
        return "-"
    # an infinite SQNR means that quantization did not change the output
    return "untouched" if value == math.inf else f"{value:.1f}"
