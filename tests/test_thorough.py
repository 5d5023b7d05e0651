"""The local question: a node that is wrong by itself is seen although the program around it hides that."""

import copy

import pytest
import torch
from typer.testing import CliRunner

import torchdelta as td
from programs.hidden import Hidden
from torchdelta.cli import app
from torchdelta.transforms.fx_pass import FxPass


class Drowned(torch.nn.Module):
    """What the branch computes is a millionth of what it is added to."""

    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(16, 16)

    def forward(self, x):
        return 1e6 * x + torch.tanh(self.branch(x))


def drowned():
    torch.manual_seed(0)
    return Drowned().requires_grad_(False), (torch.randn(8, 16),)


def off_by_a_thousandth(graph_module, inputs):
    tanh = next(node for node in graph_module.graph.nodes if "tanh" in node.name)
    with graph_module.graph.inserting_after(tanh):
        scaled = graph_module.graph.call_function(torch.mul, (tanh, 1.001))
    tanh.replace_all_uses_with(scaled, lambda user: user is not scaled)
    return graph_module


def untouched(graph_module, inputs):
    return graph_module


def test_sees_what_the_outputs_hide():
    model, inputs = drowned()
    plain = td.check(model, inputs, transform=off_by_a_thousandth, semantic=False)
    thorough = td.check(model, inputs, transform=off_by_a_thousandth, semantic=False, thorough=True)

    assert plain.verdict is td.Verdict.EQUIVALENT
    assert plain.questions.local.startswith("not asked")
    assert thorough.verdict is td.Verdict.DIVERGED
    assert thorough.questions.local == "asked"
    assert [culprit.op for culprit in thorough.culprits] == ["tanh"]
    assert thorough.stage("local").verdict is td.Verdict.DIVERGED
    assert thorough.stage("forward").verdict is td.Verdict.EQUIVALENT


def test_says_how_many_nodes_were_looked_at():
    model, inputs = drowned()
    report = td.check(model, inputs, transform=untouched, options={"unchanged": "ok"}, thorough=True)

    assert report.verdict is td.Verdict.EQUIVALENT
    assert report.coverage.matched == report.coverage.total > 0
    assert any(note.startswith("local: ") and "0 are not the same to the bit" in note for note in report.notes)


def test_correct_rewrites_are_no_alarm():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(4)))
    report = td.check(
        model, (torch.randn(4, 16),), transform=FxPass(Hidden(rewrites=12), {"graph": "export"}), thorough=True
    )

    assert report.verdict is td.Verdict.EQUIVALENT
    assert report.questions.local == "asked"


def test_a_candidate_that_fails_is_not_looked_at():
    def refuse(graph_module, inputs):
        raise ValueError("no")

    model, inputs = drowned()
    report = td.check(model, inputs, transform=refuse, thorough=True)

    assert report.verdict is td.Verdict.CRASHED
    assert report.questions.local == "not asked: the candidate failed"


def test_modules_are_looked_at_where_there_is_no_graph():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].bias += 1e-3
    report = td.check(model, (torch.randn(8, 16),), candidate=other, semantic=False, thorough=True)

    assert report.verdict is td.Verdict.DIVERGED
    assert [culprit.node for culprit in report.culprits] == ["2"]


def test_the_command_line_asks_for_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "def build():\n    return (lambda x: torch.sin(x) * 2.0), (torch.ones(4),)\n"
        "def same(graph_module, inputs):\n    return graph_module\n"
    )
    result = CliRunner().invoke(
        app, ["check", f"{program}:build", "-t", f"{program}:same", "-O", "unchanged=ok", "--thorough", "-v"]
    )

    assert result.exit_code == 0, result.output
    assert "looked at by themselves" in " ".join(result.output.split())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.xdist_group("inductor-b")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_correct_compiler_is_no_alarm(dtype):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(dtype)
    report = td.check(model, (torch.randn(2, 6, 16, dtype=dtype),), transform="inductor", thorough=True)

    assert report.stage("local").verdict is td.Verdict.EQUIVALENT
    assert report.coverage.matched == report.coverage.total > 50


@pytest.mark.slow
@pytest.mark.xdist_group("inductor-b")
def test_an_error_function_by_another_polynomial_is_no_alarm():
    everywhere = torch.linspace(-8, 8, 2_000_000)
    report = td.check(lambda x: torch.erf(x), (everywhere,), transform="inductor", thorough=True)

    assert report.stage("local").verdict is td.Verdict.EQUIVALENT


def rms_norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rounding_after(operation):
    """A pass that rounds the results of an operation to bfloat16 and back."""

    def insert(graph_module, inputs):
        for node in list(graph_module.graph.nodes):
            if node.target is operation:
                with graph_module.graph.inserting_after(node):
                    narrow = graph_module.graph.call_function(torch.ops.aten.to.dtype, (node, torch.bfloat16))
                with graph_module.graph.inserting_after(narrow):
                    wide = graph_module.graph.call_function(torch.ops.aten.to.dtype, (narrow, torch.float32))
                node.replace_all_uses_with(wide, delete_user_cb=lambda user, narrow=narrow: user is not narrow)
        graph_module.recompile()
        return graph_module

    return insert


def test_a_rounding_in_a_wide_part_is_not_hidden_by_the_narrow_result_behind_it():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    report = td.check(
        rms_norm,
        (x,),
        transform=rounding_after(torch.ops.aten.rsqrt.default),
        options={"graph": "export"},
        thorough=True,
        semantic=False,
    )

    assert report.verdict is td.Verdict.DIVERGED
    assert [culprit.op for culprit in report.culprits] == ["aten.rsqrt.default"]


def test_a_node_that_rounds_to_the_same_bits_natively_is_looked_at_in_float64():
    def tiny_factor(graph_module, inputs):
        for node in list(graph_module.graph.nodes):
            if node.target is torch.ops.aten.relu.default:
                with graph_module.graph.inserting_after(node):
                    scaled = graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1 + 2.0**-20))
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        graph_module.recompile()
        return graph_module

    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

    def program(x):
        return torch.relu(x).argmax(-1)

    plain, thorough = (
        td.check(program, (x,), transform=tiny_factor, options={"graph": "export"}, thorough=is_thorough)
        for is_thorough in (False, True)
    )

    assert plain.verdict is td.Verdict.EQUIVALENT
    assert thorough.verdict is td.Verdict.DIVERGED
    assert [culprit.op for culprit in thorough.culprits] == ["aten.relu.default"]
