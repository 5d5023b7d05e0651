"""A list of passes with one wrong among them: it is named, with the node, and what comes behind it only inherits."""

import functools
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import torchdelta as td
from torchdelta import Verdict
from torchdelta.check.check import Check
from torchdelta.passes.pipeline import NOTHING_CHANGED

EQUIVALENT, DIVERGED, INCONCLUSIVE, CRASHED = (
    Verdict.EQUIVALENT,
    Verdict.DIVERGED,
    Verdict.INCONCLUSIVE,
    Verdict.CRASHED,
)
aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        hidden = hidden + torch.sigmoid(hidden)
        return torch.tanh(self.second(hidden)) * 2


def batch(requires_grad=True):
    return torch.linspace(-2, 2, 24).reshape(3, 8).sin().requires_grad_(requires_grad)


@pytest.fixture(scope="module")
def graph():
    return torch.export.export(Model(), (batch(),)).module()


def rewritten(target, rewrite):
    """Return a pass that hands every call of an operator to a function, which says what is read in its place."""

    def rewriting(graph: Graph):
        hits = [node for node in graph.nodes if node.target is target]
        for node in hits:
            with graph.inserting_before(node):
                made = rewrite(graph, node)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
        assert hits, f"no {target} in the graph"

    return rewriting


def named(name, function):
    """Let a pass be called something, as a function of a user's is."""

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    wrapper.__qualname__ = name
    return wrapper


def nothing(graph_module, example_inputs):
    """Leave the graph as it is."""


def no_dead_code(graph_module: GraphModule):
    graph_module.graph.eliminate_dead_code()
    return graph_module


def spelt_out_sigmoid(graph, node):
    negative = graph.call_function(aten.neg.default, node.args)
    grown = graph.call_function(aten.add.Scalar, (graph.call_function(aten.exp.default, (negative,)), 1.0))
    return graph.call_function(aten.reciprocal.default, (grown,))


def clamp_for_relu(graph, node):
    return graph.call_function(aten.clamp_min.default, (node.args[0], 0.0))


def leaky_relu(graph, node):
    return graph.call_function(aten.leaky_relu.default, (node.args[0], 0.01))


def twice(graph, node):
    return graph.call_function(aten.add.Tensor, (node.args[0], node.args[0]))


def a_bit_more(graph, node):
    return graph.call_function(aten.mul.Tensor, (node.args[0], 2.002))


def swapped_sum(graph, node):
    return graph.call_function(aten.add.Tensor, node.args[::-1])


def detached(graph: Graph):
    for node in graph.nodes:
        if node.target is aten.tanh.default:
            with graph.inserting_before(node):
                node.args = (graph.call_function(aten.detach.default, node.args),)


SIGMOID = named("spell_sigmoid_out", rewritten(aten.sigmoid.default, spelt_out_sigmoid))
CLAMP = named("clamp_for_relu", rewritten(aten.relu.default, clamp_for_relu))
LEAKY = named("leaky_relu", rewritten(aten.relu.default, leaky_relu))
TWICE = named("add_instead_of_mul", rewritten(aten.mul.Tensor, twice))
MORE = named("a_bit_more", rewritten(aten.mul.Tensor, a_bit_more))
SWAPPED = named("swapped_sum", rewritten(aten.add.Tensor, swapped_sum))


def rows_of(pipeline):
    return {row.name: row for row in pipeline.rows}


