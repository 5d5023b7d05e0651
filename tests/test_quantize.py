"""A quantized program is held against the float one, and each of its nodes against the node that it was made of."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.compile.seams import hand_on
from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta._torch.graphs.quantization import Levels
from torchdelta.compare.judge import Judge
from torchdelta.compare.quantization_noise import COARSER, RUNS, StepNoise, rounded, step_for
from torchdelta.errors import EnvironmentUnfit, ProgramError, UsageError
from torchdelta.nodewise.matching import align, assign_handles, handles_of
from torchdelta.nodewise.node_records import node_records
from torchdelta.program.sides import Side
from torchdelta.transforms.quantize import Quantize, quantize_side, quantizer_factory
from torchdelta.transforms.wrappers import ObservedTransform

pytest.importorskip("torchao")

FACTORIES = """
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer, get_default_x86_inductor_quantization_config)

class Default(X86InductorQuantizer):
    def __init__(self):
        super().__init__()
        self.set_global(get_default_x86_inductor_quantization_config())

def dynamic():
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_dynamic=True))

def nothing():
    return X86InductorQuantizer()

def number():
    return 8

def broken():
    raise RuntimeError("no such backend")
"""


@pytest.fixture
def factories(tmp_path):
    file = tmp_path / "quantizers.py"
    file.write_text(FACTORIES)
    return str(file)


class Net(nn.Module):
    """A convolution whose batch norm is folded into it, and two linear layers, one of them behind a list."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        features = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        hidden = torch.relu(self.hidden(features))
        return [self.head(hidden), hidden.sum(1)]


def net():
    torch.manual_seed(0)
    model = Net()
    model.norm.running_mean.uniform_(-1, 1)
    model.norm.running_var.uniform_(0.5, 2)
    return model.eval()


IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()


def values_of(graph):
    values = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node):
            values[node.name] = super().run_node(node)
            return values[node.name]

    Recorder(graph).run(IMAGE)
    return values


@torch.no_grad()
def sqnr_db(reference, candidate):
    return float(20 * torch.log10(reference.norm() / (reference - candidate).norm()))


def names(graph):
    return {node.name: node for node in graph.graph.nodes}


def test_who_else_stands_at_the_seam_hides_no_layer_from_their_judge():
    passed = []

    def look(handed):
        passed.append(handed.level)
        return handed.on()

    report = td.check(net(), (IMAGE,), transform=ObservedTransform(Quantize("x86", {}), look))

    assert report.verdict is td.check(net(), (IMAGE,), transform="quantize:x86").verdict is Verdict.EQUIVALENT
    assert set(passed) == {"export"}


def test_a_healthy_quantized_program_has_its_signal_to_noise():
    report = td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=20")

    assert report.verdict is Verdict.EQUIVALENT
    assert [seen.path for seen in report.comparisons if seen.path.startswith("outputs[")] == [
        "outputs[0]",
        "outputs[1]",
    ]
    assert report.graphs.captured == 1
    assert report.graphs.transformed_calls == 1
    assert "lowers precision on purpose" in report.questions.semantic or "needs no truth" in report.questions.semantic


def test_it_is_rounded_and_a_higher_floor_says_so():
    assert td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=90").verdict is Verdict.DIVERGED


def test_a_wrong_quantizer_falls_below_the_floor(tmp_path):
    file = tmp_path / "narrow.py"
    file.write_text(
        FACTORIES
        + """
from dataclasses import replace

def three_levels():
    config = get_default_x86_inductor_quantization_config()
    weight = replace(config.weight, quant_min=-1, quant_max=1)
    return X86InductorQuantizer().set_global(replace(config, weight=weight))
"""
    )

    report = td.check(net(), (IMAGE,), transform=f"quantize:{file}:three_levels", policy="sqnr>=20")

    assert report.verdict is Verdict.DIVERGED


def test_by_default_each_layer_is_held_to_its_own_steps():
    report = td.check(net(), (IMAGE,), transform="quantize:x86")

    assert report.verdict is Verdict.EQUIVALENT
    assert report.questions.local == "asked"
    assert report.questions.native == "not asked: a quantized program is judged layer by layer"
    assert "is as right as its steps allow; its SQNR is" in report.stage("forward").comparisons[0].reason


def test_the_backward_that_it_does_not_have_is_left_out_and_noted():
    report = td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=20")

    assert [stage.name for stage in report.stages] == ["forward"]
    assert "gradients were not compared: the result of quantize:x86 has no backward" in report.notes


