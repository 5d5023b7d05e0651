"""Texts of other people do nothing to a terminal, in no renderer."""

import dataclasses
import enum
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from programs import reports
from torchdelta.cli.show import PRINTERS
from torchdelta.records import codec
from torchdelta.records.guard import GuardedGraphRecord, GuardSummary
from torchdelta.records.location import Location
from torchdelta.records.operators import OpReport, Probe, Sweep, SweepRow
from torchdelta.records.printable import printable
from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.guard import print_guard_summary

HOSTILE = "\x1b]0;title\x07\x1b]8;;http://evil\x1b\\\x1b[8mhidden\x9b31m\u202e"
PLAIN = {"stages", "ignore", "strict", "kind", "phase"}
"""Fields whose texts are checked when a record is built or read."""


def poisoned(value, name=""):
    """The record with escapes in all of its texts."""
    if isinstance(value, enum.Enum) or name in PLAIN:
        return value
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, tuple):
        return tuple(poisoned(item) for item in value)
    if isinstance(value, dict):
        return {poisoned(key): poisoned(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        changes = {each.name: poisoned(getattr(value, each.name), each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


CULPRIT = Culprit(
    op="relu", node="relu", module_path="a.b", source_line="model.py:3: x = relu(x)", local_error=1.0, noise=0.1
)
CASE = reports.diverged().case
RECORDS = {
    "equivalent": reports.equivalent(),
    "diverged": dataclasses.replace(reports.diverged(), culprits=(CULPRIT,), notes=("a note",)),
    "crashed": reports.crashed(),
    "inconclusive": reports.inconclusive(),
    "location": Location(
        verdict=Verdict.DIVERGED,
        environment=reports.ENVIRONMENT,
        case=CASE,
        reason="it is off",
        culprits=(CULPRIT,),
        notes=("a note",),
    ),
    "operator": OpReport(
        op="aten.mm",
        arguments=("float32[3]",),
        verdict=Verdict.DIVERGED,
        probes=(Probe(name="schema", verdict=Verdict.DIVERGED, reason="it lies", remedy="mend it"),),
        unasked={"fake": "not now"},
        notes=("a note",),
        environment=reports.ENVIRONMENT,
        seconds=1.0,
    ),
    "sweep": Sweep(
        swept=(SweepRow(op="mm", dtype="float32", samples=1, verdict=Verdict.DIVERGED, probes={}, reason="off"),),
        total=1,
        environment=reports.ENVIRONMENT,
        words={"operators": "mm"},
        notes=("a note",),
    ),
}


def test_a_text_without_control_characters_is_itself():
    report = reports.diverged()

    assert printable(report) is report
    assert printable("a\tb\n≠ […]") == "a\tb\n≠ […]"


def test_control_characters_are_shown():
    assert printable("\x1b[8m\x9b\r\u202e") == "\\x1b[8m\\x9b\\x0d\\u202e"


@given(st.text())
def test_no_control_character_is_left(text):
    left = {character for character in printable(text) if not character.isprintable() and ord(character) < 0xA0}

    assert left <= {"\n", "\t"}


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", RECORDS)
def test_no_renderer_lets_an_escape_through(name, verbose, capsys):
    record = poisoned(RECORDS[name])
    PRINTERS[type(record)](record, verbose=verbose)

    out = capsys.readouterr().out
    assert "\\x1b" in out
    assert not any(character in out for character in "\x1b\x07\x9b\u202e")


def test_no_escape_is_in_the_summary_of_a_run():
    finding = GuardedGraphRecord(
        number=1, name="relu", backend="b", level="dynamo", nodes=3, verdict=Verdict.DIVERGED, reason="off"
    )
    summary = GuardSummary(graphs=1, checked=1, findings=(finding,), notes=("a note",), out="out")
    console = Console(file=io.StringIO(), width=80)
    print_guard_summary(poisoned(summary), None, console)

    assert "\\x1b" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


def test_brackets_are_not_markup(capsys):
    record = dataclasses.replace(reports.diverged(), notes=("[link=http://evil]here[/link] :bug:",))
    PRINTERS[type(record)](record, verbose=True)

    assert "[link=http://evil]here[/link] :bug:" in capsys.readouterr().out


def test_a_saved_report_keeps_its_texts(tmp_path):
    record = poisoned(RECORDS["diverged"])
    codec.write_report(record, tmp_path / "report.json")

    assert codec.read_report(tmp_path / "report.json") == record
