"""Each module is quantized alone, and the one that loses most by it is first."""

import io
import json
import math

import pytest
import torch
from rich.console import Console
from torch import nn

from torchdelta.api import sensitivity
from torchdelta.errors import ProgramError, UsageError
from torchdelta.locate.sensitivity import NOTHING_ALONE
from torchdelta.records.codec import decode, encode
from torchdelta.records.sensitivity import Sensitivity
from torchdelta.report.terminal.sensitivity import print_sensitivity

pytest.importorskip("torchao")

BATCH = torch.linspace(-3, 3, 16 * 12).reshape(16, 12).sin()

QUANTIZERS = """
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer, get_default_x86_inductor_quantization_config)

class Nothing(X86InductorQuantizer):
    pass

class OneOnly(X86InductorQuantizer):
    def __init__(self):
        super().__init__()
        self.set_global(get_default_x86_inductor_quantization_config())

    def validate(self, model):
        annotated = [node for node in model.graph.nodes if "quantization_annotation" in node.meta]
        if len(annotated) == 1:
            raise RuntimeError(f"{annotated[0].name} is not to be alone")

class Broken(OneOnly):
    def annotate(self, model):
        raise RuntimeError("no annotation today")
"""


@pytest.fixture
def quantizers(tmp_path):
    file = tmp_path / "quantizers.py"
    file.write_text(QUANTIZERS)
    return str(file)


class Parted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return {"hidden": hidden, "result": self.third(hidden)}


def model():
    torch.manual_seed(0)
    return Parted().eval()


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_the_layer_with_outliers_among_its_weights_is_first(name):
    spoilt = model()
    with torch.no_grad():
        # all of a channel's weights share its step, which the largest of them sets
        spoilt.get_submodule(name).weight[:, 0] *= 200
        for parameter in spoilt.get_submodule(name).parameters():
            parameter.div_(20)

    found = sensitivity(spoilt, (BATCH,))

    assert {alone.module_path for alone in found.modules} == {"first", "second", "third"}
    assert found.modules[0].module_path == name
    assert found.modules[0].sqnr_db < found.modules[1].sqnr_db <= found.modules[2].sqnr_db
    assert all(alone.ops == ("aten.linear.default",) for alone in found.modules)


def test_the_layer_that_reads_an_activation_with_outliers_is_first():
    class Outlying(Parted):
        def forward(self, x):
            spread = torch.cat([torch.tanh(self.first(x))[:, 1:] * 0.01, torch.full((16, 1), 10.0)], 1)
            return self.third(torch.tanh(self.second(spread)))

    torch.manual_seed(0)
    outlying = Outlying().eval()
    with torch.no_grad():
        outlying.second.weight[:, -1] = 0
        outlying.second.weight *= 100

    assert sensitivity(outlying, (BATCH,)).modules[0].module_path == "second"


def test_each_output_is_measured_and_one_that_is_computed_before_is_untouched():
    found = sensitivity(model(), (BATCH,))
    third = next(alone for alone in found.modules if alone.module_path == "third")

    by_path = {effect.path: effect.sqnr_db for effect in third.effects}
    assert by_path["outputs['hidden']"] == math.inf
    assert 20 < by_path["outputs['result']"] < 80
    assert third.sqnr_db == by_path["outputs['result']"]
    assert [effect.path for effect in found.together] == list(by_path)
    worst = min(effect.sqnr_db for effect in found.together)
    assert worst < min(alone.sqnr_db for alone in found.modules)


def test_a_module_has_its_own_operations_only_and_its_parts_have_theirs():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return torch.relu(self.conv(x) + x)

    torch.manual_seed(0)
    nested = nn.Sequential(nn.Conv2d(3, 3, 1), Residual()).eval()
    found = sensitivity(nested, (torch.rand(2, 3, 6, 6),))

    ops = {alone.module_path: alone.ops for alone in found.modules}
    assert ops == {"0": ("aten.conv2d.default",), "1.conv": ("aten.conv2d.default",), "1": ("aten.add.Tensor",)}


def test_only_what_the_quantizer_may_touch_is_tried():
    found = sensitivity(model(), (BATCH,), options={"only": "second"})

    assert [alone.module_path for alone in found.modules] == ["second"]


