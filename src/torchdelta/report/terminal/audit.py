"""An audit on a terminal: the control first, then how many faults of each kind were caught."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.audit import Audit, FaultTrial, TrialOutcome, count
from torchdelta.records.verdict import Verdict

_COLUMNS = (
    TrialOutcome.CAUGHT,
    TrialOutcome.MISSED,
    TrialOutcome.INCONCLUSIVE,
    TrialOutcome.CRASHED,
    TrialOutcome.NO_EFFECT,
)
_WHEN_THERE_ARE_ANY = (TrialOutcome.CRASHED, TrialOutcome.NO_EFFECT)
_TOLD = (TrialOutcome.MISSED, TrialOutcome.INCONCLUSIVE, TrialOutcome.CRASHED)
_STYLE = {
    TrialOutcome.CAUGHT: "green",
    TrialOutcome.MISSED: "red",
    TrialOutcome.INCONCLUSIVE: "yellow",
    TrialOutcome.CRASHED: "magenta",
    TrialOutcome.NO_EFFECT: "dim",
}


def print_audit(audit: Audit, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the audit; `verbose` shows every fault that was not caught, with its place."""
    # a pipe or a log file has no width to fold at
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console.print(Group(*_parts(audit, verbose=verbose)), highlight=False)


def _parts(audit: Audit, *, verbose: bool) -> Iterator[RenderableType]:
    case = audit.case
    yield Text.assemble((_rate(audit), "bold"), f"  {case.program} under {case.transform}")
    yield Text(f"  {', '.join(case.stages)}, policy {case.policy}, seed {case.seed}", style="dim")
    yield from _control(audit)
    if audit.trials:
        yield Text()
        yield _table(audit)
    if audit.inapplicable:
        yield Text(f"\nno place for  {', '.join(audit.inapplicable)}", style="dim")
    told = [trial for trial in audit.trials if trial.outcome in _TOLD]
    if verbose and told:
        yield Text()
        yield from map(_line, told)
    elif told:
        yield Text("--verbose shows where those are that were not caught", style="dim")


def _rate(audit: Audit) -> str:
    caught, missable = (
        count(audit.trials, TrialOutcome.CAUGHT),
        len(audit.trials) - count(audit.trials, TrialOutcome.NO_EFFECT),
    )
    if audit.catch_rate is None:
        return "no fault had an effect" if audit.trials else "no fault could be planted"
    return f"{caught} of {missable} faults caught ({audit.catch_rate:.0%})"


def _control(audit: Audit) -> Iterator[Text]:
    if audit.control is Verdict.EQUIVALENT:
        yield Text.assemble("  without a fault  ", ("equivalent", "green"))
        return
    yield Text.assemble("  without a fault  ", (audit.control.value, "bold red"), f"  {audit.control_reason}")
    yield Text(
        f"  THE CATCHES BELOW MEAN NOTHING: the check says {audit.control.value} without any fault too. Mend that "
        "first, or choose another policy.",
        style="bold red",
    )


def _table(audit: Audit) -> Table:
    shown = [outcome for outcome in _COLUMNS if outcome not in _WHEN_THERE_ARE_ANY or count(audit.trials, outcome) > 0]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("kind", overflow="fold")
    for name in ("planted", *(outcome.value.replace("_", " ") for outcome in shown)):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in audit.kinds:
        table.add_row(Text(kind), *_counts(audit.of_kind(kind), shown))
    rate = "" if audit.catch_rate is None else f", {audit.catch_rate:.0%} caught"
    table.add_row(Text(f"total{rate}", style="bold"), *_counts(audit.trials, shown))
    return table


def _counts(trials: Sequence[FaultTrial], shown: Sequence[TrialOutcome]) -> Iterator[Text]:
    yield Text(str(len(trials)))
    for outcome in shown:
        number = count(trials, outcome)
        yield Text(str(number), style=_STYLE[outcome] if number else "dim")


def _line(trial: FaultTrial) -> Text:
    reason = f": {trial.reason}" if trial.reason else ""
    return Text.assemble((f"{trial.outcome.value:<12}", _STYLE[trial.outcome]), f"  {trial.place}{reason}")
