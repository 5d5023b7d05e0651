"""The semantic question, asked of each graph by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdelta as td
from torchdelta.records.verdict import Verdict

# dynamo looks at the gradient of a tensor between two graphs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
DIVERGED, EQUIVALENT = Verdict.DIVERGED, Verdict.EQUIVALENT


class Broken(nn.Module):
    """Two layers with a graph break and a cast between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        y = y.to(torch.bfloat16).to(x.dtype)
        torch._dynamo.graph_break()
        return x + F.gelu(self.second(y))


def build(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Broken().to(dtype), (torch.randn(16, 32).to(dtype),)


def tanh_gelu(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") == "gelu":
            node.kwargs = {"approximate": "tanh"}
    graph_module.recompile()
    return graph_module


def scaled_residual(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if getattr(node.target, "__name__", "") == "add":
            with graph_module.graph.inserting_after(node):
                scaled = graph_module.graph.call_function(torch.mul, (node, 1.0005))
            node.replace_all_uses_with(scaled, lambda user, scaled=scaled: user is not scaled)
    graph_module.recompile()
    return graph_module


class ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def scaled_gradient(graph_module, example_inputs):
    def call(*args):
        return tuple(ScaledBackward.apply(value) for value in graph_module.forward(*args))

    return call


def doubled_negation(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if getattr(node.target, "__name__", "") == "gelu":
            with graph_module.graph.inserting_before(node):
                inner = graph_module.graph.call_function(torch.neg, (node.args[0],))
                node.args = (graph_module.graph.call_function(torch.neg, (inner,)),)
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fault", [tanh_gelu, scaled_residual, scaled_gradient])
def test_a_small_fault_beside_a_graph_break_is_seen(fault, dtype):
    model, inputs = build(dtype)

    report = td.check(model, inputs, transform=fault)

    assert report.verdict is DIVERGED
    assert report.questions.semantic == "asked"
    assert any(each.path.startswith("graphs[") for each in report.comparisons if each.verdict is DIVERGED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transform", [doubled_negation, "aot_eager", "aot_eager_decomp_partition"])
def test_a_correct_candidate_with_graph_breaks_is_equivalent(transform, dtype):
    model, inputs = build(dtype)

    report = td.check(model, inputs, transform=transform)

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")
    assert any("each of 2 graphs by itself" in note for note in report.notes)


@pytest.mark.slow
def test_inductor_with_graph_breaks_is_equivalent():
    model, inputs = build()

    report = td.check(model, inputs, transform="inductor")

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def test_a_program_of_one_graph_is_asked_as_a_whole():
    torch.manual_seed(0)
    report = td.check(nn.Linear(4, 4), (torch.randn(2, 4),), transform="aot_eager")

    assert not any("by itself" in note for note in report.notes)


def test_a_graph_that_has_no_float64_is_named_and_the_others_are_asked():
    torch.manual_seed(0)

    def refuses(graph_module, example_inputs):
        if example_inputs[0].dtype is torch.float64 and any("tanh" in str(n.target) for n in graph_module.graph.nodes):
            raise NotImplementedError("no kernel for float64")
        return graph_module

    def program(x):
        y = x.exp()
        torch._dynamo.graph_break()
        return y.tanh()

    report = td.check(program, (torch.randn(8),), transform=refuses, options={"unchanged": "ok"})

    assert report.verdict is EQUIVALENT
    assert "not asked of 1 of 2 graphs" in report.questions.semantic
    assert "no kernel for float64" in report.questions.semantic


def test_a_pass_that_works_on_bfloat16_alone_does_not_answer_for_itself_in_float64():
    def narrow_tanh_gelu(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == "gelu" and node.meta["example_value"].dtype is torch.bfloat16:
                node.kwargs = {"approximate": "tanh"}
        graph_module.recompile()
        return graph_module

    model, inputs = build()

    report = td.check(model, inputs, transform=narrow_tanh_gelu)

    assert report.questions.semantic.startswith("not asked of 2 of 2 graphs: in float64 the transform changed nothing")


def test_a_graph_that_runs_without_gradients_is_asked_without_them():
    def step(weight, x):
        loss = (weight * x).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        torch._dynamo.graph_break()
        with torch.no_grad():
            weight.sub_(0.1 * gradient)
        return loss.detach()

    torch.manual_seed(0)
    inputs = (torch.randn(8, requires_grad=True), torch.randn(8))

    def reordered(factor):
        def transform(graph_module, example_inputs):
            for node in graph_module.graph.nodes:
                if node.target in ("sub_", torch.Tensor.sub_):
                    with graph_module.graph.inserting_before(node):
                        scaled = graph_module.graph.call_function(torch.mul, (factor, node.args[1]))
                    node.args = (node.args[0], scaled)
            graph_module.recompile()
            return graph_module

        return transform

    right = td.check(step, inputs, transform=reordered(1.0))
    wrong = td.check(step, inputs, transform=reordered(1.0001))

    assert (right.verdict, wrong.verdict) == (EQUIVALENT, DIVERGED)


class Gate(nn.Module):
    """A layer behind a graph break, which a compiler gets once for all calls of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32) * 1.5 + torch.randn(32, 32) / 100)

    def forward(self, x):
        for _ in range(4):
            x = gated(x, self.weight)
            torch._dynamo.graph_break()
        return x


def gated(x, weight):
    return F.gelu(x @ weight)


def replaced_gelu(function):
    def change(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == "gelu":
                node.target = function
        graph_module.recompile()
        return graph_module

    return change


def wrong_if_large(x):
    y = F.gelu(x)
    return torch.where(y > 7.5, y * 1.01, y)


def by_error_function(x):
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


@pytest.mark.parametrize(("function", "verdict"), [(wrong_if_large, DIVERGED), (by_error_function, EQUIVALENT)])
def test_a_graph_that_is_called_again_is_asked_about_later_calls_too(function, verdict):
    torch.manual_seed(0)
    x = torch.rand(16, 32) + 1
    model = Gate()
    # only the values of later calls are large
    assert not (gated(x, model.weight) > 7.5).any()
    assert (model(x) > 7.5).any()

    transform = replaced_gelu(function)
    report = td.check(model.to(torch.bfloat16), (x.to(torch.bfloat16),), transform=transform, stages="forward")

    assert report.verdict is verdict


def test_a_gradient_behind_a_graph_break_counts_if_steps_alone_are_compared():
    model, args = build()

    assert td.check(model, args, transform=scaled_gradient, stages="steps").verdict is DIVERGED
    assert td.check(model, args, transform="aot_eager", stages="steps").verdict is EQUIVALENT


def test_a_compiler_that_keeps_the_weights_of_the_first_call_diverges_after_a_step():
    def keeps_biases(graph_module, example_inputs):
        first = [value.detach().clone() for value in example_inputs]

        def call(*args):
            # the gradient is that of the weight itself
            return graph_module(
                *(
                    old + (new - new.detach()) if isinstance(new, nn.Parameter) and new.dim() == 1 else new
                    for old, new in zip(first, args, strict=True)
                )
            )

        return call

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(torch.bfloat16)
    x = torch.randn(16, 16).to(torch.bfloat16)

    assert td.check(model, (x,), transform=keeps_biases, stages="forward,gradients").verdict is EQUIVALENT
    assert td.check(model, (x,), transform=keeps_biases, stages="steps").verdict is DIVERGED


def under_autocast(x, weight):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return broken_softmax(x, weight)


def with_autocast(x, weight):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ weight
        torch._dynamo.graph_break()
        y = y.relu() @ weight
    return y.float().softmax(-1)


def broken_softmax(x, weight):
    y = x @ weight
    torch._dynamo.graph_break()
    return (y.relu() @ weight).float().softmax(-1)


def scaled_softmax(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if node.target == "softmax":
            node.op, node.target = "call_function", lambda x, dim: x.softmax(dim) * 1.003
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("program", [with_autocast, under_autocast])
@pytest.mark.parametrize(("transform", "verdict"), [(scaled_softmax, DIVERGED), ("aot_eager", EQUIVALENT)])
def test_a_small_fault_beside_a_graph_break_under_autocast_is_seen(program, transform, verdict):
    torch.manual_seed(0)
    x, weight = torch.randn(16, 16), (torch.randn(16, 16) / 4).requires_grad_()

    report = td.check(program, (x, weight), transform=transform)

    assert report.verdict is verdict
    assert report.questions.semantic == "asked"
