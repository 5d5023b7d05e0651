"""What a report looks like on a terminal."""

import dataclasses
import io
import math
import re

import pytest
from rich.console import Console

from programs import reports
from torchdelta.records.case import Case
from torchdelta.records.comparison import Breach, Comparison, Worst
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.check import print_report


def rendered(report, *, width=100, verbose=False):
    """The lines a terminal of that width shows, without the blanks at their ends."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False, _environ={})
    print_report(report, console, verbose=verbose)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def line_with(text, lines):
    """The one line that has the text."""
    found = [line for line in lines if text in line]
    assert len(found) == 1, f"{text!r} is on {len(found)} lines of\n" + "\n".join(lines)
    return found[0]


def place_of(text, lines):
    return next(index for index, line in enumerate(lines) if text in line)


def test_a_healthy_report_is_one_screen():
    lines = rendered(reports.equivalent())

    assert lines == [
        "equivalent  models/mlp.py:build under inductor",
        "  policy noise, seed 0, torch 2.13.0",
        "  forward    equivalent    13 leaves, 0 bitwise identical; sees 1e-05",
        "  gradients  equivalent    12 leaves, 0 bitwise identical; sees 1e-05",
        "",
        "   leaf                                             error  allowed   at  reference  candidate  truth",
        "=  parameters['transformer.layers.0.attention.proj  2e-07    1e-06  1,3       0.25  0.2500002   0.25",
        "   ection.weight'].grad",
        "=  parameters['transformer.layers.1.attention.proj  2e-07    1e-06  1,3       0.25  0.2500002   0.25",
        "   ection.weight'].grad",
        "=  parameters['transformer.layers.2.attention.proj  2e-07    1e-06  1,3       0.25  0.2500002   0.25",
        "   ection.weight'].grad",
        "=  parameters['transformer.layers.3.attention.proj  2e-07    1e-06  1,3       0.25  0.2500002   0.25",
        "   ection.weight'].grad",
        "   and 21 more (--verbose)",
        "",
        "note  the program draws random numbers: the candidate was compiled with fallback_random, so that it",
        "      draws the same ones",
        "note  part of the program ran eagerly: Attempted to wrap RNN, GRU, or LSTM",
        "note  1 graph captured, 2 transformed calls",
    ]
    assert len(lines) <= 24


def test_a_diverged_report_says_what_is_worst_and_why():
    assert rendered(reports.diverged()) == [
        "diverged  models/mlp.py:build under inductor",
        "  policy noise, seed 0, torch 2.13.0",
        "  forward    equivalent    1 leaf, 0 bitwise identical; sees 1e-05",
        "  gradients  diverged      5 leaves, 3 diverged, 1 inconclusive",
        "",
        "   leaf                       error  allowed   at  reference  candidate  truth",
        "≠  parameters['worst'].grad       7    1e-06  1,3       0.25       7.25   0.25",
        "≠  parameters['worse'].grad       3    1e-06  1,3       0.25       3.25   0.25",
        "?  parameters['unsure'].grad  1e-07    1e-06  1,3       0.25  0.2500001   0.25",
        "=  parameters['near'].grad    9e-07    1e-06  1,3       0.25   0.250001   0.25",
        "=  outputs                    1e-07    1e-06  1,3       0.25  0.2500001   0.25",
        "",
        "why   gradients args[0].grad: shape: (3, 4) in the reference, (3,) in the candidate",
        "why   gradients parameters['worst'].grad: rms error is 7e+06 times what is allowed",
        "why   gradients parameters['worse'].grad: rms error is 3e+06 times what is allowed",
        "why   gradients parameters['unsure'].grad: there is no truth",
        "note  gradients of the input were asked for",
        "note  differs in stride, which does not count here (--verbose shows where)",
        "note  1 graph captured, 2 transformed calls",
    ]


def test_a_crashed_report_says_what_was_raised_and_what_did_not_run():
    assert rendered(reports.crashed()) == [
        "crashed  models/mlp.py:build under inductor",
        "  policy noise, seed 0, torch 2.13.0",
        "  forward    crashed       nothing compared",
        "  gradients  not run",
        "",
        "why   forward: NotImplementedError: backend='acme' raised: LoweringError: aten.foo has no lowering",
        "      --verbose shows the traceback",
        "note  1 graph captured, 2 transformed calls",
    ]


def test_a_reason_that_stages_share_is_given_once():
    lines = rendered(reports.inconclusive())

    assert line_with("why", lines) == (
        "why   forward and gradients: the transform did not happen: no transformed code ran at all"
    )
    assert line_with("captured", lines) == "note  0 graphs captured, 0 transformed calls, 2 untransformed"


class TestVerbose:
    def test_shows_what_it_cost(self):
        lines = rendered(reports.equivalent(), verbose=True)

        assert lines[-1] == "cost  reference 0.12 s, candidate 3.50 s; peak memory 300 MiB"

    def test_shows_the_traceback(self):
        lines = rendered(reports.crashed(), verbose=True)

        assert '  File "acme.py", line 7, in lower' in lines
        assert not any("--verbose" in line for line in lines)

    def test_shows_where_an_excused_breach_is(self):
        lines = rendered(reports.diverged(), verbose=True)

        assert "  outputs: stride: (4, 1) in the reference, (1, 3) in the candidate" in lines

    def test_shows_every_leaf_and_note(self):
        report = dataclasses.replace(reports.equivalent(), notes=tuple(f"note number {index}" for index in range(20)))

        lines = rendered(report, width=200, verbose=True)

        assert len([line for line in lines if line.startswith("=")]) == 25
        assert len([line for line in lines if line.startswith("note  note number")]) == 20


class TestNothingIsLeftOutSilently:
    def test_leaves(self):
        leaves = [reports.comparison(f"leaf{index:02}", Verdict.DIVERGED, error=100.0 - index) for index in range(30)]

        lines = rendered(reports.report(Stage.of("forward", tuple(leaves))))

        assert [line.split()[1] for line in lines if line.startswith("≠")] == [f"leaf{index:02}" for index in range(12)]
        assert "   and 18 more (--verbose)" in lines
        assert len([line for line in lines if line.startswith("why")]) == 5
        assert "      and 25 more (--verbose)" in lines

    def test_notes(self):
        report = dataclasses.replace(reports.equivalent(), notes=tuple(f"note number {index}" for index in range(20)))

        lines = rendered(report)

        assert len([line for line in lines if line.startswith("note")]) == 6
        assert lines[-1] == "      and 15 more (--verbose)"


class TestAsked:
    def test_shows_whatever_is_not_the_default(self):
        case = Case(
            program="p.py:build",
            transform="aot_eager",
            options={"dynamic": True, "mode": "max-autotune"},
            stages=("forward", "steps"),
            policy="sqnr>=35",
            seed=7,
            ignore=("dtype", "stride"),
            strict=("stride",),
            iterations=4,
            steps=1,
            optimizer="sgd",
            loss="losses.py:mse",
            deterministic=True,
            anomaly=True,
        )

        lines = rendered(dataclasses.replace(reports.equivalent(), case=case), width=300)

        assert lines[1] == (
            "  dynamic=True, mode=max-autotune, policy sqnr>=35, ignoring dtype and stride, strict about stride, "
            "4 iterations, 1 step of sgd, loss losses.py:mse, deterministic algorithms, anomaly mode, seed 7, "
            "torch 2.13.0"
        )

    def test_two_values_are_under_no_transform(self):
        stage = Stage.of("values", (reports.comparison("value"),))
        case = Case(program="two values", transform="none", stages=("values",))

        assert rendered(reports.report(stage, case=case))[0] == "equivalent  two values"


class TestEvidence:
    def shown(self, **changes):
        seen = dataclasses.replace(reports.comparison("outputs", Verdict.DIVERGED), **changes)
        lines = rendered(reports.report(Stage.of("forward", (seen,))))
        return line_with("≠", lines).split()[2:]

    def test_has_as_many_digits_as_it_takes_to_tell_the_values_apart(self):
        worst = Worst(index=(0,), reference=0.123456789, candidate=0.123456799, truth=0.123456789)

        assert self.shown(worst=worst)[2:] == ["0", "0.12345679", "0.1234568", "0.12345679"]

    @pytest.mark.parametrize(
        ("reference", "candidate", "truth", "expected"),
        [
            (math.nan, math.nan, 1.23456789, ["nan", "nan", "1.235"]),
            (0.0, -0.0, 0.0, ["0", "-0", "0"]),
            (-math.inf, 1e30, None, ["-inf", "1e+30", "–"]),
            (255, 0, 255, ["255", "0", "255"]),
            (True, False, None, ["True", "False", "–"]),
            ("(1+2j)", "(1-2j)", None, ["(1+2j)", "(1-2j)", "–"]),
        ],
    )
    def test_shows_values_of_every_kind(self, reference, candidate, truth, expected):
        worst = Worst(index=(2, 1), reference=reference, candidate=candidate, truth=truth)

        assert self.shown(worst=worst)[2:] == ["2,1", *expected]

    def test_of_a_leaf_that_was_not_measured_is_the_reason_alone(self):
        breach = Breach(clause="structure", reference="tuple", candidate="list")
        seen = Comparison(path="outputs", verdict=Verdict.DIVERGED, reason=str(breach), contract=(breach,))

        lines = rendered(reports.report(Stage.of("forward", (seen,))))

        assert "error" not in "\n".join(lines)
        assert line_with("why", lines) == (
            "why   forward outputs: structure: tuple in the reference, list in the candidate"
        )

    @pytest.mark.parametrize("width", [80, 100])
    @pytest.mark.parametrize("path", ["outputs[torch.float32]", "outputs[/b]", "outputs[bold]", "outputs[':smile:']"])
    def test_a_path_is_not_taken_for_markup(self, path, width):
        lines = rendered(reports.report(Stage.of("forward", (reports.comparison(path),))), width=width)

        assert path in line_with("=  ", lines)


class TestNarrow:
    @pytest.mark.parametrize("make", reports.ALL)
    @pytest.mark.parametrize("width", [60, 80, 95, 96, 120])
    def test_no_column_is_cut(self, make, width):
        lines = rendered(make(), width=width)

        assert "…" not in "".join(lines)
        assert max(map(len, lines)) <= width

    @pytest.mark.parametrize("width", [60, 80, 96])
    def test_no_evidence_is_lost(self, width):
        text = " ".join(" ".join(rendered(reports.diverged(), width=width)).split())

        for evidence in ("parameters['worst'].grad", "7.25", "1e-06", "1,3", "0.2500001"):
            assert evidence in text

    def test_a_healthy_report_is_one_screen_of_80_columns_too(self):
        lines = rendered(reports.equivalent(), width=80)

        assert len(lines) <= 24
        first = place_of("parameters", lines)
        assert lines[first : first + 3] == [
            "=  parameters['transformer.layers.0.attention.projection.weight'].grad: error",
            "   2e-07, allowed 1e-06",
            "   at [1,3] reference 0.25, candidate 0.2500002, truth 0.25",
        ]


def test_a_report_in_a_pipe_is_not_folded(capsys):
    print_report(reports.equivalent())

    out = capsys.readouterr().out
    assert "parameters['transformer.layers.0.attention.projection.weight'].grad" in out
    assert not re.search("\x1b", out)
