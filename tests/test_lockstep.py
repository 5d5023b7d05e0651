"""Two graphs side by side: what is wrong by itself is told from what was given wrong already."""

import copy
import operator

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace

import torchdelta as td
from torchdelta.locate.local import LocalJudge
from torchdelta.locate.side_by_side import compare_graphs
from torchdelta.records.verdict import Verdict

aten = torch.ops.aten


def compared(reference, candidate, *inputs, **options):
    return compare_graphs(reference, candidate, list(inputs), LocalJudge(), "given", **options)


def culprits(found):
    return [judged.culprit.name for judged in found.judged if judged.culprit is not None]


def by_name(found):
    return {judged.reference.name: judged for judged in found.judged}


def traced(function):
    module = symbolic_trace(function)
    td.assign_handles(module)
    return module


def chain(x):
    first = torch.sin(x)
    second = torch.cos(first)
    return torch.exp(second)


def spoiled(graph_module, name, target):
    changed = copy.deepcopy(graph_module)
    next(node for node in changed.graph.nodes if node.name == name).target = target
    changed.recompile()
    return changed


def test_what_comes_after_a_wrong_node_inherits_and_is_not_blamed():
    module = traced(chain)
    found = compared(module, spoiled(module, "cos", torch.tan), torch.randn(32))
    seen = by_name(found)

    assert culprits(found) == ["cos"]
    assert seen["sin"].local == seen["sin"].inherited == ()
    assert seen["exp"].local == ()
    assert seen["exp"].inherited[0].verdict is Verdict.DIVERGED


def test_two_wrong_nodes_are_both_blamed():
    module = traced(chain)
    wrong = spoiled(spoiled(module, "sin", torch.asinh), "exp", torch.expm1)

    assert culprits(compared(module, wrong, torch.randn(32))) == ["sin", "exp"]


def test_equal_graphs_have_no_culprit():
    module = traced(chain)
    found = compared(module, copy.deepcopy(module), torch.randn(32))

    assert culprits(found) == []
    assert all(judged.local == () and judged.inherited == () for judged in found.judged)


def test_a_value_is_compared_as_it_was_before_it_was_overwritten():
    def overwriting(x):
        sums = x + 1.0
        return torch.relu_(sums) * 2.0

    reference = traced(overwriting)
    candidate = copy.deepcopy(reference)
    next(node for node in candidate.graph.nodes if node.name == "add").target = operator.sub
    candidate.recompile()
    found = compared(reference, candidate, torch.randn(64))

    assert culprits(found) == ["add"]
    # before relu_ there are negative numbers: a logger that keeps an alias would have lost them
    assert by_name(found)["add"].local[0].measurement.max_abs == pytest.approx(2.0, abs=1e-6)


def test_inputs_of_the_caller_are_not_written_to():
    def writing(x):
        return x.add_(1.0)

    x = torch.zeros(4)
    module = traced(writing)
    compared(module, copy.deepcopy(module), x)

    assert torch.equal(x, torch.zeros(4))


def test_lists_tuples_and_dicts_are_compared_leaf_by_leaf():
    def many(x):
        halves = torch.chunk(x, 2)
        return {"both": [halves[0], halves[1]], "sum": halves[0] + halves[1]}

    reference = traced(many)
    candidate = copy.deepcopy(reference)
    chunk = next(node for node in candidate.graph.nodes if node.name == "chunk")
    with candidate.graph.inserting_after(chunk):
        turned = candidate.graph.call_function(lambda halves: tuple(reversed(halves)), (chunk,))
    chunk.replace_all_uses_with(turned, lambda user: user is not turned)
    candidate.recompile()

    assert culprits(compared(reference, copy.deepcopy(reference), torch.randn(8))) == []
    assert culprits(compared(reference, candidate, torch.randn(8)))[:1] == ["chunk"]


def test_dropout_draws_the_same_on_both_sides():
    def dropping(x):
        return torch.nn.functional.dropout(torch.nn.functional.dropout(x, 0.5, True) + 1.0, 0.5, True)

    module = traced(dropping)

    assert culprits(compared(module, copy.deepcopy(module), torch.randn(256))) == []


def test_a_dropped_residual_is_blamed_on_the_sum_and_not_on_its_reader():
    def residual(x):
        inner = torch.tanh(x)
        total = inner + x
        return torch.sin(total)

    reference = traced(residual)
    candidate = copy.deepcopy(reference)
    nodes = {node.name: node for node in candidate.graph.nodes}
    nodes["add"].replace_all_uses_with(nodes["tanh"])
    candidate.recompile()

    assert culprits(compared(reference, candidate, torch.randn(64))) == ["add"]