def test_asked_for_its_gradients_are_not_said_to_be_equivalent():
    report = td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=20", stages="gradients")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.stages[0].reason == "the result of quantize:x86 has no backward, so there is nothing to compare"


@pytest.mark.parametrize("name", ["Default", "dynamic"])
def test_any_quantizer_is_named_by_its_class_or_factory(factories, name):
    report = td.check(net(), (IMAGE,), transform=f"quantize:{factories}:{name}", policy="sqnr>=20")

    assert report.verdict is Verdict.EQUIVALENT
    assert any(seen.error for seen in report.comparisons)


def test_a_quantizer_that_quantizes_nothing_did_not_happen(factories):
    report = td.check(net(), (IMAGE,), transform=f"quantize:{factories}:nothing", policy="sqnr>=20")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "the transform did not happen" in report.stages[0].reason


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("number", UsageError, "number returns int, which is not a quantizer"),
        ("broken", ProgramError, "broken could not be built: RuntimeError: no such backend"),
        ("Defualt", ProgramError, "did you mean Default"),
    ],
)
def test_what_is_no_quantizer_is_refused(factories, name, error, words):
    with pytest.raises(error, match=words):
        td.check(net(), (IMAGE,), transform=f"quantize:{factories}:{name}")


def test_an_unknown_quantizer_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="unknown quantizer 'x68': did you mean x86"):
        td.check(net(), (IMAGE,), transform="quantize:x68")


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.quantize_pt2e", None)

    with pytest.raises(EnvironmentUnfit, match=r"torchdelta\[quantize\]"):
        quantizer_factory("x86")


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        self.total.copy_(self.total + x.mean())
        return self.linear(x) + self.total


def test_calibrating_is_no_call_of_the_program():
    _, candidate, side = quantize_side(Side.of(Averaging(), (IMAGE + 1,), {}), "x86")

    assert candidate.total.item() == 0
    side.call(IMAGE + 1)
    assert candidate.total.item() == pytest.approx((IMAGE + 1).mean().item())


def test_only_one_module_is_quantized():
    everything = quantize_side(Side.of(net(), (IMAGE,), {}), "x86")[1]
    _, candidate, side = quantize_side(Side.of(net(), (IMAGE,), {}), "x86", only="hidden")

    weights = [node for node in candidate.graph.nodes if "dequantize_per_channel" in str(node.target)]
    assert [user.name for node in weights for user in node.users] == ["linear"]
    assert len([node for node in everything.graph.nodes if "dequantize_per_channel" in str(node.target)]) == 3
    assert sqnr_db(net()(IMAGE)[0], side.call(IMAGE)[0]) > sqnr_db(net()(IMAGE)[0], everything(IMAGE)[0])


def test_only_is_an_option_of_the_transform():
    options = {"only": "head"}
    report = td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=20", options=options)
    untouched = {seen.path: seen.error for seen in report.comparisons}

    assert report.verdict is Verdict.EQUIVALENT
    assert untouched["outputs[0]"] > 0
    assert untouched["outputs[1]"] < 1e-5


def test_only_a_module_that_is_there_can_be_quantized():
    with pytest.raises(UsageError, match=r"no node is in the module 'heda': did you mean head"):
        td.check(net(), (IMAGE,), transform="quantize:x86", options={"only": "heda"})


def test_only_part_of_what_shares_its_scale_is_quantized():
    # the pooling and the concatenation share the scale of what they read
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)
            self.second = nn.Conv2d(3, 4, 3)
            self.pool = nn.MaxPool2d(2)
            self.last = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.last(self.pool(torch.cat([self.first(x), self.second(x)], 1)))

    for path in ("first", "pool", "last"):
        reference, candidate, _ = quantize_side(Side.of(Shared().eval(), (IMAGE,), {}), "x86", only=path)
        assert candidate(IMAGE).shape == reference(IMAGE).shape


def test_an_observer_has_the_handle_of_what_it_observes_and_so_has_what_dequantizes():
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    graph = torch.export.export(net(), (IMAGE,)).module()
    assign_handles(graph)
    mean = handles_of(names(graph)["mean"])
    prepared = prepare_pt2e(graph, quantizer_factory("x86")())
    prepared(IMAGE)
    observers = {node.args[0].name: node for node in prepared.graph.nodes if "activation_post" in str(node.target)}

    assert handles_of(observers["mean"]) == mean != frozenset()
    assert handles_of(observers["hidden_weight"]) == handles_of(names(prepared)["hidden_weight"]) != frozenset()

    converted = convert_pt2e(prepared)
    behind = [node for node in converted.graph.nodes if handles_of(node) == mean]
    assert [node.name for node in behind] == ["mean", behind[1].name, behind[2].name]
    assert "quantize_per_tensor" in str(behind[1].target)
    assert "dequantize_per_tensor" in str(behind[2].target)


