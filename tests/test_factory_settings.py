"""A program is what its factory made it: settings of `build()` hold for every side, in every command, and not after."""

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.compile.dynamo import require_known_config
from torchdelta.audit.audit import audit
from torchdelta.errors import UsageError
from torchdelta.program.loading import load_program
from torchdelta.records.audit import TrialOutcome
from torchdelta.records.case import CheckOptions
from torchdelta.records.recording import with_absolute_file

FILE = """
import os
import torch
import torch._inductor.config


class Asks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x), torch.full((2,), 0.1)


def in_float64():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    os.environ["TORCHDELTA_FACTORY"] = "ran"
    return Asks(), (torch.randn(2, 4),)


def without_gradients():
    torch.set_grad_enabled(False)
    return Asks(), (torch.randn(2, 4),)


def with_a_bug():
    torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.randn(4, 8),)


def dies(graph_module, example_inputs):
    assert torch.get_default_dtype() is not torch.float64, "float64 is the default"
    return graph_module.forward
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHDELTA_FACTORY", raising=False)
    (tmp_path / "programs.py").write_text(FILE)
    return str(tmp_path / "programs.py")


def test_settings_of_the_factory_hold_while_it_is_checked_and_not_after(program):
    threads = torch.get_num_threads()

    report = td.check(f"{program}:in_float64", transform="eager")

    outputs = {each.path: each for each in report.stage("forward").comparisons}
    assert report.verdict is Verdict.EQUIVALENT
    assert outputs["outputs[1]"].dtype == "float64"
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads
    assert "TORCHDELTA_FACTORY" not in os.environ


def test_a_factory_that_switches_gradients_off_has_none(program):
    report = td.check(f"{program}:without_gradients", transform="eager")

    assert [stage.name for stage in report.stages] == ["forward"]
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "locate", "diagnose"])
def test_settings_of_the_compiler_hold_in_every_command(program, command, tmp_path):
    keywords = {"out": tmp_path / "found"} if command == "diagnose" else {}

    found = getattr(td, command)(f"{program}:with_a_bug", transform="inductor", **keywords)

    assert found.verdict is Verdict.DIVERGED
    assert torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY is None


@pytest.mark.slow
def test_settings_of_the_factory_hold_for_every_fault_of_an_audit(program):
    def is_in_float64(graph_module, example_inputs):
        assert torch.get_default_dtype() is torch.float64
        return graph_module.forward

    found = audit(f"{program}:in_float64", options=CheckOptions(transform=is_in_float64), kinds=["bias_dropped"])

    assert [trial.outcome for trial in found.trials] == [TrialOutcome.CAUGHT]
    assert torch.get_default_dtype() is torch.float32


SCRIPT = """
import torch
import torch._inductor.config

torch.set_default_dtype(torch.float64)
torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
torch.compile(layers)(torch.randn(4, 8))
"""


@pytest.mark.slow
def test_settings_of_a_script_hold_while_its_calls_are_checked(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torchdelta", "run", "--strict", "-o", "found", "--guard", "inductor", "script.py"]

    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ran.returncode == 1, ran.stderr
    assert '"dtype": "float64"' in (tmp_path / "found" / "0001-dynamo" / "report.json").read_text()


@pytest.mark.slow
def test_flags_of_the_factory_hold_in_the_workers_of_a_reduction(program):
    small = td.minify(f"{program}:in_float64", transform=f"{program}:dies", isolated=True)

    assert small.report.failure is not None
    assert "float64 is the default" in small.report.failure.message
    assert torch.get_default_dtype() is torch.float32


def test_settings_of_dynamo_and_functorch_are_options():
    seen = []

    def look(graph_module, example_inputs):
        seen.append((torch._dynamo.config.capture_scalar_outputs, torch._functorch.config.debug_assert))
        return graph_module.forward

    options = {"dynamo.capture_scalar_outputs": True, "functorch.debug_assert": True, "unchanged": "ok"}
    td.check(lambda x: x.sin(), (torch.ones(2),), transform=look, options=options)

    assert set(seen) == {(True, True)}
    assert not torch._dynamo.config.capture_scalar_outputs
    with pytest.raises(UsageError, match="dynamo has no setting"):
        td.check(lambda x: x, (torch.ones(2),), transform="eager", options={"dynamo.nothing": 1})
    with pytest.raises(UsageError, match="functorch's setting"):
        td.check(lambda x: x, (torch.ones(2),), transform="eager", options={"functorch.debug_assert": 3})


def test_a_whole_number_may_stand_for_a_float_and_a_truth_value_for_no_number():
    require_known_config({"cpu_gpu_bw": 50})
    with pytest.raises(UsageError, match="cpu_gpu_bw is float"):
        require_known_config({"cpu_gpu_bw": True})
    with pytest.raises(UsageError, match="max_fusion_size is int"):
        require_known_config({"max_fusion_size": True})


def test_a_file_may_take_its_own_folder_from_the_search_path(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        "import sys\nimport torch\nsys.path.remove(__file__.rpartition('/')[0])\n\n\n"
        "def build():\n    return torch.nn.ReLU(), (torch.ones(2),)\n"
    )

    assert isinstance(load_program(f"{file}:build").call, torch.nn.ReLU)
    assert str(tmp_path) not in sys.path


MOVES = """
import os
import torch


def program(x):
    return x.sum(0) + 1


def build():
    os.chdir("elsewhere")
    return program, (torch.randn(4, 3),)


def {name}(graph_module, example_inputs):
    factor = {factor} if os.path.basename(os.getcwd()) == "elsewhere" else 2.0
    return lambda *args: tuple(each * factor for each in graph_module.forward(*args))
"""


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.EQUIVALENT), (1.5, Verdict.DIVERGED)])
@pytest.mark.parametrize("command", ["check", "locate"])
def test_a_factory_may_move_to_another_directory_than_that_of_the_pass(command, factor, verdict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moves.py").write_text(MOVES.format(name="scale", factor=factor))

    found = getattr(td, command)("moves.py:build", transform="moves.py:scale")

    assert found.verdict is verdict
    assert found.case.transform == "moves.py:scale"
    assert os.getcwd() == str(tmp_path)


def test_a_module_may_move_to_another_directory_when_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moves = MOVES.format(name="scale", factor=1.0).replace('    os.chdir("elsewhere")\n', "")
    (tmp_path / "moves_at_once.py").write_text(f'{moves}\n\nos.chdir("elsewhere")\n')

    report = td.check("moves_at_once.py:build", transform="moves_at_once.py:scale", optimizer="moves_at_once.py:build")

    assert report.verdict is Verdict.EQUIVALENT
    assert report.case.program == "moves_at_once.py:build"
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "absolute"),
    [
        ("a.py:build", "{here}/a.py:build"),
        ("module:a.py:build", "module:{here}/a.py:build"),
        ("recorded", "{here}/recorded"),
        ("gone.py:build", "gone.py:build"),
        ("package.module:build", "package.module:build"),
        ("cast:bfloat16", "cast:bfloat16"),
        ("inductor", "inductor"),
    ],
)
def test_names_of_files_that_exist_become_absolute(name, absolute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    (tmp_path / "recorded").mkdir()

    assert with_absolute_file(name) == absolute.format(here=tmp_path)
