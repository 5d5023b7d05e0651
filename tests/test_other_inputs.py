"""Candidates that are meant for more than the user's own inputs run with others: other sizes, or other values."""

import operator

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.program.examples import redraw
from torchdelta.program.programs import Program


def mean(x):
    return x.sum(0) / x.shape[0]


def bake_size(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if node.target is operator.truediv:
            node.args = (node.args[0], 6)
    return graph_module


def double_and_halve(graph_module, example_inputs):
    """Multiply the divisor and the quotient by two, which changes no value."""
    for node in list(graph_module.graph.nodes):
        if node.target is operator.truediv:
            with graph_module.graph.inserting_before(node):
                node.args = (
                    graph_module.graph.call_function(operator.mul, (node.args[0], 2)),
                    graph_module.graph.call_function(operator.mul, (node.args[1], 2)),
                )
    return graph_module


X = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),)


def test_a_size_that_a_pass_bakes_in_is_seen_with_dynamic_sizes():
    report = td.check(mean, X, transform=bake_size, options={"dynamic": True})

    diverged = [each.path for each in report.comparisons if each.verdict is Verdict.DIVERGED]
    assert diverged == ["iterations[1].outputs", "iterations[2].outputs"]
    assert any("iterations[1] has other sizes: args[0] [6, 4] → [7, 5]" in note for note in report.notes)
    assert any("iterations[2] has other sizes: args[0] [6, 4] → [13, 9]" in note for note in report.notes)