def test_assigning_again_leaves_observers_with_what_they_observe():
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    graph = torch.export.export(net(), (IMAGE,)).module()
    assign_handles(graph)
    prepared = prepare_pt2e(graph, quantizer_factory("x86")())
    before = {node.name: handles_of(node) for node in prepared.graph.nodes if handles_of(node)}
    assign_handles(prepared)

    after = {node.name: handles_of(node) for node in prepared.graph.nodes if node.name in before}
    assert after == before


def test_each_node_of_a_quantized_network_is_matched_and_close():
    reference, candidate, _ = quantize_side(Side.of(net(), (IMAGE,), {}), "x86")
    found = align(node_records(reference), node_records(candidate))
    of_reference, of_candidate = values_of(reference), values_of(candidate)

    matched = [(match.reference, match.candidate) for match in found.matches]
    assert {"batch_norm", "relu", "mean", "linear", "relu_1", "linear_1", "hidden_weight"} <= {
        one for one, _ in matched
    }
    assert {match.how for match in found.matches} == {"handle"}
    for one, other in matched:
        if isinstance(of_reference[one], torch.Tensor) and of_reference[one].norm():
            assert sqnr_db(of_reference[one], of_candidate[other]) > 35, (one, other)


def test_a_folded_batch_norm_is_matched_with_the_convolution_and_its_weights_with_nothing():
    reference, candidate, _ = quantize_side(Side.of(net(), (IMAGE,), {}), "x86")
    found = align(node_records(reference), node_records(candidate))

    matched = {match.reference: match.candidate for match in found.matches}
    assert matched["batch_norm"] == "conv2d"
    assert not {"conv2d", "conv_weight", "conv_bias", "norm_weight"} & matched.keys()
    assert {"conv2d", "conv_weight", "conv_bias", "norm_weight"} <= set(found.covered_reference)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))) + x)


def residual():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), Block(), Block()).eval()


def linear():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 4)).eval()


def sqnrs(comparisons):
    return [seen.measurement.sqnr_db for seen in comparisons if seen.measurement is not None]


@pytest.mark.parametrize("model", [net, residual, linear])
def test_nothing_is_named_in_a_healthy_network_and_each_node_has_its_signal(model):
    found = td.locate(model(), (IMAGE,), transform="quantize:x86")

    assert found.verdict is Verdict.EQUIVALENT
    assert not found.culprits
    quantized_rows = [row for row in found.table if row.local]
    assert len(quantized_rows) >= 3
    assert not found.unmatched_candidate
    assert all(seen.verdict is Verdict.EQUIVALENT for row in quantized_rows for seen in row.local)
    assert all(sqnr >= 35 for row in found.table for sqnr in (*sqnrs(row.local), *sqnrs(row.inherited)))
    assert any(sqnrs(row.inherited) for row in found.table)


def test_layers_whose_scale_depends_on_the_input_are_judged_too(factories):
    report = td.check(linear(), (IMAGE,), transform=f"quantize:{factories}:dynamic")

    assert report.verdict is Verdict.EQUIVALENT
    assert report.questions.local == "asked"


class Spoilt(Quantize):
    """Quantizes, and then changes one of the nodes that dequantize."""

    def __init__(self, spoil):
        super().__init__("x86", {})
        self.spoil = spoil

    def apply(self, side, *, draws_random, lifted=False, seam=hand_on):
        def hand_over(handed):
            def make(graph, inputs):
                made = handed.make(graph, inputs)
                self.spoil(made)
                made.recompile()
                return made

            return seam(replace(handed, make=make))

        return super().apply(side, draws_random=draws_random, lifted=lifted, seam=hand_over)


def read_by(graph, reader, place):
    """Return the node that dequantizes what another reads."""
    return names(graph)[reader].args[place]


def scaled(node, factor):
    with torch.no_grad():
        scale = arguments(node).get("scale")
        if scale is not None:
            set_argument(node, "scale", scale * factor)
        else:
            getattr(node.graph.owning_module, node.args[1].target).mul_(factor)


