"""A quantized program is held against the float one, and each of its nodes against the node that it was made of."""

import sys

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.errors import EnvironmentUnfit, ProgramError, UsageError
from torchdelta.execute.sides import Side
from torchdelta.locate.align import align
from torchdelta.locate.handles import assign_handles, handles_of
from torchdelta.locate.listing import node_records
from torchdelta.transforms.quantize import quantized, quantizer_named

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


def test_the_noise_of_floats_does_not_judge_it():
    report = td.check(net(), (IMAGE,), transform="quantize:x86")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "so coarse a dtype" in report.stage("forward").comparisons[0].reason


def test_the_backward_that_it_does_not_have_is_left_out_and_noted():
    report = td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=20")

    assert [stage.name for stage in report.stages] == ["forward"]
    assert any("has no backward" in note for note in report.notes)


def test_asked_for_its_gradients_are_not_said_to_be_equivalent():
    report = td.check(net(), (IMAGE,), transform="quantize:x86", policy="sqnr>=20", stages="gradients")

    assert report.verdict is Verdict.INCONCLUSIVE


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
        ("number", UsageError, "number gives no quantizer but int"),
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
        quantizer_named("x86")


def test_calibrating_is_no_call_of_the_program():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 2)
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x):
            self.total.copy_(self.total + x.mean())
            return self.linear(x) + self.total

    _, candidate, side = quantized(Side.of(Averaging(), (IMAGE + 1,), {}), "x86")

    assert candidate.total.item() == 0
    side.call(IMAGE + 1)
    assert candidate.total.item() == pytest.approx((IMAGE + 1).mean().item())


def test_only_one_module_is_quantized():
    everything = quantized(Side.of(net(), (IMAGE,), {}), "x86")[1]
    _, candidate, side = quantized(Side.of(net(), (IMAGE,), {}), "x86", only="hidden")

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
        reference, candidate, _ = quantized(Side.of(Shared().eval(), (IMAGE,), {}), "x86", only=path)
        assert candidate(IMAGE).shape == reference(IMAGE).shape


def test_an_observer_has_the_handle_of_what_it_observes_and_so_has_what_dequantizes():
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    graph = torch.export.export(net(), (IMAGE,)).module()
    assign_handles(graph)
    mean = handles_of(names(graph)["mean"])
    prepared = prepare_pt2e(graph, quantizer_named("x86")())
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
    prepared = prepare_pt2e(graph, quantizer_named("x86")())
    before = {node.name: handles_of(node) for node in prepared.graph.nodes if handles_of(node)}
    assign_handles(prepared)

    after = {node.name: handles_of(node) for node in prepared.graph.nodes if node.name in before}
    assert after == before


def test_each_node_of_a_quantized_network_is_matched_and_close():
    reference, candidate, _ = quantized(Side.of(net(), (IMAGE,), {}), "x86")
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
    reference, candidate, _ = quantized(Side.of(net(), (IMAGE,), {}), "x86")
    found = align(node_records(reference), node_records(candidate))

    matched = {match.reference: match.candidate for match in found.matches}
    assert matched["batch_norm"] == "conv2d"
    assert not {"conv2d", "conv_weight", "conv_bias", "norm_weight"} & matched.keys()
    assert {"conv2d", "conv_weight", "conv_bias", "norm_weight"} <= set(found.covered_reference)
