"""What a location looks like on a terminal, and that its file gives it back exactly."""

import dataclasses
import io
import json
import math
import subprocess
import sys
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from programs import reports
from test_codec import identity, strictly_parsed, values_of
from torchdelta.errors import ReportUnreadable
from torchdelta.records import location as locations
from torchdelta.records.audit import Audit
from torchdelta.records.case import Case
from torchdelta.records.codec import from_json, read_report, to_json, write_report
from torchdelta.records.comparison import Breach, Comparison
from torchdelta.records.location import Location, NodeRecord, Row, Rung
from torchdelta.records.report import Cost, Coverage, Culprit, Report
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.location import print_location


def seen(verdict=Verdict.DIVERGED, *, error=4.0, noise=0.5, sqnr_db=20.0, contract=(), **numbers):
    """A comparison of one node's value."""
    measurement = dataclasses.replace(
        reports.MEASUREMENT, square_error=12.0 * 10 ** (-sqnr_db / 10), max_abs=error, **numbers
    )
    return dataclasses.replace(
        reports.comparison("value", verdict, error=error, contract=contract),
        noise=noise,
        allowed=noise * 4,
        measurement=measurement,
    )


def inherited(sqnr_db, *, error=0.25, **numbers):
    return (dataclasses.replace(seen(error=error, sqnr_db=sqnr_db, **numbers), noise=None),)


def row(name, op="aten.add.Tensor", *inputs, **changes):
    record = NodeRecord(name=name, op=op, module_path=changes.pop("module_path", ""), inputs=inputs)
    return Row(reference=record, candidate=changes.pop("candidate", record), how="handle", **changes)


def culprit(node="gelu", op="aten.gelu.default", **changes):
    facts = {
        "module_path": "block.act",
        "source_line": "/models/net.py:7: return self.act(x)",
        "local_error": 4.0,
        "noise": 0.5,
        "stage": "forward",
        "reason": "rms error is 8 times the noise; up to 4 times would be rounding",
    }
    return Culprit(op=op, node=node, **{**facts, **changes})


LINEAR = row("linear", "aten.linear.default", "x", "weight", module_path="block.lin")
GELU = row("gelu", "aten.gelu.default", "linear", module_path="block.act", local=(seen(),), inherited=inherited(20.0))
DROPOUT = row("dropout", "aten.dropout.default", "gelu", inherited=inherited(19.5))
OUT = row("out", "aten.linear.default", "dropout", "weight_1", inherited=inherited(15.25))


def location(*rows, **changes):
    facts = {
        "verdict": Verdict.DIVERGED,
        "environment": reports.ENVIRONMENT,
        "case": Case(program="models/net.py:build", transform="decompose"),
        "culprits": (culprit(),),
        "table": rows or (LINEAR, GELU, DROPOUT, OUT),
        "coverage": Coverage(matched=8, total=8, how={"handle": 6, "name": 2}),
        "rungs": (
            Rung(name="export", verdict=Verdict.EQUIVALENT),
            Rung(name="decompose", verdict=Verdict.DIVERGED, reason="rms error is 8 times the noise"),
        ),
        "cost": Cost(seconds={"reference": 0.5, "locating": 1.75}, peak_bytes=300 * 2**20),
    }
    return Location(**{**facts, **changes})