@pytest.mark.parametrize(
    ("reader", "place", "culprit"),
    [
        ("conv2d", 0, "batch_norm"),
        ("conv2d", 1, "batch_norm"),
        ("linear", 0, "mean"),
        ("linear", 1, "hidden_weight"),
        ("linear_1", 0, "relu_1"),
        ("linear_1", 1, "head_weight"),
    ],
)
def test_a_scale_that_is_twice_too_large_is_the_culprit_and_nothing_else_is(reader, place, culprit):
    found = td.locate(net(), (IMAGE,), transform=Spoilt(lambda graph: scaled(read_by(graph, reader, place), 2)))

    assert found.verdict is Verdict.DIVERGED
    assert [each.node for each in found.culprits] == [culprit]
    assert "what quantizing makes" in found.culprits[0].reason


def test_a_spoilt_layer_in_a_residual_network_is_named_by_its_module():
    def spoil(graph):
        scaled(read_by(graph, "conv2d_3", 1), 1.1)

    found = td.locate(residual(), (IMAGE,), transform=Spoilt(spoil))

    # it is folded into the convolution, and what both compute together is wrong
    assert [(each.op, each.module_path) for each in found.culprits] == [("aten.batch_norm.default", "3.norm")]


def coarse(graph):
    # as one would be that was calibrated on something else
    dequantizer = read_by(graph, "linear", 0)
    for node in (dequantizer, dequantizer.args[0]):
        scaled(node, 30)


def clipping(graph):
    dequantizer = read_by(graph, "linear", 0)
    for node in (dequantizer, dequantizer.args[0]):
        scaled(node, 0.5)


def shifted(graph):
    node = read_by(graph, "linear", 0)
    set_argument(node, "zero_point", arguments(node)["zero_point"] + 10)


def permuted(graph):
    node = read_by(graph, "linear", 1)
    scale = getattr(graph, node.args[1].target)
    scale.copy_(scale.sort().values.flip(0).roll(1))


@pytest.mark.parametrize("spoil", [coarse, clipping, shifted, permuted])
def test_a_check_names_the_layer_whose_parameters_are_wrong(spoil):
    report = td.check(net(), (IMAGE,), transform=Spoilt(spoil))

    assert report.verdict is Verdict.DIVERGED
    reason = report.stage("forward").comparisons[0].reason
    assert "aten.mean.dim" in reason if spoil is not permuted else "of hidden" in reason


def test_an_operation_that_is_wrong_although_its_inputs_are_quantized_rightly_is_named():
    def drop_bias(graph):
        set_argument(names(graph)["linear"], "bias", None)

    found = td.locate(net(), (IMAGE,), transform=Spoilt(drop_bias))

    assert [each.node for each in found.culprits] == ["linear"]


def test_so_few_levels_that_anything_would_pass_are_inconclusive(tmp_path):
    file = tmp_path / "narrow.py"
    file.write_text(
        FACTORIES
        + """
from dataclasses import replace

def three_levels():
    config = get_default_x86_inductor_quantization_config()
    weight = replace(config.weight, quant_min=-1, quant_max=1)
    return X86InductorQuantizer().set_global(replace(config, weight=weight))
"""
    )

    report = td.check(net(), (IMAGE,), transform=f"quantize:{file}:three_levels")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "the steps are so coarse" in report.stage("forward").comparisons[0].reason


def test_buffers_that_a_quantized_program_writes_to_are_compared():
    healthy = td.check(Averaging(), (IMAGE + 1,), transform="quantize:x86")
    wrong = td.check(Averaging(), (IMAGE + 1,), transform=Spoilt(lambda graph: graph.total.add_(1)))

    assert "buffers['total']" in [seen.path for seen in healthy.comparisons]
    assert healthy.verdict is Verdict.EQUIVALENT
    assert wrong.verdict is Verdict.DIVERGED


# kept for good: an operator whose library is gone makes every later decomposition fail
LIBRARY = torch.library.Library("torchdelta_test", "FRAGMENT")
LIBRARY.define("dequantize_strangely(Tensor x) -> Tensor")
LIBRARY.impl("dequantize_strangely", lambda x: (x * 64).round() / 64, "CompositeExplicitAutograd")


@pytest.fixture
def strange_operator():
    return torch.ops.torchdelta_test.dequantize_strangely.default


