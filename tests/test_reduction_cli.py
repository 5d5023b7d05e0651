"""`torchdelta minify` and `torchdelta diagnose` from outside: exit codes, what they print, what they leave behind."""

import json
import re
import subprocess
import sys

import pytest

PROGRAMS = """
import ctypes
import os
import signal

import torch


def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Sigmoid()
    return torch.nn.Sequential(*layers).requires_grad_(False), (torch.randn(3, 4),)


def healthy(graph_module, example_inputs):
    return graph_module


def relu_is_off(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if "relu" in str(node.target):
            with graph_module.graph.inserting_after(node):
                off = graph_module.graph.call_function(torch.add, (node, 0.1))
            node.replace_all_uses_with(off, lambda user: user is not off)
    graph_module.recompile()
    return graph_module


def in_two_graphs():
    def function(x):
        x = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.sigmoid(x)

    return function, (torch.randn(3),)


seen = set()


def dies_of_both(graph_module, example_inputs):
    seen.update(str(node.target) for node in graph_module.graph.nodes)
    if all(any(name in target for target in seen) for name in ("relu", "sigmoid")):
        ctypes.string_at(0)
    return graph_module


def counted(graph_module, example_inputs):
    with open("compiles.txt", "a") as file:
        print(os.getpid(), str(example_inputs[0].dtype).removeprefix("torch."), file=file)
    return relu_is_off(graph_module, example_inputs)


@torch._dynamo.register_backend(name="counted_backend")
def counted_backend(graph_module, example_inputs):
    return counted(graph_module, example_inputs).forward


def killed_once(graph_module, example_inputs):
    if not os.path.exists("was_killed"):
        open("was_killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return relu_is_off(graph_module, example_inputs)


def gives_up(graph_module, example_inputs):
    if any("relu" in str(node.target) for node in graph_module.graph.nodes):
        raise NotImplementedError("this pass knows no relu")
    return graph_module
"""


@pytest.fixture
def command_line(tmp_path):
    """Run a command line in a folder that has programs.py."""
    (tmp_path / "programs.py").write_text(PROGRAMS)

    def run(*arguments):
        command = [sys.executable, "-m", "torchdelta", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def assert_one_sentence(ran, said):
    assert ran.returncode == 2, ran
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert re.search(said, ran.stderr), ran.stderr


@pytest.mark.parametrize("command", ["minify", "diagnose"])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--timeout=0", "--timeout is a number above 0"),
        ("--queries=-1", "--queries is a number above 0"),
        ("--seconds=0", "--seconds is a number above 0"),
        ("--seconds=nan", "--seconds is a number above 0, not nan"),
        ("--timeout=nan", "--timeout is a number above 0, not nan"),
        ("--timeout=inf", "--timeout is a number above 0, not inf"),
        ("--memory=lots", "malformed amount of memory"),
        ("--match=(", "not a regular expression"),
        ("--level=triton", "no level 'triton'"),
    ],
)
def test_a_limit_that_is_none_is_refused_at_once(command_line, command, option, said):
    assert_one_sentence(command_line(command, "programs.py:build", "-t", "eager", "-o", "out", option), said)