class TestTheWrongPass:
    def test_is_named_among_twelve_with_its_node_and_the_others_are_not(self, graph):
        ways = [nothing, no_dead_code, SWAPPED, SIGMOID, nothing, no_dead_code, LEAKY, nothing, TWICE, SWAPPED, nothing]
        found = td.check_pipeline(graph, (batch(),), [*ways, no_dead_code])

        assert len(found.rows) == 12
        assert found.verdict is DIVERGED
        assert found.first is found.rows[6]
        assert found.first.name == "leaky_relu"
        assert found.first.culprit.node == "relu"
        assert "torch.relu(self.first(x))" in found.first.culprit.source_line
        assert [row.name for row in found.rows if row.is_guilty] == ["leaky_relu"]
        assert found.rows[6].error > found.rows[6].noise

    def test_is_nobody_where_all_are_right(self, graph):
        found = td.check_pipeline(graph, (batch(),), [nothing, SIGMOID, CLAMP, TWICE, SWAPPED, no_dead_code])

        assert found.verdict is EQUIVALENT
        assert found.first is None
        assert [row.changed for row in found.rows] == [False, True, True, True, True, False]
        assert {row.introduced for row in found.rows} == {EQUIVALENT}

    def test_is_told_from_one_that_only_inherits_and_from_a_second_wrong_one(self, graph):
        found = td.check_pipeline(graph, (batch(),), [LEAKY, SIGMOID, MORE, no_dead_code])
        rows = rows_of(found)

        assert found.first.name == "leaky_relu"
        assert rows["spell_sigmoid_out"].introduced is EQUIVALENT
        assert rows["spell_sigmoid_out"].against_original is DIVERGED
        assert rows["spell_sigmoid_out"].effect == "inherited"
        assert rows["a_bit_more"].introduced is DIVERGED
        assert rows["a_bit_more"].culprit.node == "mul"
        assert rows["no_dead_code"].effect == "unchanged"

    def test_shows_only_in_gradients_where_an_input_requires_them(self, graph):
        caught = td.check_pipeline(graph, (batch(),), [TWICE, detached])
        unasked = td.check_pipeline(graph, (batch(),), [TWICE, detached], stages="forward", ignore="requires_grad")

        assert caught.first.name == "detached"
        # what is inserted behind a node is held to be a part of it
        assert caught.first.culprit.node == "linear_1"
        assert caught.first.culprit.stage == "gradients"
        assert unasked.first is None

    def test_writes_into_a_weight_and_leaves_the_nodes_as_they_were(self, graph):
        def scaled(graph_module: GraphModule):
            with torch.no_grad():
                graph_module.first.weight.data.mul_(1.01)

        found = td.check_pipeline(graph, (batch(),), [no_dead_code, scaled])

        assert found.first.name == "scaled"

    def test_drops_what_the_graph_writes_to_its_input(self):
        def adds(x):
            x.add_(1.0)
            return x * 3

        def leaves_alone(graph_module: GraphModule):
            for node in graph_module.graph.nodes:
                if node.target == "add_":
                    node.target = "add"

        found = td.check_pipeline(symbolic_trace(adds), (batch(False),), [leaves_alone])

        assert found.first.name == "leaves_alone"
        assert found.verdict is DIVERGED

    def test_is_still_the_first_when_a_later_one_mends_it(self, graph):
        def mended(graph: Graph):
            for node in graph.nodes:
                if node.target is aten.leaky_relu.default:
                    node.target, node.args = aten.relu.default, node.args[:1]

        found = td.check_pipeline(graph, (batch(),), [LEAKY, mended])

        assert found.first.name == "leaky_relu"
        assert found.rows[1].against_original is EQUIVALENT
        assert "again" in found.rows[1].note


class TestAPassThatFails:
    def test_is_named_and_those_behind_it_are_not_run(self, graph):
        has_run = []

        def raises(graph_module, example_inputs):
            raise ValueError("this shape is not known")

        def last(graph_module):
            has_run.append(True)

        found = td.check_pipeline(graph, (batch(),), [SIGMOID, raises, last])

        assert found.verdict is CRASHED
        assert found.first.name == "raises"
        assert found.first.failure.type == "ValueError"
        assert "this shape is not known" in found.first.reason
        assert not has_run
        assert not found.rows[2].has_run
        assert "raises" in found.rows[2].note

    def test_leaves_a_graph_that_does_not_run(self, graph):
        def breaks(graph: Graph):
            for node in graph.nodes:
                if node.target is aten.tanh.default:
                    node.target, node.args = aten.mm.default, (node.args[0], node.args[0])

        found = td.check_pipeline(graph, (batch(),), [breaks, SIGMOID])

        assert found.first.name == "breaks"
        assert found.first.introduced is CRASHED
        assert found.first.failure is not None
        assert found.rows[1].introduced is None
        assert "does not run" in found.rows[1].reason

    def test_returns_no_graph_so_that_nothing_can_run_behind_it(self, graph):
        def black_box(graph_module, example_inputs):
            return lambda x: graph_module(x)

        found = td.check_pipeline(graph, (batch(),), [black_box, SIGMOID])

        assert found.rows[0].introduced is EQUIVALENT
        assert not found.rows[1].has_run