def test_nobody_knows_the_steps_of_an_operator_of_ones_own(strange_operator):
    def spoil(graph):
        node = read_by(graph, "linear_1", 0)
        node.args, node.target = (node.args[0].args[0],), strange_operator

    report = td.check(net(), (IMAGE,), transform=Spoilt(spoil))

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "how it is quantized is not known" in report.stage("forward").comparisons[0].reason


def test_what_goes_wrong_before_anything_is_quantized_is_no_noise_either():
    # its layers are those of a graph that is wrong already
    planted = td.faults.plant("relu_leaky", then=Quantize("x86", {}))
    report = td.check(net(), (IMAGE,), transform=planted)

    assert report.verdict is Verdict.DIVERGED
    assert "in the graph that is quantized and before it is" in report.stage("forward").comparisons[0].reason


def test_what_is_not_quantized_beside_it_is_judged_by_its_roundings():
    # batch norm is folded into a convolution that stays in floats
    healthy = td.check(net(), (IMAGE,), transform="quantize:x86", options={"only": "head"})

    assert healthy.verdict is Verdict.EQUIVALENT

    class OnlyHead(Spoilt):
        def __init__(self, spoil):
            super().__init__(spoil)
            self.only = "head"

    def spoil(graph):
        with torch.no_grad():
            graph.get_parameter(names(graph)["conv2d"].args[1].target).mul_(1.001)

    found = td.locate(net(), (IMAGE,), transform=OnlyHead(spoil))

    assert [each.node for each in found.culprits] == ["batch_norm"]


def channels(scale):
    return Levels(scale=scale, zero_point=torch.zeros(2), low=-128, high=127, axes=(0,))


def test_the_step_is_that_of_each_channel_and_a_scale_far_too_large_does_not_excuse_itself():
    values = torch.tensor([[-1.0, 0.5], [100.0, 50.0]], dtype=torch.float64)
    called_for = torch.tensor([[2.0 / 255], [200.0 / 255]], dtype=torch.float64)

    assert torch.allclose(step_for(values, channels(None)), called_for)
    assert torch.allclose(step_for(values, channels(called_for.flatten() * 2)), called_for * 2)
    assert torch.allclose(step_for(values, channels(called_for.flatten() * 100)), called_for * COARSER)
    assert torch.allclose(step_for(values, channels(called_for.flatten() / 100)), called_for)


def test_equal_values_are_rounded_alike_and_in_one_run_by_at_least_a_third_of_a_step():
    values = torch.full((4, 4), 0.7)
    levels = Levels(scale=None, zero_point=torch.tensor(0.0), low=0, high=255, axes=())
    runs = [rounded(values, levels, run, torch.Generator().manual_seed(0), apart=False) for run in range(RUNS)]
    step = 0.7 / 255

    assert all(len(run.unique()) == 1 for run in runs)
    errors = [float((run - values).abs().max()) for run in runs]
    assert max(errors) >= 0.33 * step
    assert max(errors) <= 0.51 * step


def test_cutting_off_a_single_outlier_is_noise_and_cutting_off_half_of_the_values_is_none():
    torch.manual_seed(0)
    values = torch.cat([torch.rand(9999), torch.tensor([8.0])])

    def error(largest):
        levels = Levels(scale=torch.tensor(largest / 255), zero_point=torch.tensor(0.0), low=0, high=255, axes=())
        run = rounded(values, levels, 0, torch.Generator().manual_seed(0), apart=False)
        return float((run - values).abs().max())

    assert error(7.0) >= 0.9
    assert error(0.5) < 0.1


def test_a_mask_constant_in_a_quantized_layer_hides_nothing_and_must_not_be_lost():
    generator = torch.Generator().manual_seed(0)
    layer = torch.randn(8, 8, generator=generator)
    layer[:, 0] = torch.finfo(torch.float32).min
    noise = [{"layer": layer.double() + 0.01 * torch.randn(8, 8, generator=generator)} for _ in range(RUNS)]

    def judged(candidate):
        sides = {"layer": layer}, {"layer": candidate}, {"layer": layer}
        (comparison,), _ = Judge(policy=StepNoise()).compare(*sides, noisy=noise)
        return comparison

    lost, wrong = layer.clone(), layer.clone()
    lost[0, 0] = 0.0
    wrong[0, 1] += 5.0

    assert judged(lost).verdict is Verdict.DIVERGED
    assert judged(wrong).verdict is Verdict.DIVERGED
    assert judged(layer + 0.001).verdict is Verdict.EQUIVALENT