def test_a_module_that_cannot_be_quantized_alone_is_listed_with_its_reason(quantizers):
    found = sensitivity(model(), (BATCH,), transform=f"quantize:{quantizers}:OneOnly")

    assert len(found.modules) == 3
    assert all("RuntimeError" in alone.reason and "is not to be alone" in alone.reason for alone in found.modules)
    assert all(alone.sqnr_db is None for alone in found.modules)
    assert found.together


def test_one_that_can_be_quantized_stands_before_one_that_cannot(quantizers, monkeypatch):
    from torchdelta.locate import sensitivity as engine

    quantize = engine.quantize

    def refuse(*args, only=None, **how):
        if only == "second":
            raise RuntimeError("not this one\nfor many reasons")
        return quantize(*args, only=only, **how)

    monkeypatch.setattr(engine, "quantize", refuse)
    found = sensitivity(model(), (BATCH,))

    assert found.modules[-1].module_path == "second"
    assert found.modules[-1].reason == "RuntimeError: not this one"
    assert not found.modules[0].reason


def test_a_quantizer_that_quantizes_nothing_is_noted(quantizers):
    found = sensitivity(model(), (BATCH,), transform=f"quantize:{quantizers}:Nothing")

    assert found.modules == ()
    assert found.notes == ("the quantizer quantizes nothing in this program",)


def test_a_quantizer_that_fails_as_a_whole_is_told(quantizers):
    with pytest.raises(ProgramError, match="Parted as a whole: RuntimeError: no annotation today"):
        sensitivity(model(), (BATCH,), transform=f"quantize:{quantizers}:Broken")


def test_what_quantizes_nothing_is_refused():
    with pytest.raises(UsageError, match="cast:bfloat16 quantizes nothing"):
        sensitivity(model(), (BATCH,), transform="cast:bfloat16")


def test_progress_is_told_module_by_module():
    told = []
    sensitivity(model(), (BATCH,), progress=told.append)

    assert [words for words in told if "alone" in words] == [
        "first alone (1 of 3)",
        "second alone (2 of 3)",
        "third alone (3 of 3)",
    ]


def test_the_program_is_left_as_it_was():
    own, batch = model(), BATCH.clone()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    random = torch.get_rng_state()
    sensitivity(own, (batch,))

    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())
    assert torch.equal(batch, BATCH)
    assert torch.equal(torch.get_rng_state(), random)


def test_integers_have_no_signal_and_that_is_noted():
    class Choosing(Parted):
        def forward(self, x):
            scores = super().forward(x)["result"]
            return scores, scores.argmax(1)

    torch.manual_seed(0)
    found = sensitivity(Choosing().eval(), (BATCH,))

    assert [effect.path for effect in found.together] == ["outputs[0]"]
    assert found.notes == ("outputs[1] has no SQNR: int64[16] became int64[16]",)


def test_it_is_printed_worst_first(quantizers):
    text = io.StringIO()
    found = sensitivity(model(), (BATCH,))
    print_sensitivity(found, Console(file=text, width=120))
    lines = text.getvalue().splitlines()

    assert lines[0].startswith(f"{found.modules[0].module_path} loses most: quantized alone it leaves ")
    table = [line.split()[0] for line in lines if "aten.linear.default" in line]
    assert table == [alone.module_path for alone in found.modules]
    assert any("untouched" in line for line in lines)


def test_what_could_not_be_quantized_alone_is_printed_with_its_reason(quantizers):
    text = io.StringIO()
    found = sensitivity(model(), (BATCH,), transform=f"quantize:{quantizers}:OneOnly")
    print_sensitivity(found, Console(file=text, width=120))

    assert text.getvalue().startswith("no module could be quantized alone")
    assert text.getvalue().count("not alone  ") == 3
    assert NOTHING_ALONE not in text.getvalue()


def test_its_records_survive_json_with_what_is_infinite():
    found = sensitivity(model(), (BATCH,))

    assert decode(Sensitivity, json.loads(json.dumps(encode(found), allow_nan=False)), "sensitivity") == found
