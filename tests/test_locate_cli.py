"""`torchdelta locate` from outside: planted faults are named, what is healthy is not, and mistakes are explained."""

import inspect
import json
import pathlib
import re
import sys

import pytest
import torch
import typer

import torchdelta.cli
from torchdelta.cli import options
from torchdelta.errors import UsageError
from torchdelta.nodewise.node_records import node_records
from torchdelta.records.codec import read_report
from torchdelta.records.location import Location
from torchdelta.records.verdict import Verdict

PROGRAMS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.act = torch.nn.SiLU()
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x):
        h = self.act(self.first(x))
        return self.last(torch.relu(h))


def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 8),)


def wrong_silu(x):
    return x * torch.sigmoid(x) + 0.1


def right_silu(x):
    return x * torch.sigmoid(x)


WRONG = {torch.ops.aten.silu.default: wrong_silu}
RIGHT = {torch.ops.aten.silu.default: right_silu}


def give_up(graph_module, example_inputs):
    raise NotImplementedError("this pass knows no Linear")


def leave(graph_module, example_inputs):
    return graph_module


def relu_as_leaky(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if "relu" in str(node.target):
            node.target = torch.nn.functional.leaky_relu
    graph_module.recompile()
    return graph_module


class SiLU(torch.nn.Module):
    def forward(self, x):
        return wrong_silu(x)


class OtherNet(Net):
    def __init__(self):
        super().__init__()
        self.act = SiLU()


def other():
    return OtherNet()
"""
WRONG = ("programs.py:build", "-t", "decompose", "-O", "table=programs.py:WRONG")
RIGHT = ("programs.py:build", "-t", "decompose", "-O", "table=programs.py:RIGHT")


class Ran:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.text = " ".join(out.split())


@pytest.fixture
def locate(tmp_path, monkeypatch, capsys):
    """Run `torchdelta locate` in this process, in a folder that has programs.py."""
    (tmp_path / "programs.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)

    def run(*words, command="locate"):
        monkeypatch.setattr(sys, "argv", ["torchdelta", command, *words])
        with pytest.raises(SystemExit) as exited:
            torchdelta.cli.main()
        return Ran(exited.value.code, *capsys.readouterr())

    return run


def test_a_wrong_decomposition_is_named_with_its_rung_its_module_and_its_line(locate, tmp_path):
    ran = locate(*WRONG, "--json", "location.json")

    assert ran.code == 1, ran.err
    assert ran.out.startswith("diverged  programs.py:build under decompose\n")
    assert "eager → export = → decompose ≠ diverged here first" in ran.out
    assert "culprit aten.silu.default silu of act, in forward, on the rung decompose programs.py:13" in ran.text
    assert "h = self.act(self.first(x))" in ran.text
    drawn = [line.split()[:2] for line in ran.out.splitlines() if re.search("[┌├└]╴|^≠  silu ", line)]
    assert drawn[:3] == [["┌╴linear", "aten.linear.default"], ["≠", "silu"], ["└╴relu", "aten.relu.default"]]
    found = read_report(tmp_path / "location.json", Location)
    assert found.verdict is Verdict.DIVERGED
    assert [culprit.node for culprit in found.culprits] == ["silu"]
    again = locate("location.json", command="show")
    assert (again.code, again.out) == (1, ran.out)


def test_a_right_decomposition_has_no_culprit(locate):
    ran = locate(*RIGHT)

    assert ran.code == 0, ran.err
    assert "culprit none was found" in ran.text
    assert "none is wrong by itself" in ran.text
    assert "there is nothing to locate" in ran.text
    assert "≠" not in ran.out


def test_a_pass_that_takes_one_operation_for_another_is_found_in_its_graph(locate):
    ran = locate("programs.py:build", "-t", "programs.py:relu_as_leaky")

    assert ran.code == 1, ran.err
    assert re.search(r"culprit  relu  \w+, in forward", ran.out)


def test_a_module_that_computes_something_else_is_named(locate):
    ran = locate("programs.py:build", "-t", "module:programs.py:other")

    assert ran.code == 1, ran.err
    assert "culprit  SiLU  act, in forward" in ran.out
    assert "the worst modules first" in ran.out


def test_a_crash_has_no_culprit_and_ends_with_4(locate):
    ran = locate("programs.py:build", "-t", "programs.py:give_up")

    assert ran.code == 4
    assert ran.out.startswith("crashed")
    assert "culprit none was found no nodes were compared" in ran.text


def test_all_shows_the_nodes_that_are_identical_too(locate):
    few, every = locate(*WRONG), locate(*WRONG, "--all")

    assert "identical (--all)" in few.out
    assert "(--all)" not in every.out
    assert re.search("^=  linear ", every.out, re.MULTILINE)
    assert not re.search("^=  linear ", few.out, re.MULTILINE)


@pytest.mark.slow
def test_a_compiler_that_is_right_has_no_culprit(locate):
    ran = locate("programs.py:build", "-t", "inductor", "--memory", "1GB")

    assert ran.code == 0, ran.err
    assert "there is nothing to locate" in ran.text
    assert "2 compiles" in ran.out


@pytest.mark.slow
def test_an_operation_that_a_compiler_gets_wrong_is_named(locate):
    ran = locate("programs.py:build", "-t", "inductor", "-O", "config.cpp.inject_relu_bug_TESTING_ONLY=accuracy")

    assert ran.code == 1, ran.err
    assert "decomposed = → backend ≠ diverged here first" in ran.out
    assert "culprit  aten.relu.default  relu, in forward, on the rung backend" in ran.out
    assert "SQNR, cosine and max abs as each does by itself" in ran.out


class TestMapping:
    def test_tells_who_stands_for_whom(self, locate, tmp_path):
        (tmp_path / "mapping.json").write_text('{"relu": "relu"}')

        ran = locate(*RIGHT, "--mapping", "mapping.json")

        assert ran.code == 0, ran.err
        assert re.search(r"matched  \d+ of \d+ nodes \(2 by given, \d+ by handle\)", ran.out)

    @pytest.mark.parametrize("mapping", [{"sliu": "relu"}, {"silu": "rleu"}])
    def test_that_names_an_unknown_node_is_a_mistake(self, locate, tmp_path, mapping):
        (tmp_path / "mapping.json").write_text(json.dumps(mapping))

        ran = locate(*WRONG, "--mapping", "mapping.json")

        assert (ran.code, ran.out) == (2, "")
        assert re.search("^torchdelta: .*mapping.* names .*node", ran.err, re.MULTILINE)
        assert "Traceback" not in ran.err

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "cannot read the mapping mapping.json: No such file or directory"),
            (b"\xff\xfe", "cannot read the mapping mapping.json: it is not text"),
            (b"{silu: relu}", r"the mapping mapping.json is not JSON \(line 1: "),
            (b"[" * 100_000, "the mapping mapping.json is not JSON that can be read"),
            (b'["silu"]', "the mapping mapping.json is not an object of names: write .*node of the candidate"),
            (b'{"silu": 3}', "the mapping mapping.json is not an object of names"),
            (b'{"silu": ["a", "b"]}', "the mapping mapping.json is not an object of names"),
            (b'{"silu": "a", "silu": "b"}', "the mapping mapping.json names 'silu' 2 times: a node has one partner"),
        ],
    )
    def test_that_is_none_is_found_before_anything_runs(self, locate, tmp_path, content, said):
        if content is not None:
            (tmp_path / "mapping.json").write_bytes(content)

        ran = locate("no_such.py:build", "-t", "eager", "--mapping", "mapping.json")

        assert (ran.code, ran.out) == (2, "")
        assert re.fullmatch(f"torchdelta: {said}.*\n", ran.err), ran.err

    @pytest.mark.parametrize("option", [("--memory", "1GB"), ("--cause",), ("--all",)])
    def test_what_sensitivity_has_no_use_for_is_refused(self, locate, option):
        ran = locate("programs.py:build", "-t", "quantize:x86", "--sensitivity", *option)

        assert (ran.code, ran.out) == (2, "")
        assert f"has no use for {option[0]}" in ran.err

    @pytest.mark.slow
    def test_that_a_compiler_has_no_use_for_is_told(self, locate, tmp_path):
        (tmp_path / "mapping.json").write_text('{"relu": "relu"}')

        ran = locate("programs.py:build", "-t", "inductor", "--mapping", "mapping.json")

        assert ran.code == 0, ran.err
        assert "note the mapping was not used: there are no two graphs to match here" in ran.text


class TestMemory:
    @pytest.mark.parametrize(
        ("text", "amount"),
        [
            ("2GB", 2 * 10**9),
            ("2gb", 2 * 10**9),
            ("1.5 GiB", 3 * 2**29),
            ("512MiB", 2**29),
            (".5kb", 500),
            ("1TB", 10**12),
            ("4096", 4096),
            ("7b", 7),
        ],
    )
    def test_is_read_with_its_unit(self, text, amount):
        assert options.read_bytes(text) == amount

    @pytest.mark.parametrize("text", ["", "much", "2XB", "-1GB", "0", "0.1", "1e9", "GB", "1GB2", "9" * 400])
    def test_that_is_no_amount_is_refused(self, text):
        with pytest.raises(UsageError, match=r"^malformed amount of memory .*: write it as 2GB"):
            options.read_bytes(text)

    def test_that_is_malformed_is_found_before_anything_runs(self, locate):
        ran = locate("no_such.py:build", "-t", "eager", "--memory", "much")

        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("torchdelta: malformed amount of memory 'much'")

    def test_that_no_number_can_hold_is_refused_before_anything_runs(self, locate):
        ran = locate("no_such.py:build", "-t", "eager", "--memory", "9" * 400)

        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("torchdelta: malformed amount of memory '999")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["programs.py:biuld", "-t", "eager"], "programs.py has no 'biuld'"),
        (["programs.py:build", "-t", "inductr"], "unknown transform 'inductr': did you mean inductor"),
        (["programs.py:build", "-t", "eager", "--policy", "exact"], "unknown policy 'exact'"),
        (["programs.py:build", "-t", "eager", "-O", "dynamic"], "malformed option 'dynamic'"),
        (["programs.py:build", "-t", "eager", "--json", "none/l.json"], "no directory none; make it first"),
    ],
)
def test_a_mistake_is_one_sentence_and_2_as_for_a_check(locate, words, said):
    ran, checked = locate(*words), locate(*words, command="check")

    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert (checked.code, checked.err) == (ran.code, ran.err)


def test_check_and_locate_take_the_same_case():
    commands = typer.main.get_command(torchdelta.cli.app).commands
    shared = set(inspect.signature(options.read_check_options).parameters)

    assert len(shared) > 10
    for name in ("check", "locate"):
        assert shared <= {parameter.name for parameter in commands[name].params}


@pytest.mark.slow
def test_the_readme_shows_what_locate_prints(locate, monkeypatch):
    root = pathlib.Path(__file__).parent.parent
    block = re.search(r"^\$ torchdelta locate (.*)\n((?:.*\n)+?)```$", (root / "README.md").read_text(), re.MULTILINE)
    monkeypatch.chdir(root)

    ran = locate(*block[1].split())

    assert without_numbers(ran.out) == without_numbers(block[2])


def without_numbers(text):
    """Numbers differ between machines, and the widths of columns with them."""
    lines = [re.sub(r"[0-9][0-9.e+cpu-]*", "#", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines]


def test_the_records_of_a_graph_name_what_each_node_reads():
    class Branches(torch.nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (torch.relu(x),))

    graph = torch.export.export(Branches(), (torch.ones(3),)).module()
    inputs = {record.name: record.inputs for record in node_records(graph)}

    assert inputs["relu"] == ("x",)
    assert inputs["true_graph_0.mul"] == ("true_graph_0.sin",)
    assert "relu" in inputs["cond"]
