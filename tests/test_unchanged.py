"""A pass that changed nothing was not tested; which graphs a pass is given, and how it is called."""

import copy
import functools
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassResult

import torchdelta as td
from torchdelta import Verdict
from torchdelta.errors import UsageError
from torchdelta.program.programs import load_module

models = load_module(str(Path(__file__).parent / "programs" / "models.py"), what="model")

X = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x)))) * self.scale


def broken(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.exp() + 1


def leave(graph_module, example_inputs):
    return graph_module


def recompile(graph_module, example_inputs):
    graph_module.graph.lint()
    graph_module.recompile()


def bind(graph_module, example_inputs):
    return graph_module.forward


class Wrapper(nn.Module):
    def __init__(self, graph_module):
        super().__init__()
        self.inner = graph_module

    def forward(self, *args):
        return self.inner(*args)


class WatchedInterpreter(torch.fx.Interpreter):
    """May do something else than the graph."""


def change_result(graph_module):
    def call(*args):
        results = graph_module(*args)
        with torch.no_grad():
            torch.utils._pytree.tree_leaves(results)[0].mul_(1)
        return results

    return call


def under_autocast(graph_module):
    def call(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return graph_module(*args)

    return call


WRAPPERS = {
    "lambda": lambda graph_module: lambda *args: graph_module(*args),
    "partial": functools.partial,
    "bound method": lambda graph_module: functools.partial(graph_module.__call__),
    "module": Wrapper,
    "interpreter": lambda graph_module: torch.fx.Interpreter(graph_module).run,
    "disabled": torch._dynamo.disable,
}
CHANGES = {
    "other arguments": lambda graph_module: lambda *args: graph_module(*[arg.clone() for arg in args]),
    "two calls": lambda graph_module: lambda *args: (graph_module(*args), graph_module(*args))[1],
    "an interpreter of its own": lambda graph_module: WatchedInterpreter(graph_module).run,
    "autocast": under_autocast,
    "a compiler": lambda graph_module: torch.compile(graph_module, backend="aot_eager"),
}


def swap_operands(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") in ("mul", "mul.Tensor", "add"):
            node.args = tuple(reversed(node.args))
    return graph_module


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export", "symbolic"])
@pytest.mark.parametrize("identity", [leave, recompile, bind])
def test_a_pass_that_leaves_every_graph_as_it_was_is_inconclusive(identity, graph):
    report = td.check(Layers(), X, transform=identity, options={"graph": graph})

    assert report.verdict is Verdict.INCONCLUSIVE
    assert all("changed nothing" in stage.reason for stage in report.stages)
    accepted = td.check(Layers(), X, transform=identity, options={"graph": graph, "unchanged": "ok"})
    assert accepted.verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export", "symbolic"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_only_calls_the_unchanged_graph_is_inconclusive(name, graph):
    report = td.check(Layers(), X, transform=lambda module, _: WRAPPERS[name](module), options={"graph": graph})

    assert report.verdict is Verdict.INCONCLUSIVE
    assert all("changed nothing" in stage.reason for stage in report.stages)


@pytest.mark.parametrize("graph", ["dynamo", "export"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_wrapper_that_does_more_than_call_the_graph_was_tested(name, graph):
    report = td.check(Layers(), X, transform=lambda module, _: CHANGES[name](module), options={"graph": graph})

    assert not any("changed nothing" in stage.reason for stage in report.stages)
    assert report.verdict is (Verdict.DIVERGED if name == "autocast" else Verdict.EQUIVALENT)


def test_a_wrapper_that_writes_to_the_result_of_the_graph_was_tested():
    report = td.check(lambda x: x.exp() * 2, X, transform=lambda module, _: change_result(module))

    assert report.verdict is Verdict.EQUIVALENT


class Unused(Layers):
    def __init__(self):
        super().__init__()
        self.spare = nn.BatchNorm1d(3)


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export", "symbolic"])
def test_state_that_the_program_does_not_use_is_no_difference(graph):
    report = td.check(Unused(), X, transform=swap_operands, options={"graph": graph})

    assert report.verdict is Verdict.EQUIVALENT


def relu_becomes_sigmoid(graph_module):
    graph_module.add_module("other", nn.Sigmoid())
    for node in graph_module.graph.nodes:
        if node.target == "1":
            node.target = "other"
    graph_module.recompile()
    return graph_module


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(("one", "verdict"), [(leave, Verdict.INCONCLUSIVE), (relu_becomes_sigmoid, Verdict.DIVERGED)])
def test_an_attribute_that_a_called_module_computes_is_no_difference_of_the_pass(one, verdict):
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.ReLU())

    report = td.check(model, (torch.randn(5, 4),), transform=one, options={"graph": "symbolic"})

    assert report.verdict is verdict
    comparisons = {each.path: each.verdict for each in report.comparisons}
    assert comparisons["attributes['0.weight']"] is Verdict.EQUIVALENT
    assert comparisons["outputs"] is (Verdict.EQUIVALENT if one is leave else Verdict.DIVERGED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warn about their own code
@pytest.mark.parametrize("name", models.MODELS)
def test_a_pass_that_leaves_a_whole_model_as_it_was_is_inconclusive(name):
    model, args = models.build(name)

    report = td.check(model, args, transform=leave)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert all("changed nothing" in stage.reason for stage in report.stages)
    assert all(each.verdict is Verdict.EQUIVALENT for each in report.comparisons)


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export", "symbolic"])
def test_a_pass_that_rewrites_without_changing_the_function_is_equivalent(graph):
    assert td.check(Layers(), X, transform=swap_operands, options={"graph": graph}).verdict is Verdict.EQUIVALENT


def test_a_pass_that_only_changes_some_graphs_says_which_it_left():
    def change_sums(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == "add":
                node.args = (1, node.args[0])
        return graph_module

    report = td.check(broken, X, transform=change_sums)

    assert report.verdict is Verdict.EQUIVALENT
    assert any("left 1 of its 2 graphs as they were: 0" in note for note in report.notes)


def scale_buffer(graph_module):
    graph_module.scale.mul_(1.5)


def replace_weight(graph_module):
    graph_module.second.weight = nn.Parameter(graph_module.second.weight + 0.1)


def write_weight(graph_module):
    with torch.no_grad():
        graph_module.second.weight.data += 0.1


def change_epsilon(graph_module):
    graph_module.norm.eps = 0.5


def scale_constant(graph_module, example_inputs):
    graph_module.constant = graph_module.constant * 2


@pytest.mark.parametrize("change", [scale_buffer, replace_weight, write_weight, change_epsilon])
def test_a_change_of_tensors_or_of_a_submodule_is_a_change(change):
    report = td.check(Layers(), X, transform=change, options={"graph": "symbolic"})

    assert report.verdict is Verdict.DIVERGED


class Constant(nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.register_buffer("constant", constant)

    def forward(self, x):
        return self.constant * x


CONSTANTS = {"one element of a column": torch.ones(1, 5)[:, 0], "a conjugate": torch.tensor([1 + 2j]).conj()}


@pytest.mark.parametrize(("one", "verdict"), [(leave, Verdict.INCONCLUSIVE), (scale_constant, Verdict.DIVERGED)])
@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("graph", ["export", "symbolic"])
def test_a_constant_may_be_a_view_of_any_kind(graph, name, one, verdict):
    report = td.check(Constant(CONSTANTS[name]), (torch.randn(8),), transform=one, options={"graph": graph})

    assert report.verdict is verdict


def returns_result(graph_module):
    for node in graph_module.graph.nodes:
        if node.op == "call_module" and node.target == "norm":
            node.target = "first"
    graph_module.recompile()
    return PassResult(graph_module, True)


def takes_graph(graph):
    for node in graph.nodes:
        if node.op == "call_module" and node.target == "norm":
            node.target = "first"


def takes_both(graph_module, example_inputs):
    assert example_inputs
    return returns_result(graph_module)


def takes_module_as_g(g):
    assert isinstance(g, torch.fx.GraphModule)
    return returns_result(g)


def takes_annotated_graph(g: torch.fx.Graph):
    takes_graph(g)


@pytest.mark.parametrize("one", [returns_result, takes_graph, takes_both, takes_module_as_g, takes_annotated_graph])
def test_a_pass_may_take_a_graph_module_alone_or_a_graph(one):
    report = td.check(Layers(), X, transform=one, options={"graph": "symbolic"})

    assert report.stage("forward").verdict is Verdict.DIVERGED


def test_a_symbolic_graph_calls_modules():
    kinds = set()

    def look(graph_module):
        kinds.update(node.op for node in graph_module.graph.nodes)

    td.check(Layers(), X, transform=look, options={"graph": "symbolic"})

    assert "call_module" in kinds


def test_a_program_that_cannot_be_traced_symbolically_is_a_mistake_of_the_request():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(UsageError, match="graph=dynamo or graph=export"):
        td.check(Branches(), X, transform=leave, options={"graph": "symbolic"})
    with pytest.raises(UsageError, match="traces a module"):
        td.check(broken, X, transform=leave, options={"graph": "symbolic"})
    with pytest.raises(UsageError, match="unchanged is ok"):
        td.check(Layers(), X, transform=leave, options={"unchanged": "yes"})


def test_a_decomposition_that_changes_nothing_is_inconclusive():
    report = td.check(lambda x: x + 1, X, transform="decompose")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert (
        td.check(lambda x: x + 1, X, transform="decompose", options={"unchanged": "ok"}).verdict is Verdict.EQUIVALENT
    )
    assert td.check(Layers(), X, transform="decompose").verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_need_not_change_a_graph(backend):
    assert td.check(Layers(), X, transform=backend).verdict is Verdict.EQUIVALENT


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.first(x)) + 1


def swap(graph_module):
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") == "add":
            node.args = tuple(reversed(node.args))
    graph_module.recompile()


def swap_and_run(graph_module):
    swap(graph_module)
    graph_module(3 * X[0])  # as the propagation of shapes does, which moves the statistics of the norm


@pytest.mark.parametrize(("change", "verdict"), [(swap, Verdict.EQUIVALENT), (swap_and_run, Verdict.DIVERGED)])
def test_a_pass_that_moves_state_which_the_program_writes_is_wrong(change, verdict):
    report = td.check(Normed().train(), X, transform=change, options={"graph": "symbolic"})

    assert report.verdict is verdict


def turn_relu_into_tanh(graph_module):
    for node in graph_module.graph.nodes:
        if "relu" in str(node.target):
            node.op, node.target, node.kwargs = "call_function", torch.tanh, {}
    graph_module.recompile()


def after_the_first_call(change):
    """Return a pass whose callable runs `change` on the graph at the end of its first call, as a calibration does."""

    def transform(graph_module, example_inputs):
        changed = []

        def call(*args):
            results = [result.clone() for result in graph_module(*args)]
            if not changed:
                changed.append(True)
                change(graph_module)
            return results

        return call

    return transform


class Bits(Layers):
    def forward(self, x):
        # a view of bits: float64 is not asked, so only the native run can tell
        return super().forward(x) + (x.view(torch.int32) & 0).float()


@pytest.mark.parametrize(
    ("change", "verdict"), [(turn_relu_into_tanh, Verdict.DIVERGED), (GraphModule.recompile, Verdict.EQUIVALENT)]
)
def test_a_graph_that_its_callable_edits_and_recompiles_runs_as_edited(change, verdict):
    report = td.check(Bits(), X, transform=after_the_first_call(change), iterations=2)

    assert report.verdict is verdict


def test_a_graph_that_is_recompiled_in_a_call_that_only_calls_it_was_not_left_as_it_was():
    def transform(graph_module, example_inputs):
        def call(*args):
            graph_module.recompile()
            return graph_module(*args)

        return call

    assert td.check(Layers(), X, transform=transform).verdict is Verdict.EQUIVALENT


LATER = {
    "symbolic_trace": lambda graph_module, args: torch.fx.symbolic_trace(graph_module),
    "make_fx": lambda graph_module, args: make_fx(graph_module)(*args),
    "export": lambda graph_module, args: torch.export.export(graph_module, args).module(),
    "deepcopy": lambda graph_module, args: copy.deepcopy(graph_module),
    "pickle": lambda graph_module, args: pickle.loads(pickle.dumps(graph_module)),
    "compile": lambda graph_module, args: torch.compile(graph_module, backend="aot_eager", fullgraph=True),
    "compile in a module": lambda graph_module, args: torch.compile(
        Wrapper(graph_module), backend="aot_eager", fullgraph=True
    ),
    "compile in a function": lambda graph_module, args: torch.compile(
        lambda *args: graph_module(*args), backend="aot_eager", fullgraph=True
    ),
}


@pytest.mark.parametrize(
    ("name", "graph"),
    # torch cannot compile the lazy graph of dynamo with fullgraph
    [(name, graph) for name in LATER for graph in ("dynamo", "symbolic") if (name, graph) != ("compile", "dynamo")],
)
def test_a_callable_may_trace_copy_or_compile_its_graph_when_it_is_called(name, graph):
    def transform(graph_module, example_inputs):
        other = []

        def call(*args):
            if not other:
                other.append(LATER[name](graph_module, args))
            return other[0](*args)

        return call

    layers = Layers().requires_grad_(False)  # make_fx and export make constants of weights

    assert td.check(layers, X, transform=transform, options={"graph": graph}).verdict is Verdict.EQUIVALENT


class Lazy(Mapping):
    def __getitem__(self, key):
        raise RuntimeError("not loaded yet")

    def __iter__(self):
        return iter(["weights"])

    def __len__(self):
        return 1


class WithoutAttributes:
    @property
    def __dict__(self):
        raise ValueError("no attributes")


@pytest.mark.parametrize("kind", [Lazy, WithoutAttributes])
@pytest.mark.parametrize(("factor", "verdict"), [(1, Verdict.EQUIVALENT), (2, Verdict.DIVERGED)])
def test_a_callable_may_hold_what_cannot_be_looked_into(kind, factor, verdict):
    def transform(graph_module, example_inputs):
        other = kind()
        return lambda *args: (other, [result * factor for result in graph_module(*args)])[1]

    assert td.check(Layers(), X, transform=transform).verdict is verdict


def test_a_wrapper_that_holds_what_cannot_be_looked_into_is_inconclusive_all_the_same():
    def transform(graph_module, example_inputs):
        other = Lazy()
        return lambda *args: (other, graph_module(*args))[1]

    report = td.check(Layers(), X, transform=transform)

    assert report.verdict is Verdict.INCONCLUSIVE


class WithConstants(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.plain, self.listed = torch.randn(8), [torch.randn(8)]

    def forward(self, x):
        return F.relu(self.first(x)) * self.plain * self.listed[0] * torch.tensor([1.0, 2.0] * 4)


def use_torch_relu(graph_module, factor=1.0):
    for node in graph_module.graph.nodes:
        if "relu" in str(node.target):
            node.op, node.target, node.kwargs = "call_function", lambda x: torch.relu(x) * factor, {}
    graph_module.recompile()


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.EQUIVALENT), (1.1, Verdict.DIVERGED)])
def test_constants_that_symbolic_tracing_registers_are_not_state_of_the_program(factor, verdict):
    def transform(graph_module):
        use_torch_relu(graph_module, factor)

    assert td.check(WithConstants(), X, transform=transform, options={"graph": "symbolic"}).verdict is verdict


class UnusedNames(Layers):
    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        for index in range(9):
            self.register_parameter(f"unused_{index}", nn.Parameter(torch.ones(2)))


def test_unused_state_may_have_the_names_that_the_tracer_would_give_it():
    graph_modules = []

    def transform(graph_module):
        graph_modules.append(graph_module)
        use_torch_relu(graph_module)

    report = td.check(UnusedNames(), X, transform=transform, options={"graph": "symbolic"})

    assert report.verdict is Verdict.EQUIVALENT
    assert len(list(graph_modules[0].parameters())) == len(list(UnusedNames().parameters()))


def test_a_note_names_a_candidate_that_is_the_program_itself():
    model = Layers()

    def is_named(report):
        return any("the candidate is the program itself" in note for note in report.notes)

    assert is_named(td.check(model, X, candidate=model))
    assert not is_named(td.check(model, X, candidate=copy.deepcopy(model)))


def test_a_program_that_was_compiled_in_place_is_compared_with_its_eager_self():
    right, wrong = Layers(), Layers()
    right.compile(backend=leave)
    wrong.compile(backend=lambda graph_module, _: lambda *inputs: [each * 1.5 for each in graph_module(*inputs)])

    report = td.check(right, X, candidate=right, stages="forward")

    assert report.verdict is Verdict.EQUIVALENT
    assert not any("program itself" in note for note in report.notes)
    assert td.check(wrong, X, candidate=wrong, stages="forward").verdict is Verdict.DIVERGED