def rendered(found, *, width=120, show_all=False):
    """The lines a terminal of that width shows, without the blanks at their ends."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False, _environ={})
    print_location(found, console, verbose=show_all)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def table_of(lines):
    """The names in the ranked table."""
    start = next(place for place, line in enumerate(lines) if line.startswith("the worst")) + 2
    end = lines.index("", start)
    return [line[3:].split("  ")[0] for line in lines[start:end] if not line.startswith("   and")]


def test_a_culprit_is_named_with_its_place_its_error_and_what_is_around_it():
    assert rendered(location(notes=("something to know",), compiles=2)) == [
        "diverged  models/net.py:build under decompose",
        "  policy noise, seed 0, torch 2.13.0",
        "",
        "ladder   eager → export = → decompose ≠ diverged here first",
        "culprit  aten.gelu.default  gelu of block.act, in forward",
        "         /models/net.py:7",
        "             return self.act(x)",
        "         error 4 by itself, noise 0.5: rms error is 8 times the noise; up to 4 times would be rounding",
        "",
        "   node       op                    by itself  as it runs",
        "   ┌╴linear   aten.linear.default   identical  identical",
        "≠  gelu       aten.gelu.default     8 × noise  20.0 dB",
        "   └╴dropout  aten.dropout.default  identical  19.5 dB",
        "      └╴out   aten.linear.default   identical  15.2 dB",
        "",
        "the worst nodes first; SQNR, cosine and max abs as each runs in the candidate",
        "   node     op                    module     match   by itself  SQNR dB      cosine  max abs",
        "≠  gelu     aten.gelu.default     block.act  handle  8 × noise     20.0  1.00000000     0.25",
        "=  out      aten.linear.default              handle  identical     15.2  1.00000000     0.25",
        "=  dropout  aten.dropout.default             handle  identical     19.5  1.00000000     0.25",
        "   and 1 identical (--all)",
        "",
        "matched  8 of 8 nodes (6 by handle, 2 by name)",
        "note     something to know",
        "2 compiles, 2.2 s, peak memory 300 MiB",
    ]


def test_the_cause_and_the_rung_are_on_the_culprit():
    named = culprit(rung="backend", cause="operations are fused: it vanishes with max_fusion_size=1")

    lines = rendered(location(culprits=(named,)))

    assert "culprit  aten.gelu.default  gelu of block.act, in forward, on the rung backend" in lines
    assert "         cause: operations are fused: it vanishes with max_fusion_size=1" in lines


def test_a_file_below_the_working_directory_is_named_as_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = culprit(source_line=f"{tmp_path}/net.py:12: y = f'{{x}}: 3'")

    lines = rendered(location(culprits=(named,)))

    assert lines[5:7] == ["         net.py:12", "             y = f'{x}: 3'"]


def test_of_many_culprits_three_are_shown_and_the_rest_counted():
    many = tuple(culprit(f"gelu_{number}") for number in range(5))

    lines = rendered(location(culprits=many))

    assert [line.split()[0] for line in lines if "aten.gelu.default  gelu_" in line] == ["culprit", "then", "then"]
    assert "         and 2 more (--all)" in lines
    assert sum("aten.gelu.default  gelu_" in line for line in rendered(location(culprits=many), show_all=True)) == 5


def test_three_culprits_are_all_shown():
    lines = rendered(location(culprits=tuple(culprit(f"gelu_{number}") for number in range(3))))

    assert not any("more (--all)" in line for line in lines)


def test_a_failure_between_two_graphs_is_no_node_and_has_no_graph():
    between = culprit("", "", module_path="", source_line="", stage="gradients", rung="backend", cause="layout: …")

    lines = rendered(location(culprits=(between,)))

    assert "culprit  no single node, in gradients, on the rung backend" in lines
    assert not any("as it runs" in line and "by itself" in line for line in lines)


class TestNeighbourhood:
    def drawn(self, found, **how):
        lines = rendered(found, **how)
        start = next(place for place, line in enumerate(lines) if line.startswith("   node"))
        return lines[start + 1 : lines.index("", start)]

    def test_has_at_most_five_lines_on_each_side_and_counts_the_rest(self):
        producers = tuple(row(f"before_{number}") for number in range(7))
        home = row("gelu", "aten.gelu.default", *(each.reference.name for each in producers), local=(seen(),))
        consumers = tuple(row(f"after_{number}", "aten.add.Tensor", "gelu") for number in range(9))

        drawn = self.drawn(location(*producers, home, *consumers))

        assert drawn[0].split() == ["┌╴and", "3", "more"]
        assert drawn[5].startswith("≠  gelu")
        assert drawn[-1].split() == ["└╴and", "5", "more"]
        assert len(drawn) == 11

    def test_a_second_culprit_next_to_the_first_is_marked(self):
        drawn = self.drawn(location(LINEAR, GELU, dataclasses.replace(DROPOUT, local=(seen(error=8.0),)), OUT))

        assert drawn[2] == "≠  └╴dropout  aten.dropout.default  16 × noise  19.5 dB"

    def test_what_the_culprit_reads_and_nobody_judged_is_said_to_be_so(self):
        home = row("gelu", "aten.gelu.default", "linear", "x", "lost", local=(seen(),))
        lost = NodeRecord(name="lost", op="aten.mul.Tensor")

        drawn = self.drawn(location(LINEAR, home, unmatched_reference=(lost,)))

        assert drawn == [
            "   ┌╴lost    aten.mul.Tensor      unmatched",
            "   ├╴x                            not judged",
            "   ├╴linear  aten.linear.default  identical",
            "≠  gelu      aten.gelu.default    8 × noise",
        ]

    def test_a_backward_graph_that_uses_the_same_names_is_told_apart(self):
        forward = (row("mul", "aten.mul.Tensor", "x"), row("relu", "aten.relu.default", "mul"))
        backward = (
            row("mul", "aten.mul.Tensor", "tangents_1", local=(seen(),)),
            row("sum_1", "aten.sum.default", "mul"),
        )

        drawn = self.drawn(location(*forward, *backward, culprits=(culprit("mul", "aten.mul.Tensor"),)))

        assert [line.split()[0] for line in drawn] == ["┌╴tangents_1", "≠", "└╴sum_1"]

    def test_a_culprit_that_has_no_partner_of_its_own_keeps_its_error(self):
        reader = row("out", "aten.linear.default", "gelu", local=(seen(),))

        drawn = self.drawn(location(LINEAR, reader))

        assert drawn == [
            "≠  gelu   aten.gelu.default    8 × noise",
            "≠  └╴out  aten.linear.default  8 × noise",
        ]

    def test_modules_stand_in_the_order_in_which_they_ran(self):
        names = ("a", "act", "b", "norm", "head")
        rows = [row(name, "Linear", module_path=name, inherited=inherited(30.0)) for name in names]
        rows[2] = row("b", "Linear", module_path="b", local=(seen(),), inherited=inherited(30.0))

        found = location(*rows, culprits=(culprit("b", "Linear", module_path="b"),), rungs=())

        assert [line[3:].split()[0] for line in self.drawn(found)] == list(names)
        lines = rendered(found)
        assert "culprit  Linear  b, in forward" in lines
        assert "matched  8 of 8 modules (6 by handle, 2 by name)" in lines
        assert any(line.startswith("the worst modules first") for line in lines)


class TestWorstNodes:
    def test_what_is_wrong_by_itself_comes_before_what_inherited_more(self):
        worse = row("mul", local=(seen(error=40.0),), inherited=inherited(60.0))

        assert table_of(rendered(location(LINEAR, GELU, worse, OUT))) == ["mul", "gelu", "out"]

    def test_ten_are_shown_and_the_rest_counted(self):
        many = [row(f"node_{number}", inherited=inherited(10.0 + number)) for number in range(30)]

        lines = rendered(location(*many, LINEAR))

        assert table_of(lines) == [f"node_{number}" for number in range(10)]
        assert "   and 20 more that differ and 1 identical (--all)" in lines
        assert len(table_of(rendered(location(*many, LINEAR), show_all=True))) == 31

    def test_what_was_tapped_has_the_numbers_of_the_node_by_itself(self):
        tapped = row("relu", "aten.relu.default", local=(seen(sqnr_db=12.0),))

        lines = rendered(location(tapped, culprits=(culprit("relu"),)))

        assert "the worst nodes first; SQNR, cosine and max abs as each does by itself" in lines
        assert any(line.split()[-3:-2] == ["12.0"] for line in lines)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"nan_candidate": 3, "misplaced": 3}, "NaN 0 → 3"),
            ({"inf_reference": 2, "misplaced": 2}, "Inf 2 → 0"),
            (
                {"contract": (Breach(clause="dtype", reference="float32", candidate="bfloat16", excused=True),)},
                "dtype float32 → bfloat16",
            ),
            (
                {"contract": (Breach(clause="shape", reference="(3, 4)", candidate="(3,)"),)},
                "shape (3, 4) → (3,)",
            ),
        ],
    )
    def test_what_no_error_tells_is_written_out(self, changes, said):
        odd = row("gelu", local=(seen(**changes),))

        for width in (60, 120):
            assert said in " ".join(" ".join(rendered(location(odd), width=width)).split())

    def test_a_value_that_requires_grad_on_one_side_only_is_no_oddity(self):
        breach = Breach(clause="requires_grad", reference="True", candidate="False")
        right = row("weight", inherited=(seen(Verdict.DIVERGED, contract=(breach,), mismatches=0),))

        assert not any("requires_grad" in line for line in rendered(location(right, GELU), show_all=True))

    def test_wrong_gradients_of_right_values_are_called_so(self):
        detached = row("gelu", local_gradients=(seen(),))

        assert any("8 × noise (gradients)" in line for line in rendered(location(detached)))

    def test_a_policy_without_noise_shows_the_error(self):
        wrong = row("gelu", local=(dataclasses.replace(seen(), noise=None),))

        assert any("error 4 " in line for line in rendered(location(wrong)) if line.startswith("≠"))

    def test_what_was_renamed_has_both_names(self):
        renamed = dataclasses.replace(GELU, candidate=NodeRecord(name="add_3", op="aten.add.Tensor"))

        assert table_of(rendered(location(renamed))) == ["gelu → add_3"]

    def test_a_name_is_not_taken_for_markup(self):
        assert table_of(rendered(location(row("[bold]x[/b]", local=(seen(),))))) == ["[bold]x[/b]"]


class TestWithoutACulprit:
    def text(self, **changes):
        found = location(**{"culprits": (), "table": (LINEAR, LINEAR), "rungs": (), **changes})
        lines = rendered(found, width=200)
        assert lines[3] == "culprit  none was found" or changes.get("rungs") or changes.get("reason")
        return " ".join(" ".join(lines).split())

    def test_of_an_equivalent_program_there_is_nothing_to_locate(self):
        text = self.text(verdict=Verdict.EQUIVALENT)

        assert "of 2 pairs of nodes, each fed the same values, none is wrong by itself" in text
        assert "the check found both sides equivalent: there is nothing to locate" in text

    def test_of_a_diverged_program_it_is_said_where_it_may_hide(self):
        backend = (Rung(name="backend", verdict=Verdict.DIVERGED),)

        assert "yet the whole program diverged" in self.text()
        assert "--cause" not in self.text()
        assert "--cause looks for a setting" in self.text(rungs=backend)

    def test_a_mapping_is_proposed_where_nodes_are_alone(self):
        lost = tuple(NodeRecord(name=f"mul_{number}", op="aten.mul.Tensor") for number in range(6))

        text = self.text(unmatched_reference=lost, unmatched_candidate=lost[:1])

        assert "--mapping can match the unmatched nodes listed below" in text
        assert (
            "unmatched 6 in the reference: mul_0 (aten.mul.Tensor), mul_1 (aten.mul.Tensor), mul_2 (aten.mul.Tensor), "
            "mul_3 (aten.mul.Tensor) and 2 more (--all) unmatched 1 in the candidate: mul_0 (aten.mul.Tensor)"
        ) in text

    def test_of_a_crash_it_is_said_that_nothing_was_compared(self):
        text = self.text(verdict=Verdict.CRASHED, table=(), coverage=None, reason="RuntimeError: no kernel")

        assert "check RuntimeError: no kernel" in text
        assert "no nodes were compared" in text
        assert "none is wrong" not in text

    def test_of_captures_nothing_is_claimed_about_a_node_by_itself(self):
        case = Case(program="two captures", transform="none", stages=("values",), policy="close")

        text = self.text(case=case, table=(DROPOUT,))

        assert "captures show what both sides computed, and not what a node does by itself" in text
        assert "none is wrong" not in text

    def test_what_could_not_be_judged_is_counted_and_named(self):
        unsure = [row(f"call_{number}", reason="it raised TypeError") for number in range(6)]

        text = self.text(table=(LINEAR, *unsure))

        assert "of 7 pairs of nodes, each fed the same values, none is wrong by itself; 6 could not be decided" in text
        assert "undecided call_0: it raised TypeError" in text
        assert "and 2 more (--all)" in text
        assert "not judged" in text


def named_long():
    name = "l_self_modules_transformer_modules_layers_modules_11_attention_projection"
    home = row(name, "scaled_dot_product_attention", "x", local=(seen(),), inherited=inherited(20.0))
    reader = row("add", "aten.add.Tensor", name, inherited=inherited(10.0))
    return location(home, reader, culprits=(culprit(name),), notes=("a note of many words " * 8,))


EVERY = {
    "one culprit": location(),
    "three culprits": location(culprits=tuple(culprit(f"gelu_{number}") for number in range(3))),
    "none": location(culprits=(), verdict=Verdict.EQUIVALENT),
    "nothing": location(culprits=(), table=(), coverage=None, rungs=(), cost=None, verdict=Verdict.INCONCLUSIVE),
    "long names": named_long(),
    "not finite": location(row("gelu", local=(seen(error=math.inf, nan_candidate=1, misplaced=1),))),
}


@pytest.mark.parametrize("found", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("width", [60, 80, 95, 96, 120])
def test_on_a_narrow_terminal_nothing_is_cut(found, width):
    lines = rendered(found, width=width)

    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [60, 80, 96])
def test_on_a_narrow_terminal_no_evidence_is_lost(width):
    text = " ".join(" ".join(rendered(location(), width=width)).split())

    for evidence in (
        "gelu of block.act",
        "return self.act(x)",
        "8 × noise",
        "19.5",
        "└╴dropout",
        "decompose ≠",
        "0.25",
    ):
        assert evidence in text


def test_in_a_pipe_it_is_plain_and_not_folded(capsys):
    print_location(named_long())

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "l_self_modules_transformer_modules_layers_modules_11_attention_projection  scaled" in out


def any_location():
    fields = typing.get_type_hints(Location)
    del fields["schema_version"]
    return st.builds(Location, **{name: values_of(hint) for name, hint in fields.items()})


class TestFile:
    @settings(max_examples=60, deadline=None)
    @given(any_location())
    def test_gives_back_any_location_bit_by_bit(self, found):
        written = to_json(found)

        assert identity(from_json(written, Location)) == identity(found)
        assert strictly_parsed(written)["kind"] == "location"

    @pytest.mark.parametrize("found", EVERY.values(), ids=EVERY)
    def test_is_read_as_whatever_it_is(self, found, tmp_path):
        write_report(found, tmp_path / "location.json")

        assert read_report(tmp_path / "location.json", None) == found
        assert read_report(tmp_path / "location.json", Location) == found

    def test_of_a_report_and_an_audit_are_told_apart(self):
        audit = Audit(
            case=reports.diverged().case, control=Verdict.EQUIVALENT, control_reason="", trials=(), inapplicable=()
        )

        assert from_json(to_json(audit), None) == audit
        assert from_json(to_json(reports.diverged()), None) == reports.diverged()
        assert "kind" not in json.loads(to_json(reports.diverged()))

    @pytest.mark.parametrize(
        ("given", "kind", "said"),
        [
            (to_json(location()), Report, "^this is a torchdelta location, not a report"),
            (to_json(reports.diverged()), Location, "^this is a torchdelta report, not a location"),
            (json.dumps({"kind": "graph", "schema_version": 1}), None, "of kind 'graph'.*: upgrade it$"),
            (json.dumps({"kind": ["location"], "schema_version": 1}), None, r"of kind \['location'\]"),
            (json.dumps({"kind": "location", "schema_version": 2}), None, "^location: verdict, .* missing$"),
            (json.dumps({"kind": "location", "schema_version": 99}), None, "location has schema 99, .*: upgrade"),
            (json.dumps({"kind": "location", "schema_version": 0}), None, "schema 0, .* reads 2: locate again$"),
        ],
    )
    def test_of_another_kind_or_schema_says_what_it_is(self, given, kind, said):
        with pytest.raises(ReportUnreadable, match=said):
            from_json(given, kind)

    def test_of_a_location_changes_only_together_with_its_version(self):
        records = (NodeRecord, Row, Rung, Location)
        fields = {record.__name__: [field.name for field in dataclasses.fields(record)] for record in records}

        # Whoever changes this changes what a location is: raise SCHEMA_VERSION with it.
        assert (locations.SCHEMA_VERSION, fields) == (
            2,
            {
                "NodeRecord": ["name", "op", "kinds", "handles", "module_path", "source_line", "inputs"],
                "Row": ["reference", "candidate", "how", "local", "local_gradients", "inherited", "reason"],
                "Rung": ["name", "verdict", "reason"],
                "Location": [
                    *("verdict", "environment", "case", "reason", "culprits", "table", "coverage"),
                    *("unmatched_reference", "unmatched_candidate", "rungs", "compiles", "notes", "cost"),
                    "schema_version",
                ],
            },
        )

    def test_is_read_and_shown_without_torch(self, tmp_path):
        write_report(location(), tmp_path / "location.json")
        code = (
            "import sys; sys.modules.update(torch=None, numpy=None, numba=None); import torchdelta.cli; "
            "sys.argv = ['torchdelta', 'show', sys.argv[1]]; torchdelta.cli.main()"
        )

        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, tmp_path / "location.json"], capture_output=True, text=True
        )

        assert (ran.returncode, ran.stderr) == (1, "")
        assert "culprit  aten.gelu.default  gelu of block.act" in ran.stdout


def test_a_comparison_that_raised_is_shown_with_what_it_raised():
    raised = Comparison(path="outputs", verdict=Verdict.CRASHED, reason="raised TypeError: no such argument")

    lines = rendered(location(row("gelu", local=(raised,))))

    assert any(line.startswith("!  gelu") and "raised TypeError: no such argument" in line for line in lines)