@pytest.mark.parametrize("command", ["minify", "diagnose"])
def test_a_directory_that_cannot_be_is_refused_at_once(command_line, command):
    assert_one_sentence(
        command_line(command, "programs.py:build", "-t", "eager", "-o", "programs.py"), "cannot make the directory"
    )


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
class TestMinify:
    def test_ends_in_the_path_of_a_script_and_leaves_everything_in_the_directory(self, command_line, tmp_path):
        ran = command_line("minify", "programs.py:build", "-t", "programs.py:relu_is_off", "-o", "out", "--issue")

        assert ran.returncode == 1, ran.stderr
        assert ran.stdout.splitlines()[-2:] == ["out/repro.md", "out/repro.py"]
        assert "failed again in a clean process" in ran.stdout
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["reduction"]["nodes_after"] == 3
        assert report["reduction"]["is_minimal"]
        assert report["reduction"]["rate"] == 1.0
        assert report["repro"]["confirmed"]
        assert "relu" in (tmp_path / "out" / "repro.md").read_text()

    def test_prints_its_result_also_if_the_last_files_do_not_fit_on_the_disk(self, command_line, tmp_path):
        (tmp_path / "on_a_full_disk.py").write_text(
            "import torchdelta.cli\n"
            "from torchdelta.cli import minify\n"
            "def fail(*_):\n"
            "    raise OSError(28, 'No space left on device')\n"
            "minify.write_file = fail\n"
            "torchdelta.cli.main()\n"
        )
        words = ["minify", "programs.py:build", "-t", "programs.py:relu_is_off", "-o", "out", "--issue"]
        command = [sys.executable, "on_a_full_disk.py", *words]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

        assert ran.returncode == 2, ran
        assert ran.stdout.startswith("diverged")
        said = "torchdelta: cannot write into out: No space left on device; make room, and use --resume"
        assert ran.stderr.splitlines()[-1] == said
        assert json.loads((tmp_path / "out" / "report.json").read_text())["repro"]["confirmed"]

    def test_says_so_where_nothing_fails(self, command_line):
        assert_one_sentence(
            command_line("minify", "programs.py:build", "-t", "programs.py:healthy", "-o", "out"),
            "nothing to make smaller",
        )


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
class TestDiagnose:
    def test_of_what_is_equivalent_is_the_check(self, command_line, tmp_path):
        ran = command_line(
            "diagnose", "programs.py:build", "-t", "programs.py:healthy", "-O", "unchanged=ok", "-o", "out"
        )

        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith("equivalent")
        assert not (tmp_path / "out" / "repro.py").exists()

    def test_names_the_culprit_and_ends_in_the_path_of_a_script(self, command_line, tmp_path):
        ran = command_line("diagnose", "programs.py:build", "-t", "programs.py:relu_is_off", "-o", "out")

        assert ran.returncode == 1, ran.stderr
        assert ran.stdout.splitlines()[-1] == "out/repro.py"
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert "relu" in report["culprits"][0]["op"]
        assert report["repro"]["confirmed"]

    @pytest.mark.parametrize(
        ("transform", "by_locate"),
        [
            # lockstep; when locate checked once more by itself, it compiled 3 times
            ("programs.py:counted", ["float32"]),
            # the rung behind AOTAutograd, on which this backend is not built, and the taps; it was 6 times
            ("backend:counted_backend", ["float32", "float32"]),
        ],
    )
    def test_compiles_nothing_twice(self, command_line, tmp_path, transform, by_locate):
        command_line("diagnose", "programs.py:build", "-t", transform, "-o", "out")

        compiles = {}
        for line in (tmp_path / "compiles.txt").read_text().splitlines():
            process, dtype = line.split()
            compiles.setdefault(process, []).append(dtype)
        by_check, second, *by_minify = compiles.values()
        assert by_check == ["float32", "float64"]
        assert second == by_locate
        # each query has a worker, and the script a process: what was begun ahead may have been called off
        queries = json.loads((tmp_path / "out" / "report.json").read_text())["reduction"]["queries"]
        assert by_minify == [["float32"]] * len(by_minify)
        assert 1 < len(by_minify) <= queries + 1

    def test_survives_a_crash_that_only_the_whole_program_shows(self, command_line, tmp_path):
        ran = command_line("diagnose", "programs.py:in_two_graphs", "-t", "programs.py:dies_of_both", "-o", "out")

        assert ran.returncode == 4, ran
        assert ran.stdout.startswith("crashed")
        assert "none of the 2 graphs that it is made of fails by itself" in ran.stdout
        assert json.loads((tmp_path / "out" / "report.json").read_text())["failure"]["type"] == "SIGSEGV"

    def test_asks_again_if_the_process_of_the_check_was_killed(self, command_line, tmp_path):
        words = ("diagnose", "programs.py:build", "-t", "programs.py:killed_once", "-o", "out")
        first = command_line(*words)
        second = command_line(*words, "--resume")

        assert first.returncode == 4, first
        assert second.returncode == 1, second
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["verdict"] == "diverged"
        assert report["repro"]["confirmed"]

    def test_goes_on_where_it_was(self, command_line, tmp_path):
        words = ("diagnose", "programs.py:build", "-t", "programs.py:gives_up", "-o", "out")
        first = command_line(*words, "--queries", "1")
        second = command_line(*words, "--resume")
        reduction = json.loads((tmp_path / "out" / "report.json").read_text())["reduction"]
        other = command_line("diagnose", "programs.py:build", "-t", "programs.py:healthy", "-o", "out", "--resume")

        assert first.returncode == second.returncode == 4, (first.stderr, second.stderr)
        assert "it may not be the smallest" in first.stdout
        assert reduction["is_minimal"]
        assert reduction["nodes_after"] == 3
        assert_one_sentence(other, "is about diagnose of programs.py:build under programs.py:gives_up")
