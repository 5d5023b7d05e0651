"""Every transform does what its name says, on a program that survives it and on one that does not."""

import copy
import dataclasses
import operator

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.compile.seams import hand_on
from torchdelta.check.quantized_layers import NoQuantizedLayer
from torchdelta.program.sides import Side
from torchdelta.transforms.base import OtherInputs, Traits, Transform, TransformedSide
from torchdelta.transforms.wrappers import AppliedOnce, ObservedAfterAot, ObservedTransform

MODULE = """
import torch
from torch import nn

class Same(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = scale
    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale

class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)
    def forward(self, x):
        return torch.relu(self.dense(x))

def same(): return Same()
def scaled(): return Same(1.01)
def renamed(): return Renamed()
def reseeded(): torch.manual_seed(7); return Same()
def rename(state): return {key.replace("linear", "dense"): value for key, value in state.items()}
def program(): return Same(), (torch.randn(5, 4),)
"""


@pytest.fixture
def module_file(tmp_path):
    file = tmp_path / "modules.py"
    file.write_text(MODULE)
    return str(file)


def relu_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


X = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("transform", ["eager", "aot_eager", "backend:aot_eager", "export", "decompose"])
def test_a_healthy_program_survives(transform):
    report = td.check(relu_net(), (X,), transform=transform)

    assert report.verdict is Verdict.EQUIVALENT
    assert report.graphs.captured == 1
    # an exported program is run with other inputs too
    assert report.graphs.transformed_calls == (2 if transform in ("export", "decompose") else 1)


