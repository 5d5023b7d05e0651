"""What the README shows is what happens."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (torchdelta .*)\n(\S+)", README, re.MULTILINE)
TORCHDELTA = pathlib.Path(sys.executable).with_name("torchdelta")


def test_the_readme_shows_commands_and_python():
    assert COMMANDS
    assert "```python" in README


@pytest.mark.slow
@pytest.mark.parametrize(("command", "verdict"), COMMANDS)
def test_a_command_of_the_readme_prints_what_is_shown(command, verdict):
    words = shlex.split(command)[1:]
    done = subprocess.run([TORCHDELTA, *words], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.startswith(verdict)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("inductor-a")
def test_the_python_of_the_readme_runs():
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names = {
        "model": model,
        "other_model": model,
        "x": torch.randn(2, 4),
        "my_fx_pass": lambda graph_module, example_inputs: lambda *args: tuple(y.clone() for y in graph_module(*args)),
        "reference": torch.ones(3),
        "candidate": torch.ones(3),
    }

    exec(block.group(1), names)

    assert names["report"].verdict is names["td"].Verdict.EQUIVALENT


@pytest.mark.slow
@pytest.mark.xdist_group("inductor-a")
def test_the_demo_shows_its_three_verdicts_and_a_script():
    done = subprocess.run([sys.executable, ROOT / "examples" / "demo.py"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if " under " in line] == [
        "equivalent",
        "diverged",
        "diverged",
    ]
    assert "torch.nn.functional.gelu(" in done.stdout
