"""Versions of a graph while it is rewritten: taken where something changed, and judged one after the other."""

import threading

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from torchdelta._torch.compile.graph_versions import Chain, key_of
from torchdelta._torch.graphs.handles import handles_of
from torchdelta.passes.watch import ChainJudge
from torchdelta.records.case import CheckOptions

aten = torch.ops.aten


def traced():
    graph = Graph()
    x = graph.placeholder("x")
    sine = graph.call_function(aten.sin.default, (x,))
    total = graph.call_function(aten.add.Tensor, (sine, x))
    graph.output((graph.call_function(aten.relu.default, (total,)),))
    return GraphModule({}, graph)


def node_of(module, target):
    return next(node for node in module.graph.nodes if node.target is target)


def chain_of(module, *steps):
    chain = Chain(phase="post-grad", module=module)
    chain.look("")
    for step in steps:
        step(module)
        chain.look(step.__name__)
    chain.end()
    return chain


def does_nothing(module):
    module.graph.lint()


def wrong(module):
    node_of(module, aten.relu.default).target = aten.sigmoid.default


def right(module):
    node = node_of(module, aten.add.Tensor)
    node.args = node.args[::-1]


def broken(module):
    """Leave a graph that does not run."""
    node_of(module, aten.sin.default).target = aten.mm.default


def mended(module):
    node_of(module, aten.mm.default).target = aten.sin.default


def draws(module):
    node = node_of(module, aten.sin.default)
    with module.graph.inserting_before(node):
        noise = module.graph.call_function(aten.rand_like.default, node.args)
        node.args = (module.graph.call_function(aten.add.Tensor, (node.args[0], noise)),)


def judged(chain, **values):
    judge = ChainJudge(chain=chain, label="graph 0", options=CheckOptions(policy="noise", seed=0))
    judge.judge(values or {"x": torch.linspace(-2, 2, 12).reshape(3, 4)})
    return judge


class TestTaking:
    def test_takes_a_version_for_each_change_and_none_without(self):
        chain = chain_of(traced(), does_nothing, right, does_nothing, wrong)

        assert [version.name for version in chain.versions] == ["", "right", "wrong"]

    def test_leaves_versions_as_they_were_although_the_graph_goes_on(self):
        module = traced()
        x = torch.linspace(-1, 1, 5)
        before = module(x)[0]
        chain = chain_of(module, wrong)

        assert torch.equal(chain.versions[0].as_module(x)[0], before)
        assert torch.equal(chain.versions[1].as_module(x)[0], GraphModule({}, module.graph)(x)[0])
        assert chain.module is None

    def test_gives_the_copies_of_a_node_one_handle_and_the_node_itself_none(self):
        module = traced()
        first, second = (version.as_module for version in chain_of(module, wrong).versions)

        assert handles_of(node_of(first, aten.relu.default)) == handles_of(node_of(second, aten.sigmoid.default))
        assert handles_of(node_of(first, aten.sin.default)) != handles_of(node_of(first, aten.relu.default))
        assert not handles_of(node_of(module, aten.sin.default))

    def test_sorts_what_a_pass_has_not_sorted_yet(self):
        def moved(module):
            node_of(module, aten.relu.default).append(node_of(module, aten.add.Tensor))

        module = traced()
        x = torch.linspace(-1, 1, 5)
        before = module(x)[0]

        assert torch.equal(chain_of(module, moved).versions[1].as_module(x)[0], before)

    def test_sees_a_change_in_a_graph_inside_of_another(self):
        def inner_wrong(module):
            wrong(module.inner)

        graph = Graph()
        graph.output((graph.call_module("inner", (graph.placeholder("x"),)),))
        chain = chain_of(GraphModule({"inner": traced()}, graph), does_nothing, inner_wrong)
        x = torch.linspace(-1, 1, 5)
        first, second = (version.as_module(x)[0][0] for version in chain.versions)

        assert not torch.equal(first, second)

    @pytest.mark.parametrize("change", [wrong, right, draws])
    def test_tells_graphs_apart_by_what_they_do_and_not_by_names(self, change):
        one, other = traced(), traced()
        node_of(other, aten.sin.default)._rename("another")

        assert key_of(one) == key_of(other)
        change(other)
        assert key_of(one) != key_of(other)

    def test_tells_numbers_of_different_kinds_apart(self):
        keys = {
            key_of(symbolic_trace(function)) for function in (lambda x: x * 1, lambda x: x * 1.0, lambda x: x * True)
        }

        assert len(keys) == 3


class TestJudging:
    def test_names_the_first_that_is_wrong(self):
        judge = judged(chain_of(traced(), right, wrong))
        (finding,) = judge.findings

        assert (finding.name, finding.phase, finding.graph) == ("wrong", "post-grad", "graph 0")
        assert finding.culprit.op == "aten.relu.default"
        assert judge.is_checked

    def test_names_nobody_where_all_are_right(self):
        judge = judged(chain_of(traced(), right))

        assert judge.findings == []
        assert judge.notes == []
        assert judge.is_checked

    def test_goes_past_what_does_not_run_and_says_so(self):
        judge = judged(chain_of(traced(), broken, wrong, mended))
        (finding,) = judge.findings

        assert finding.name == "mended"
        assert "broken, wrong before it" in finding.reason
        assert any("behind broken does not run eagerly" in note for note in judge.notes)
        assert not judge.is_checked

    def test_does_not_hold_other_draws_against_each_other_but_what_lies_on_either_side(self):
        judge = judged(chain_of(traced(), right, draws, wrong))

        assert [finding.name for finding in judge.findings] == ["wrong"]
        assert any("draws draws other random numbers" in note for note in judge.notes)
        assert not judge.is_checked

    def test_refuses_a_graph_whose_inputs_are_not_there(self):
        with pytest.raises(Exception, match="x is among its inputs"):
            judged(chain_of(traced(), wrong), y=torch.ones(3))

    def test_leaves_other_threads_what_they_compiled(self):
        visits, runs = [], []

        def counting(graph_module, example_inputs):
            return lambda *args: runs.append(1) or graph_module.forward(*args)

        double = torch.compile(lambda x: x * 2, backend=counting)

        def elsewhere(x):
            visits.append(1)
            thread = threading.Thread(target=double, args=(torch.ones(2),))
            thread.start()
            thread.join()
            return x * 1

        module = traced()
        with module.graph.inserting_before(node_of(module, aten.sin.default)):
            visit = module.graph.call_function(elsewhere, node_of(module, aten.sin.default).args)
        node_of(module, aten.sin.default).args = (visit,)
        judged(chain_of(module, wrong))
        torch._dynamo.reset()

        assert len(runs) == len(visits) > 1