class TestEveryKindOfPass:
    Result = namedtuple("Result", ["graph_module", "modified"])

    def wrong(self, graph):
        LEAKY(graph)
        return graph

    def test_is_caught(self, graph):
        def of_both(graph_module, example_inputs):
            assert torch.equal(example_inputs[0], batch())
            self.wrong(graph_module.graph)

        def of_module(gm):
            self.wrong(gm.graph)

        def of_graph(graph):
            self.wrong(graph)

        def of_annotated(g: "torch.fx.Graph"):
            self.wrong(g)

        def with_option(gm, verbose=False):
            assert verbose is False
            self.wrong(gm.graph)

        def returning_another(gm: GraphModule):
            return GraphModule(gm, self.wrong(gm.graph))

        def returning_graph(g: Graph):
            return self.wrong(g)

        def returning_result(gm):
            return self.Result(GraphModule(gm, self.wrong(gm.graph)), True)

        def returning_count(graph):
            self.wrong(graph)
            return 1

        ways = [of_both, of_module, of_graph, of_annotated, with_option]
        ways += [returning_another, returning_graph, returning_result, returning_count]
        for way in (*ways, functools.partial(of_module)):
            found = td.check_pipeline(graph, (batch(False),), [way], semantic=False)

            assert found.first is not None, way
            assert found.first.culprit.node == "relu", way

    def test_that_changes_nothing_costs_nothing_and_is_no_answer(self, graph, monkeypatch):
        monkeypatch.setattr(Check, "run", lambda self: pytest.fail("something was checked"))
        found = td.check_pipeline(graph, (batch(),), [nothing, no_dead_code])

        assert found.verdict is INCONCLUSIVE
        assert NOTHING_CHANGED in found.notes
        assert [row.changed for row in found.rows] == [False, False]

    def test_leaves_the_users_graph_and_generators_alone(self, graph):
        before, state = str(graph.graph), torch.get_rng_state()
        weight = graph.first.weight.clone()

        def draws(graph_module: GraphModule):
            torch.rand(3)
            graph_module.first.weight.data.zero_()

        td.check_pipeline(graph, (batch(),), [LEAKY, draws])

        assert str(graph.graph) == before
        assert torch.equal(graph.first.weight, weight)
        assert torch.equal(torch.get_rng_state(), state)
        assert all("custom" not in node.meta for node in graph.graph.nodes)


class TestTheRecord:
    def test_comes_back_from_json_as_it_was(self, graph):
        found = td.check_pipeline(graph, (batch(),), [LEAKY, SIGMOID])

        assert td.from_json(td.to_json(found), type(found)) == found

    def test_reads_as_a_table(self, graph):
        found = td.check_pipeline(graph, (batch(),), [nothing, LEAKY, SIGMOID])
        head, unchanged, guilty, inherited, *_ = str(found).splitlines()

        assert "diverged" in head
        assert "leaky_relu" in head
        assert unchanged.split()[1:] == ["nothing", "unchanged"]
        assert guilty.split()[1:3] == ["leaky_relu", "diverged"]
        assert "aten.relu.default (relu)" in guilty
        assert inherited.split()[1:3] == ["spell_sigmoid_out", "inherited"]


class TestWhatMakesNoSense:
    def test_is_refused(self, graph):
        with pytest.raises(td.UsageError, match=r"symbolic_trace"):
            td.check_pipeline(Model(), (batch(),), [nothing])
        with pytest.raises(td.UsageError, match="no pass was given"):
            td.check_pipeline(graph, (batch(),), [])
        with pytest.raises(td.UsageError, match="not int"):
            td.check_pipeline(graph, (batch(),), [3])

    def test_is_a_graph_that_fails_by_itself(self, graph):
        with pytest.raises(td.ProgramError, match="fails when run eagerly"):
            td.check_pipeline(graph, (torch.ones(3, 9),), [nothing])
