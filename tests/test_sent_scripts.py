"""A script can be sent: the user's own code that it imports is copied beside it, and its header says which files."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchdelta as td
from torchdelta.repro.finding import Finding
from torchdelta.repro.imports import ScriptImports
from torchdelta.repro.issue import issue_text
from torchdelta.repro.script import write

PASS = """
import torch
from {helpers} import OFF

def off(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if "relu" in str(node.target):
            with graph_module.graph.inserting_after(node):
                changed = graph_module.graph.call_function(torch.add, (node, OFF))
            node.replace_all_uses_with(changed, lambda user: user is not changed)
    return graph_module
"""


@pytest.fixture
def found(tmp_path):
    """The finding of a pass in a folder of its own, which imports from a file beside it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sent_pass.py").write_text(PASS.format(helpers="sent_helpers"))
    (folder / "sent_helpers.py").write_text("import sent_more\nOFF = sent_more.OFF\n")
    (folder / "sent_more.py").write_text("import math\nOFF = 0.5\n")
    (folder / "sent_unused.py").write_text("OFF = 0.0\n")
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    inputs = (torch.tensor([-1.0, 2.0]),)
    report = td.check(graph, inputs, transform=f"{folder / 'sent_pass.py'}:off")
    return Finding(graph=graph, inputs=inputs, case=report.case, report=report)


def names_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


def run_in_an_empty_folder(out, tmp_path):
    """Run out/repro.py where nothing of the user's is, and torchdelta cannot be imported."""
    empty = tmp_path / "elsewhere"
    shutil.copytree(out, empty)
    shutil.rmtree(tmp_path / "mine", ignore_errors=True)
    runner = "import runpy, sys\nsys.modules['torchdelta'] = None\nrunpy.run_path('repro.py', run_name='__main__')"
    return subprocess.run([sys.executable, "-I", "-c", runner], cwd=empty, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_pass_and_all_that_it_imports_are_copied_so_that_the_script_runs_elsewhere(found, tmp_path):
    out = tmp_path / "out"
    text = write(found, out / "repro.py").path.read_text()

    copies = ["repro_code/sent_helpers.py", "repro_code/sent_more.py", "repro_code/sent_pass.py"]
    assert names_in(out) == ["repro.py", *copies]
    header = " ".join(text.split('"""')[1].split())
    listed = "repro_code/sent_pass.py, repro_code/sent_helpers.py, repro_code/sent_more.py"
    assert f"Beside it is the user's own code, which it imports: {listed}." in header
    ended = run_in_an_empty_folder(out, tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "the bug is there" in ended.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
@pytest.mark.parametrize(
    ("name", "graph", "region"),
    [("fold", "symbolic", ("conv", "bn")), ("fold_dynamo", "dynamo", ("conv2d", "batch_norm"))],
)
def test_a_fold_with_a_wrong_epsilon_names_the_region_and_its_script_runs_alone(name, graph, region, tmp_path, workers):
    file, out = Path(__file__).parent / "programs" / "wrong_fold.py", tmp_path / "out"
    report = td.diagnose(
        f"{file}:build", transform=f"{file}:{name}", options={"graph": graph}, out=out, issue=True, workers=workers
    )

    assert report.verdict is td.Verdict.DIVERGED
    assert [culprit.region for culprit in report.culprits] == [region]
    assert "`repro_code/wrong_fold.py`, beside it:" in (out / "repro.md").read_text()
    ended = run_in_an_empty_folder(out, tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "the bug is there" in ended.stdout


def test_a_pass_that_is_beside_the_script_is_not_copied(found, tmp_path):
    text = write(found, tmp_path / "mine" / "repro.py").path.read_text()

    assert names_in(tmp_path / "mine") == [
        *("repro.py", "sent_helpers.py", "sent_more.py", "sent_pass.py", "sent_unused.py")
    ]
    assert "own code" not in text


def test_a_copy_does_not_replace_another_file_of_the_user(found, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "sent_helpers.py").write_text("OTHER = 1\n")
    write(found, out / "repro.py")

    assert (out / "sent_helpers.py").read_text() == "OTHER = 1\n"
    assert (out / "repro_code" / "sent_helpers.py").read_text().startswith("import sent_more")
    assert "repro_code" in (out / "repro.py").read_text()


def test_a_copy_of_an_earlier_script_is_replaced_after_the_pass_was_changed(found, tmp_path):
    out = tmp_path / "out"
    write(found, out / "repro.py")
    (tmp_path / "mine" / "sent_more.py").write_text("OFF = 0.25\n")
    write(found, out / "repro.py")

    assert (out / "repro_code" / "sent_more.py").read_text() == "OFF = 0.25\n"


def test_a_script_is_not_replaced_by_a_pass_of_the_same_name(tmp_path):
    (tmp_path / "repro.py").write_text("def off(graph_module):\n    return graph_module\n")
    imports = ScriptImports(script=tmp_path / "out" / "repro.py")
    imports.of_object(f"{tmp_path / 'repro.py'}:off")

    assert list(imports.copies) == [tmp_path / "out" / "repro_code" / "repro.py"]


def test_of_a_package_the_modules_that_are_needed_are_copied(tmp_path, monkeypatch):
    files = {
        "sent_package/__init__.py": "from . import base\n",
        "sent_package/base.py": "",
        "sent_package/unused.py": "",
        "sent_package/passes/__init__.py": "",
        "sent_package/passes/fold.py": "from ..tools import scale\nfrom sent_beside import other\n",
        "sent_package/tools/__init__.py": "from .scale import scale\n",
        "sent_package/tools/scale.py": "scale = 1\n",
        "sent_beside.py": "other = 1\n",
    }
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    importlib.invalidate_caches()
    imports = ScriptImports(script=tmp_path / "out" / "repro.py")
    imported = imports.of_object("sent_package.passes.fold:fold")
    imports.copy_all()

    assert imported.lines[-1] == "from sent_package.passes.fold import fold"
    assert names_in(tmp_path / "out" / "repro_code") == sorted(set(files) - {"sent_package/unused.py"})


def test_an_installed_package_is_imported_by_its_name(tmp_path):
    imports = ScriptImports(script=tmp_path / "repro.py")

    assert imports.of_module("numpy.linalg") == ("import numpy.linalg",)
    assert imports.copies == {}


def test_an_issue_quotes_the_users_pass_after_the_script(found, tmp_path):
    path = write(found, tmp_path / "out" / "repro.py").path
    text = issue_text(found, path)

    assert text.index("def main()") < text.index("`repro_code/sent_pass.py`, beside it:") < text.index("def off(")