def wrong_relu(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and "relu" in str(node.target):
            node.target = torch.ops.aten.abs.default if "aten" in str(node.target) else torch.abs
            node.kwargs = {}
            node.args = node.args[:1]
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export"])
def test_a_pass_is_given_the_graph_it_asks_for(graph):
    seen = []

    def look(graph_module, example_inputs):
        seen.append({str(node.target) for node in graph_module.graph.nodes})

    report = td.check(relu_net(), (X,), transform=look, options={"graph": graph, "unchanged": "ok"}, semantic=False)
    assert report.verdict is Verdict.EQUIVALENT
    has_aten = any("aten" in target for targets in seen for target in targets)
    assert has_aten == (graph != "dynamo")
    # the forward and the backward are two graphs after AOT, and one otherwise
    assert len(seen) == (2 if graph == "aten" else 1)


@pytest.mark.parametrize("graph", ["aten", "export"])
def test_a_wrong_pass_is_caught_on_each_graph(graph):
    report = td.check(relu_net(), (X,), transform=wrong_relu, options={"graph": graph})

    assert report.verdict is Verdict.DIVERGED


def test_a_pass_that_changes_its_graph_in_place_may_return_nothing():
    def negate(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if node.target is operator.add:
                node.target = operator.sub
        graph_module.recompile()

    assert td.check(lambda x: x + 1, (X,), transform=negate).verdict is Verdict.DIVERGED


class Counting(nn.Module):
    """Trains a weight, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export"])
@pytest.mark.parametrize(("then", "verdict"), [(None, Verdict.EQUIVALENT), (wrong_relu, Verdict.DIVERGED)])
def test_a_pass_may_begin_with_a_copy_of_its_graph(graph, then, verdict):
    def on_a_copy(graph_module, example_inputs):
        copied = copy.deepcopy(graph_module)
        return copied if then is None else then(copied, example_inputs)

    report = td.check(Counting(), (X,), transform=on_a_copy, options={"graph": graph, "unchanged": "ok"})

    assert report.verdict is verdict
    assert next(seen for seen in report.comparisons if "calls" in seen.path).verdict is Verdict.EQUIVALENT
    gradients = [seen for seen in report.comparisons if seen.path.endswith(".grad")]
    assert gradients
    assert not any(breach.clause == "structure" for seen in gradients for breach in seen.contract)


def test_a_graph_in_broken_topological_order_is_sorted_before_it_runs():
    def disorder(graph_module, example_inputs):
        nodes = [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]
        nodes[0].prepend(nodes[-1])
        return graph_module

    report = td.check(lambda x: (x + 1).relu() * 2, (X,), transform=disorder, options={"unchanged": "ok"})

    assert report.verdict is Verdict.EQUIVALENT


def test_a_pass_may_return_a_function_of_boxed_arguments():
    def boxing(graph_module, example_inputs):
        def boxed(args):
            return [each.clone() for each in graph_module(*args)]

        boxed._boxed_call = True
        return boxed

    assert td.check(lambda x, y: x + y, (X, X), transform=boxing).verdict is Verdict.EQUIVALENT


def test_a_pass_that_returns_something_else_has_crashed():
    report = td.check(lambda x: x + 1, (X,), transform=lambda graph_module, example_inputs: "text")

    assert report.verdict is Verdict.CRASHED
    assert "must return a callable" in report.failure.message


def test_a_pass_by_name_is_loaded_from_its_file(tmp_path):
    (tmp_path / "passes.py").write_text("def nothing(graph_module, example_inputs):\n    return graph_module\n")

    report = td.check(relu_net(), (X,), transform=f"{tmp_path}/passes.py:nothing", options={"unchanged": "ok"})

    assert report.verdict is Verdict.EQUIVALENT


def test_functions_can_be_exported_and_decomposed():
    x = X.clone().requires_grad_()

    for transform in ("export", "decompose"):
        assert td.check(lambda x: torch.softmax(x, -1), (x,), transform=transform).verdict is Verdict.EQUIVALENT


def with_keywords(y, x=None, *, module):
    return x.sum(0) / y.shape[0] * module


def with_branch(y, x=None, *, module):
    return x.sum(0) / y.shape[0] * module if not torch.compiler.is_exporting() else x.sum(0) / 3 * module


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("function", "verdict"), [(with_keywords, Verdict.EQUIVALENT), (with_branch, Verdict.DIVERGED)]
)
def test_a_function_with_keywords_can_be_exported_with_open_sizes(function, verdict, strict):
    kwargs = {"module": torch.randn(4), "x": torch.randn(6, 4)}

    report = td.check(
        function,
        (torch.randn(3, 4),),
        kwargs=kwargs,
        transform="export",
        options={"dynamic": True, "strict": strict},
    )

    assert report.failure is None
    assert report.verdict is verdict
    assert any("other sizes: args[0] [3, 4] → [4, 5]" in note for note in report.notes)


def test_a_closure_over_a_module_can_be_exported():
    model = relu_net()
    report = td.check(lambda x: model(x), (X,), transform="export")

    assert report.verdict is Verdict.EQUIVALENT
    assert any(seen.path == "parameters['model.0.weight'].grad" for seen in report.comparisons)


def test_batch_norm_in_train_mode_can_be_trained_after_decomposition():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    report = td.check(
        model, (torch.randn(2, 3, 8, 8),), transform="decompose", stages=["forward", "gradients", "steps"]
    )

    assert report.verdict is Verdict.EQUIVALENT
    assert any(seen.path == "buffers['1.running_mean']" and seen.measurement for seen in report.comparisons)


def test_a_cast_is_held_to_the_noise_of_its_dtype():
    model = relu_net()

    def spoiled(x):
        return nn.functional.linear(torch.relu(model[0](x)) * 1.5, model[2].weight, model[2].bias)

    report = td.check(model, (X,), transform="cast:bfloat16")
    assert report.verdict is Verdict.EQUIVALENT
    assert any(breach.clause == "dtype" and breach.excused for seen in report.comparisons for breach in seen.contract)
    assert td.check(model, (X,), transform="cast:bfloat16", policy="bitwise").verdict is Verdict.DIVERGED
    assert td.check(model, (X,), candidate=spoiled).verdict is Verdict.DIVERGED


def test_autocast_is_held_to_the_noise_of_its_dtype():
    assert td.check(relu_net(), (X,), transform="autocast:bfloat16").verdict is Verdict.EQUIVALENT
    assert td.check(relu_net(), (X,), transform="autocast:bfloat16", policy="sqnr>=30").verdict is Verdict.EQUIVALENT
    assert td.check(relu_net(), (X,), transform="autocast:bfloat16", policy="sqnr>=120").verdict is Verdict.DIVERGED


def test_another_implementation_takes_over_the_state(module_file):
    program = f"{module_file}:program"

    def verdict(factory, **options):
        return td.check(program, transform=f"module:{module_file}:{factory}", options=options).verdict

    assert verdict("same") is Verdict.EQUIVALENT
    assert verdict("scaled") is Verdict.DIVERGED
    assert verdict("reseeded", state="none") is Verdict.DIVERGED
    assert verdict("reseeded") is Verdict.EQUIVALENT


def test_another_implementation_with_other_names_needs_a_mapping(module_file):
    program, transform = f"{module_file}:program", f"module:{module_file}:renamed"

    with pytest.raises(td.ProgramError, match=r"state=file\.py:fn"):
        td.check(program, transform=transform)
    report = td.check(program, transform=transform, options={"state": f"{module_file}:rename"})
    assert report.verdict is Verdict.EQUIVALENT
    assert {leaf.path for leaf in report.unmatched} >= {"parameters['linear.weight']", "parameters['dense.weight']"}
    assert any("name on one side only" in note for note in report.notes)


@pytest.mark.parametrize(
    ("transform", "options", "says"),
    [
        ("inductr", {}, "did you mean inductor"),
        ("backend:inductr", {}, "did you mean inductor"),
        ("backend", {}, "backend:NAME"),
        ("export:now", {}, "written export"),
        ("cast:bfloat", {}, "try bfloat16"),
        ("cast:int8", {}, "not a floating-point dtype"),
        ("eager", {"dynamc": True}, "it has dynamic, fullgraph, mode"),
        ("eager", {"dynamic": "maybe"}, "True or False"),
        ("inductor", {"config.fallback_randm": True}, "did you mean fallback_random"),
        ("inductor", {"mode": "fastest"}, "max-autotune"),
        ("nowhere.py:fn", {}, "no file nowhere.py"),
        ("no_such_package.passes:fn", {}, "no module"),
    ],
)
def test_a_mistake_in_a_transform_is_answered_with_what_to_write(transform, options, says):
    with pytest.raises(td.TorchDeltaError, match=says):
        td.check(relu_net(), (X,), transform=transform, options=options)


def test_either_a_transform_or_a_candidate():
    with pytest.raises(td.UsageError, match="transform or a candidate"):
        td.check(relu_net(), (X,))
    with pytest.raises(td.UsageError, match="not both"):
        td.check(relu_net(), (X,), transform="eager", candidate=relu_net())


def test_dynamic_shapes_reach_the_backend():
    seen = []

    def look(graph_module, example_inputs):
        seen.extend(example_inputs)
        return graph_module

    td.check(lambda x: x + 1, (X,), transform=look, options={"dynamic": True}, stages=["forward"])

    assert any(isinstance(value, torch.SymInt) for value in seen)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_a_cast_and_an_autocast_that_do_nothing_are_inconclusive():
    assert td.check(relu_net(), (X,), transform="cast:float32").verdict is Verdict.INCONCLUSIVE
    assert td.check(relu_net(), (X,), transform="autocast:float32").verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("transform", ["export", "decompose"])
def test_bound_methods_and_partials_can_be_exported(transform):
    import functools

    net = relu_net()
    for call in (net.forward, functools.partial(lambda model, x: model(x), net)):
        assert td.check(call, (X,), transform=transform).verdict is Verdict.EQUIVALENT


def test_a_candidate_that_calls_its_parameters_otherwise_is_compared_by_what_it_computes():
    net = nn.Linear(4, 3)
    report = td.check(net, (X,), candidate=lambda x: nn.functional.linear(x, net.weight, net.bias))

    assert report.verdict is Verdict.EQUIVALENT
    assert report.unmatched


def test_a_pass_on_the_exported_graph_may_return_any_callable():
    report = td.check(
        relu_net(), (X,), transform=lambda module, _: lambda *args: module(*args).clone(), options={"graph": "export"}
    )

    assert report.verdict is Verdict.EQUIVALENT
    assert any(seen.path == "parameters['0.weight'].grad" for seen in report.comparisons)


def test_options_without_a_transform_that_takes_them_are_a_mistake():
    with pytest.raises(td.UsageError, match="options"):
        td.check(relu_net(), (X,), candidate=relu_net(), options={"dynamic": True})


class Unusual(Transform):
    """A transform none of whose traits is the default."""

    traits = Traits(
        lowered_to=torch.bfloat16,
        keeps_names=False,
        reads_program=False,
        has_backward=False,
        excused_clauses=frozenset({"aliasing"}),
        rounds_to_levels=True,
        is_compiler=True,
        has_seam=True,
        other_inputs=OtherInputs.VALUES,
    )

    def apply(self, side, *, draws_random, lifted=False, seam=hand_on):
        raise NotImplementedError


def applied_once(inner):
    return AppliedOnce(inner, TransformedSide.counting_calls(Side.of(torch.sin, (X,), {})))


@pytest.mark.parametrize(
    ("wrap", "differing"),
    [
        (lambda inner: ObservedTransform(inner, hand_on), {}),
        (ObservedAfterAot, {}),
        (lambda inner: td.faults.plant("tail_element", then=inner), {}),
        (applied_once, {"has_seam": False}),
        (NoQuantizedLayer, {"rounds_to_levels": False}),
    ],
    ids=["observed", "observed_after_aot", "planted", "applied_once", "no_quantized_layer"],
)
def test_a_wrapper_hands_on_every_trait_but_those_that_it_changes(wrap, differing):
    for trait in dataclasses.fields(Traits):
        assert getattr(Unusual.traits, trait.name) != trait.default, f"add {trait.name} to Unusual"

    assert wrap(Unusual()).traits == dataclasses.replace(Unusual.traits, **differing)


OFFSET = torch.tensor([1.0, 2.0, 3.0])


def closing_over_a_tensor():
    weight = torch.linspace(-1, 1, 3)
    return lambda x: x * weight


def using_a_global_tensor():
    return lambda x: x + OFFSET


def closing_over_a_module_and_a_tensor():
    torch.manual_seed(0)
    model, weight = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.linspace(-1, 1, 3)
    return lambda x: model(x) * weight


def closing_over_a_trained_tensor():
    weight = torch.linspace(-1, 1, 3).requires_grad_()
    return lambda x: x * weight + OFFSET


def closing_over_a_dict():
    weights = {"scale": torch.linspace(-1, 1, 3).requires_grad_(), "others": [torch.ones(3)]}
    return lambda x: x * weights["scale"] + weights["others"][0]


def writing_to_a_closure():
    state = torch.zeros(3)

    def program(x):
        state.add_(x.sum(0))
        return x * 2

    return program


def drop_writes(graph_module, example_inputs):
    for node in [node for node in graph_module.graph.nodes if str(node.target) == "aten.add_.Tensor"]:
        node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def detach_weights(graph_module, example_inputs):
    for node in [node for node in graph_module.graph.nodes if node.op == "get_attr"]:
        with graph_module.graph.inserting_after(node):
            detached = graph_module.graph.call_method("detach", (node,))
        node.replace_all_uses_with(detached, delete_user_cb=lambda user, new=detached: user is not new)
    graph_module.recompile()
    return graph_module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", ["export", "decompose"])
@pytest.mark.parametrize(
    ("make", "stages"),
    [
        (closing_over_a_tensor, "forward"),
        (using_a_global_tensor, "forward"),
        (writing_to_a_closure, "forward"),
        (closing_over_a_module_and_a_tensor, "forward,gradients"),
        (closing_over_a_trained_tensor, "forward,gradients"),
        (closing_over_a_dict, "forward,gradients"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_function_sees_the_tensors_that_it_closes_over(make, stages, transform, strict):
    options = {"strict": strict, **({"unchanged": "ok"} if transform == "decompose" else {})}
    report = td.check(make(), (torch.ones(2, 3),), transform=transform, stages=stages, options=options)

    assert report.verdict is Verdict.EQUIVALENT
    assert not report.unmatched


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_that_loses_a_write_or_a_gradient_of_a_closure_has_diverged():
    x = torch.ones(2, 3)
    lost_write = td.check(writing_to_a_closure(), (x,), transform=drop_writes, options={"graph": "export"})
    lost_gradient = td.check(
        closing_over_a_trained_tensor(),
        (x.clone().requires_grad_(),),
        transform=detach_weights,
        options={"graph": "export"},
    )

    assert [each.path for each in lost_write.comparisons if each.verdict is Verdict.DIVERGED] == ["buffers['state']"]
    wrong = [each.path for each in lost_gradient.comparisons if each.verdict is Verdict.DIVERGED]
    assert wrong == ["parameters['weight'].grad"]


@pytest.mark.filterwarnings("ignore")
def test_export_of_a_function_that_binds_its_closure_anew_loses_the_value():
    state = torch.zeros(3)

    def program(x):
        nonlocal state
        state = state + x.sum(0)
        return x * 2

    report = td.check(program, (torch.ones(2, 3),), transform="export")

    assert report.verdict is Verdict.DIVERGED
    assert torch.equal(state, torch.zeros(3))


def test_a_decomposition_table_that_raises_is_the_users_mistake(tmp_path):
    file = tmp_path / "table.py"
    file.write_text("def table():\n    raise ValueError('no such operator')\n")

    with pytest.raises(td.ProgramError, match=r"table\.py:table raises ValueError: no such operator"):
        td.check(relu_net(), (X,), transform="decompose", options={"table": f"{file}:table"})


class Tanh(nn.Module):
    """A layer that a backend can make wrong; with a backend, it is compiled in place."""

    def __init__(self, backend=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        if backend is not None:
            self.compile(backend=backend)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Twice(nn.Module):
    """A model whose layer may be compiled in place."""

    def __init__(self, backend=None):
        super().__init__()
        self.layer = Tanh(backend)

    def forward(self, x):
        return self.layer(x) * 2


def with_sigmoid(graph_module, _):
    for node in graph_module.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.sigmoid
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("make", [Tanh, Twice])
def test_a_candidate_that_was_compiled_in_place_runs_compiled(make):
    assert td.check(make(), (X,), candidate=make(with_sigmoid)).verdict is Verdict.DIVERGED
    assert td.check(make(), (X,), candidate=make("eager")).verdict is Verdict.EQUIVALENT


def test_a_program_that_was_compiled_in_place_is_run_eagerly():
    assert td.check(Twice(with_sigmoid), (X,), candidate=Twice()).verdict is Verdict.EQUIVALENT
    assert td.check(Twice(with_sigmoid), (X,), candidate=Twice(with_sigmoid)).verdict is Verdict.DIVERGED


def test_a_candidate_that_calls_something_compiled_is_not_asked_in_float64():
    model = Tanh()
    compiled = torch.compile(Tanh(), backend="eager")

    report = td.check(model, (X,), candidate=lambda x: compiled(x))

    assert "the candidate was compiled before" in report.questions.semantic


@torch.compile(backend="eager")
def compiled_once(x):
    return x * 1.0


class CompiledForward(Tanh):
    @torch.compile(backend="eager")
    def forward(self, x):
        return torch.tanh(self.linear(x))


class CallsCompiled(Tanh):
    def forward(self, x):
        return torch.tanh(self.linear(compiled_once(x)))


@pytest.mark.parametrize("make", [CompiledForward, CallsCompiled])
def test_a_candidate_whose_methods_are_or_call_something_compiled_is_not_asked_in_float64(make):
    report = td.check(Tanh(), (X,), candidate=make())

    assert report.verdict is Verdict.EQUIVALENT
    assert "the candidate was compiled before" in report.questions.semantic