def bake_symbols(graph_module, example_inputs):
    """Replace each symbolic input by the number that it had when the graph was captured."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.SymInt):
            for user in list(node.users):
                user.replace_input_with(node, int(value.node.hint))
    graph_module.recompile()
    return graph_module


def clone_outputs(graph_module, example_inputs):
    return lambda *args: [each.clone() for each in graph_module(*args)]


QUOTIENTS = {
    "the half": lambda x: x.sum(0) * (x.shape[0] // 2),
    "the quarter": lambda x: x.sum(0) * (x.shape[0] // 4),
    "a slice": lambda x: x[: x.shape[0] // 2].sum(0) * 2,
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_quotient_of_a_size_that_a_pass_bakes_in_is_seen_with_sizes_twice_as_large(name):
    wrong = td.check(QUOTIENTS[name], X, transform=bake_symbols, options={"dynamic": True})
    right = td.check(QUOTIENTS[name], X, transform=clone_outputs, options={"dynamic": True})

    assert wrong.verdict is Verdict.DIVERGED
    assert right.verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize(("one", "verdict"), [(bake_symbols, Verdict.DIVERGED), (clone_outputs, Verdict.EQUIVALENT)])
def test_a_whole_number_that_a_pass_bakes_in_is_seen_with_another_number(one, verdict):
    report = td.check(lambda x, n: x * n, (*X, 7), transform=one, options={"dynamic": True})

    assert report.verdict is verdict
    assert any("args[0] [6, 4] → [7, 5], args[1] 7 → 8" in note for note in report.notes)


def test_a_number_that_has_to_fit_a_size_changes_with_it_or_stays():
    rows = td.check(lambda x, n: x.view(n, -1) * 2, (*X, 6), transform="aot_eager", options={"dynamic": True})
    axis = td.check(lambda x, n: x.sum(n), (torch.randn(3, 4, 5), 2), transform="aot_eager", options={"dynamic": True})

    assert any("args[0] [6, 4] → [7, 5], args[1] 6 → 7" in note for note in rows.notes)
    assert any("args[0] [3, 4, 5] → [4, 5, 6]" in note and "args[1]" not in note for note in axis.notes)
    assert rows.verdict is axis.verdict is Verdict.EQUIVALENT


def test_a_program_that_takes_no_size_twice_as_large_is_asked_about_the_neighbour_alone():
    def short(x):
        assert x.shape[0] < 10
        return x * 2

    report = td.check(short, (torch.randn(6),), transform="aot_eager", options={"dynamic": True})

    assert report.verdict is Verdict.EQUIVALENT
    assert any("iterations[1] has other sizes: args[0] [6] → [7]" in note for note in report.notes)
    assert any("not asked about sizes at least twice as large: the program accepts" in note for note in report.notes)


@pytest.mark.parametrize("transform", [double_and_halve, "aot_eager"])
def test_a_correct_candidate_is_equivalent_with_other_sizes(transform):
    report = td.check(mean, X, transform=transform, options={"dynamic": True})

    assert report.verdict is Verdict.EQUIVALENT
    assert "iterations[1].outputs" in [each.path for each in report.comparisons]


def test_sizes_that_the_program_has_fixed_stay():
    torch.manual_seed(0)
    report = td.check(nn.Linear(4, 3), X, transform="aot_eager", options={"dynamic": True})

    assert report.verdict is Verdict.EQUIVALENT
    assert any("args[0] [6, 4] → [7, 4]" in note for note in report.notes)


def test_a_program_that_accepts_no_other_size_is_not_asked():
    def fixed(x):
        assert x.shape == (6, 4)
        return x * 2

    report = td.check(fixed, X, transform="aot_eager", options={"dynamic": True})

    assert report.verdict is Verdict.EQUIVALENT
    assert any("not asked about other sizes" in note for note in report.notes)


OPTIONS = {"export": {}, "decompose": {"unchanged": "ok"}}


def add_apart(x, y):
    return torch.sigmoid(x) + y


@pytest.mark.parametrize("transform", ["export", "decompose"])
def test_an_export_that_took_two_inputs_for_one_is_wrong_for_others(transform):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    report = td.check(add_apart, (x, x), transform=transform, options=OPTIONS[transform])

    diverged = [each.path for each in report.comparisons if each.verdict is Verdict.DIVERGED]
    assert diverged == ["iterations[1].outputs"]
    assert any("none of its inputs shares memory" in note for note in report.notes)


@pytest.mark.parametrize("transform", ["export", "decompose"])
def test_an_export_of_views_is_right_for_inputs_apart(transform):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    report = td.check(add_apart, (x, x.view(4, 3)), transform=transform, options=OPTIONS[transform])

    assert report.verdict is Verdict.EQUIVALENT
    assert any("none of its inputs shares memory" in note for note in report.notes)


@pytest.mark.parametrize("dynamic", [True, 0])
def test_an_export_with_open_sizes_is_run_with_other_sizes(dynamic):
    report = td.check(mean, X, transform="export", options={"dynamic": dynamic})

    assert report.verdict is Verdict.EQUIVALENT
    expected = "[6, 4] → [7, 5]" if dynamic is True else "[6, 4] → [7, 4]"
    assert any(expected in note for note in report.notes)


def test_sizes_of_one_symbol_change_together():
    a, b = torch.randn(6, 4), torch.randn(6, 4)

    report = td.check(lambda a, b: a + b, (a, b), transform="export", options={"dynamic": True})

    assert report.verdict is Verdict.EQUIVALENT
    assert any("args[0] [6, 4] → [7, 5], args[1] [6, 4] → [7, 5]" in note for note in report.notes)


def test_an_export_whose_sizes_are_all_fixed_is_not_asked_about_others():
    torch.manual_seed(0)
    weight = torch.randn(6, 4)

    report = td.check(lambda x: x * weight, X, transform="export", options={"dynamic": True})

    assert report.verdict is Verdict.EQUIVALENT
    assert any("no size of its inputs is dynamic" in note for note in report.notes)


class Counting(nn.Module):
    """Appends to a list among its inputs, as a key-value cache does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x, cache):
        cache.append(self.layer(x))
        return torch.stack(cache).sum(0)


@pytest.mark.parametrize("stages", ["forward,gradients", "forward,gradients,steps"])
def test_each_iteration_and_step_gets_inputs_that_no_call_has_changed(stages):
    report = td.check(Counting(), (*X, []), transform="aot_eager", stages=stages, iterations=3)

    assert report.verdict is Verdict.EQUIVALENT
    assert not any("did not run" in stage.reason for stage in report.stages)


def test_inputs_of_float8_are_drawn_nearer_if_the_program_refuses_other_ones():
    x = torch.arange(12).reshape(4, 3).to(torch.float8_e4m3fn)
    program = Program(name="float8", call=torch.relu, args=(x,))

    draws = [draw.args[0] for draw in redraw(program, seed=0)]

    assert len(draws) > 1
    assert all(draw.dtype is x.dtype and draw.float().isfinite().all() for draw in draws)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_exported_program_that_returns_float8_is_asked_with_other_values(dtype):
    class Narrow(torch.nn.Module):
        def forward(self, x):
            return x.to(dtype)

    report = td.check(Narrow(), (torch.linspace(-1, 1, 8),), transform="export")

    assert report.verdict is td.Verdict.EQUIVALENT
    assert any("other values" in note for note in report.notes)