def test_swapped_operands_are_blamed_on_who_reads_them():
    def product(x, y):
        return torch.matmul(torch.sin(x), torch.cos(y))

    reference = traced(product)
    candidate = copy.deepcopy(reference)
    matmul = next(node for node in candidate.graph.nodes if node.name == "matmul")
    matmul.args = (matmul.args[1], matmul.args[0])
    candidate.recompile()

    assert culprits(compared(reference, candidate, torch.randn(8, 8), torch.randn(8, 8))) == ["matmul"]


def test_a_sum_whose_operands_changed_places_is_right():
    def total(x, y):
        return torch.sin(x) + torch.cos(y)

    reference = traced(total)
    candidate = copy.deepcopy(reference)
    add = next(node for node in candidate.graph.nodes if node.name == "add")
    add.args = (add.args[1], add.args[0])
    candidate.recompile()

    assert culprits(compared(reference, candidate, torch.randn(8), torch.randn(8))) == []


def test_the_gradient_alone_can_be_wrong():
    def squared(x, weight):
        return torch.sin(x * weight)

    reference = traced(squared)
    candidate = copy.deepcopy(reference)
    mul = next(node for node in candidate.graph.nodes if node.name == "mul")
    with candidate.graph.inserting_after(mul):
        detached = candidate.graph.call_method("detach", (mul,))
    mul.replace_all_uses_with(detached, lambda user: user is not detached)
    candidate.recompile()
    weight = torch.randn(16, requires_grad=True)

    assert culprits(compared(reference, candidate, torch.randn(16), weight)) == ["mul"]
    assert culprits(compared(reference, candidate, torch.randn(16), weight, with_gradients=False)) == []


def test_a_graph_that_raises_midway_is_reported_up_to_there():
    module = traced(chain)

    def refuse(value):
        raise ValueError("no")

    found = compared(module, spoiled(module, "cos", refuse), torch.randn(4))

    assert [judged.reference.name for judged in found.judged] == ["sin"]
    assert found.notes == ("cos raised ValueError: no; up to there both were run",)


def test_graphs_with_nothing_in_common_are_inconclusive_and_cover_nothing():
    one, other = traced(lambda x: torch.sin(x)), traced(lambda x: torch.erf(x.reshape(2, 2)).sum())
    found = td.locate(one, (torch.zeros(4),), candidate=other)

    assert found.coverage.matched == 0
    assert found.culprits == ()
    assert found.verdict is Verdict.INCONCLUSIVE
    assert any("the check as a whole says diverged" in note for note in found.notes)


def test_a_mapping_of_unknown_nodes_is_refused_with_the_nearest_name():
    module = traced(chain)
    with pytest.raises(td.UsageError, match="sin"):
        td.locate(module, (torch.randn(4),), candidate=copy.deepcopy(module), mapping={"sinn": "sin"})


def test_a_mapping_of_the_user_comes_before_any_other():
    reference, candidate = traced(chain), Graph()
    x = candidate.placeholder("x")
    first = candidate.call_function(torch.sin, (x,))
    first.name = "alpha"
    second = candidate.call_function(torch.tan, (first,))
    second.name = "beta"
    candidate.output(candidate.call_function(torch.exp, (second,)))
    found = td.locate(
        reference,
        (torch.randn(16),),
        candidate=GraphModule(torch.nn.Module(), candidate),
        mapping={"cos": "beta", "sin": "alpha"},
    )

    assert [culprit.node for culprit in found.culprits] == ["cos"]


def test_two_graphs_of_a_user_are_run_in_lockstep():
    module = traced(chain)
    found = td.locate(module, (torch.randn(32),), candidate=spoiled(module, "cos", torch.tan))

    assert [culprit.node for culprit in found.culprits] == ["cos"]
    assert found.verdict is Verdict.DIVERGED


class Narrowed(torch.nn.Module):
    """Correct in any dtype, but for a factor that overflows what float16 can hold."""

    def __init__(self, factor):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        return torch.tanh(self.inner(x) * self.factor / self.factor)


def test_a_cast_names_the_operation_that_its_dtype_does_not_carry():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    found = td.locate(Narrowed(1e6), (x,), transform="cast:float16")

    assert found.culprits[0].op == "aten.mul.Tensor"
    assert td.locate(Narrowed(2.0), (x,), transform="cast:float16").culprits == ()
