"""A saved report is read and shown where torch, numpy and numba cannot be imported."""

import subprocess
import sys

import pytest
import torch

import torchdelta.cli
from programs import reports
from torchdelta.records.codec import to_json, write_report

WITHOUT = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "numba"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Refuse())
"""


def run_without(code, *arguments):
    """Run Python code in an interpreter of its own where torch, numpy and numba cannot be imported."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(params=reports.ALL, ids=lambda make: make.__name__)
def report(request):
    return request.param()


@pytest.fixture
def path(report, tmp_path):
    write_report(report, tmp_path / "report.json")
    return tmp_path / "report.json"


@pytest.mark.parametrize("name", ["torch", "torch.nn", "numpy", "numba"])
def test_the_hook_really_keeps_it_out(name):
    assert f"{name.partition('.')[0]} is not installed here" in run_without(f"import {name}").stderr


def test_a_report_is_read_and_written(path, report):
    ran = run_without("import torchdelta as td; print(td.to_json(td.read_report(sys.argv[1])), end='')", path)

    assert ran.stderr == ""
    assert ran.stdout == to_json(report)


def test_show_prints_what_it_prints_with_torch(path, report, monkeypatch, capsys):
    assert sys.modules["torch"] is torch
    monkeypatch.setattr(sys, "argv", ["torchdelta", "show", str(path), "--verbose"])
    with pytest.raises(SystemExit) as exited:
        torchdelta.cli.main()
    with_torch = capsys.readouterr()

    without = run_without("import torchdelta.cli; sys.argv[0] = 'torchdelta'; torchdelta.cli.main()", *sys.argv[1:])

    assert without.stdout == with_torch.out
    assert without.stdout.startswith(report.verdict.value)
    assert without.stderr == with_torch.err == ""
    assert without.returncode == exited.value.code


def test_check_says_what_it_lacks():
    ran = run_without("import torchdelta.cli; torchdelta.cli.main()", "check", "model.py:build", "-t", "inductor")

    assert ran.returncode == 2
    assert ran.stderr == "torchdelta: a check needs torch, which is not installed: install it first\n"
