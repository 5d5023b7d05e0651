"""The result of an audit on a terminal: how many planted faults of each kind a check caught.

The catch rate comes first, then the control, which is the same check without a fault. If the control is not equivalent,
the catches mean nothing, and the report says so. Start with `print_audit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdelta.records.audit import Audit, FaultTrial, TrialOutcome, count
from torchdelta.records.printable import printable
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import console_for_stdout, plain_table

_COLUMNS = (
    TrialOutcome.CAUGHT,
    TrialOutcome.MISSED,
    TrialOutcome.INCONCLUSIVE,
    TrialOutcome.CRASHED,
    TrialOutcome.NO_EFFECT,
)
_RARE = (TrialOutcome.CRASHED, TrialOutcome.NO_EFFECT)
"""Outcomes that have a column only if they occur."""
_NOT_CAUGHT = (TrialOutcome.MISSED, TrialOutcome.INCONCLUSIVE, TrialOutcome.CRASHED)
_STYLE = {
    TrialOutcome.CAUGHT: "green",
    TrialOutcome.MISSED: "red",
    TrialOutcome.INCONCLUSIVE: "yellow",
    TrialOutcome.CRASHED: "magenta",
    TrialOutcome.NO_EFFECT: "dim",
}


def print_audit(audit: Audit, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the audit, by default on stdout; `verbose` lists every fault that was not caught, with its place."""
    console = console or console_for_stdout()
    audit = printable(audit)
    console.print(Group(*_parts(audit, verbose=verbose)), highlight=False)


def _parts(audit: Audit, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield the parts in order: catch rate, settings, control, table, kinds without a place, and faults not caught.

    Faults that were missed, inconclusive or crashed are not caught: they are listed if `verbose`; otherwise a line says
    that `--verbose` shows them. Parts without content are left out.
    """
    case = audit.case
    yield Text.assemble((_catch_rate_text(audit), "bold"), f"  {case.program} under {case.transform}")
    yield Text(f"  {', '.join(case.stages)}, policy {case.policy}, seed {case.seed}", style="dim")
    yield from _control_lines(audit)
    if audit.trials:
        yield Text()
        yield _table(audit)
    if audit.inapplicable:
        yield Text(f"\nno place for  {', '.join(audit.inapplicable)}", style="dim")
    not_caught = [trial for trial in audit.trials if trial.outcome in _NOT_CAUGHT]
    if verbose and not_caught:
        yield Text()
        yield from map(_trial_line, not_caught)
    elif not_caught:
        yield Text("--verbose shows where those are that were not caught", style="dim")


def _catch_rate_text(audit: Audit) -> str:
    """Return how many of the faults that had an effect were caught, also as a percentage.

    If there are none, return that no fault had an effect, or that none could be planted.
    """
    caught, effective = (
        count(audit.trials, TrialOutcome.CAUGHT),
        len(audit.trials) - count(audit.trials, TrialOutcome.NO_EFFECT),
    )
    if audit.catch_rate is None:
        return "no fault had an effect" if audit.trials else "no fault could be planted"
    return f"{caught} of {effective} faults caught ({audit.catch_rate:.0%})"


def _control_lines(audit: Audit) -> Iterator[Text]:
    """Yield a line with the verdict of the control; if it is not equivalent, with its reason, and then a warning."""
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
    """Return a table of outcomes with a row for each kind of fault, and a last row with the totals and the catch rate.

    The columns are the number of planted faults and that of each outcome; `crashed` and `no effect` have a column only
    if they occur.
    """
    shown = [outcome for outcome in _COLUMNS if outcome not in _RARE or count(audit.trials, outcome) > 0]
    table = plain_table()
    table.add_column("kind", overflow="fold")
    for name in ("planted", *(outcome.value.replace("_", " ") for outcome in shown)):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in audit.kinds:
        table.add_row(Text(kind), *_counts(audit.of_kind(kind), shown))
    rate = "" if audit.catch_rate is None else f", {audit.catch_rate:.0%} caught"
    table.add_row(Text(f"total{rate}", style="bold"), *_counts(audit.trials, shown))
    return table


def _counts(trials: Sequence[FaultTrial], shown: Sequence[TrialOutcome]) -> Iterator[Text]:
    """Yield the cells of a row: the number of trials, and that of each outcome."""
    yield Text(str(len(trials)))
    for outcome in shown:
        number = count(trials, outcome)
        yield Text(str(number), style=_STYLE[outcome] if number else "dim")


def _trial_line(trial: FaultTrial) -> Text:
    """Return a line with the outcome and the place of a trial, and its reason if there is one."""
    reason = f": {trial.reason}" if trial.reason else ""
    return Text.assemble((f"{trial.outcome.value:<12}", _STYLE[trial.outcome]), f"  {trial.place}{reason}")
