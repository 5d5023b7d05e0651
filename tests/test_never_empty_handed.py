"""Minify never leaves empty-handed: a failure without a graph has a script, and a script fails in a clean process."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta.errors import NothingToMinify
from torchdelta.minify.result import MinifiedGraph, WholeProgram
from torchdelta.minify.subject import Subject
from torchdelta.records.report import Repro
from torchdelta.repro.code import write_program

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.xdist_group("workers")


def run(script):
    return subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
class TestFailuresWithoutAGraph:
    @pytest.mark.parametrize(
        ("program", "options"),
        [
            ("branch", {"fullgraph": True}),
            ("prints", {"fullgraph": True}),
            ("raising", {"fullgraph": True}),
            ("dying", {}),
            ("counting", {}),
            ("logging", {}),
            ("globally", {}),
            ("behind_break", {}),
            ("excepting", {}),
            ("gradient", {}),
            ("mutating", {}),
        ],
    )
    def test_each_leaves_a_script_that_shows_it(self, program, options, tmp_path, workers):
        spec = f"{PROGRAMS / 'no_graph.py'}:{program}"
        report = td.diagnose(spec, transform="eager", options=options, out=tmp_path, workers=workers)

        assert report.repro == Repro(path=str(tmp_path / "repro.py"), confirmed=True), report.notes
        assert (tmp_path / "repro_code" / "no_graph.py").read_text() == (PROGRAMS / "no_graph.py").read_text()
        header = " ".join((tmp_path / "repro.py").read_text().split('"""')[1].split())
        assert f"this is the user's own program, which {program} builds" in header

    def test_the_script_says_so_once_the_failure_is_gone(self, tmp_path, workers):
        spec = f"{PROGRAMS / 'no_graph.py'}:counting"
        td.diagnose(spec, transform="eager", out=tmp_path, workers=workers)
        copy = tmp_path / "repro_code" / "no_graph.py"
        copy.write_text(copy.read_text().replace("2 if torch.compiler.is_compiling() else 1", "1"))
        ended = run(tmp_path / "repro.py")

        assert ended.returncode == 0, ended.stderr
        assert "the bug is gone" in ended.stdout

    def test_minify_alone_finds_the_failure_of_the_whole_program(self, tmp_path, workers):
        small = td.minify(f"{PROGRAMS / 'no_graph.py'}:counting", transform="eager", workers=workers)

        assert isinstance(small, WholeProgram)
        assert small.write(tmp_path / "repro.py").confirmed

    def test_a_live_program_has_no_name_to_build_it_by(self):
        def scaled(x):
            return x * (2 if torch.compiler.is_compiling() else 1)

        with pytest.raises(NothingToMinify, match="none of the 1 graphs"):
            td.minify(scaled, (torch.ones(3),), transform="eager")


RETURNING = """
import torch


class Layer(torch.nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))


def build():
    return Layer(4, 4), (torch.ones(5, 4),)


def nothing(graph_module, example_inputs):
    return graph_module


def text(graph_module, example_inputs):
    return "done"


def number(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.sigmoid
    return 1


def graph(graph_module):
    number(graph_module, ())
    return graph_module.graph
"""


@pytest.mark.slow
class TestWhatAPassReturns:
    @pytest.mark.parametrize("level", ["dynamo", "symbolic"])
    @pytest.mark.parametrize("name", ["text", "number", "graph"])
    def test_its_script_shows_the_failure(self, name, level, tmp_path, workers):
        (tmp_path / "returning.py").write_text(RETURNING)
        file = tmp_path / "returning.py"
        small = td.minify(f"{file}:build", transform=f"{file}:{name}", options={"graph": level}, workers=workers)

        assert small.write(tmp_path / "out" / "repro.py").confirmed
        ended = run(tmp_path / "out" / "repro.py")
        assert ended.returncode == 1, ended.stderr
        assert ("returned str" in ended.stdout) == (name == "text")

    def test_the_unchanged_graph_has_nothing_to_minify_because_it_changed_nothing(self, tmp_path, workers):
        (tmp_path / "returning.py").write_text(RETURNING)
        file = tmp_path / "returning.py"

        with pytest.raises(NothingToMinify, match="nothing to make smaller: the transform changed nothing"):
            td.minify(f"{file}:build", transform=f"{file}:nothing", workers=workers)


@pytest.mark.slow
class TestPassesThatLookForNames:
    @pytest.mark.parametrize(
        ("name", "graph", "is_reduced"),
        [
            ("by_placeholder", "dynamo", True),
            ("by_placeholder_name", "dynamo", True),
            ("by_parameter_name", "dynamo", True),
            ("by_module_stack", "dynamo", False),
            ("by_size", "dynamo", True),
            ("by_rank", "dynamo", True),
            ("by_count", "dynamo", True),
            ("by_call_module", "symbolic", True),
            ("by_get_attr", "export", True),
            ("by_export_name", "export", True),
        ],
    )
    def test_each_is_reduced_or_keeps_a_script_that_fails(self, name, graph, is_reduced, tmp_path, workers):
        file = PROGRAMS / "name_passes.py"
        options = {"graph": graph, "unchanged": "ok"}
        report = td.diagnose(
            f"{file}:build", transform=f"{file}:{name}", options=options, out=tmp_path, workers=workers
        )

        assert report.repro is not None, report.notes
        assert report.repro.confirmed, report.notes
        assert (report.reduction is not None) == is_reduced

    def test_a_resumed_reduction_keeps_the_names_too(self, tmp_path, workers):
        file = PROGRAMS / "name_passes.py"

        def reduce(**how):
            return td.minify(
                f"{file}:build",
                transform=f"{file}:by_placeholder_name",
                options={"graph": "dynamo", "unchanged": "ok"},
                out=tmp_path / "minify",
                workers=workers,
                **how,
            )

        begun = reduce(queries=4)
        resumed = reduce(resume=True)

        assert begun.keeps_names
        assert resumed.keeps_names
        assert resumed.reduction.nodes_after <= begun.reduction.nodes_after
        assert resumed.write(tmp_path / "repro.py").confirmed


class TestNamesOfSubjects:
    def captured(self, call, *args):
        graphs = []

        def keep(graph_module, example_inputs):
            graphs.append((torch.fx.GraphModule(graph_module, graph_module.graph), example_inputs))
            return graph_module

        torch._dynamo.reset()
        torch.compile(call, backend=keep)(*args)
        return graphs[0]

    def names_of(self, graph):
        return {(node.target, node.name) for node in graph.graph.nodes if node.op == "placeholder"}

    def test_dynamo_names_the_inputs_of_a_named_subject_as_it_did_before(self):
        class Scaled(nn.Linear):
            def forward(self, image):
                return super().forward(image) * 2

        graph, inputs = self.captured(Scaled(3, 3), torch.ones(2, 3))
        named = Subject.named(graph, inputs)
        normal = Subject.of(graph, inputs)

        assert self.names_of(self.captured(named.graph, *named.inputs)[0]) == self.names_of(graph)
        assert self.names_of(self.captured(normal.graph, *normal.inputs)[0]) != self.names_of(graph)

    def test_a_named_subject_reads_its_tensors_where_the_graph_has_them(self):
        graph = torch.export.export(nn.Sequential(nn.Linear(3, 3)), (torch.ones(2, 3),)).module()
        targets = [node.target for node in Subject.named(graph, (torch.ones(2, 3),)).nodes if node.op == "get_attr"]

        assert targets == ["0.weight", "0.bias"]

    def test_a_script_can_keep_the_paths_of_modules(self):
        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Tanh(), nn.Sequential(nn.ReLU(), nn.Sigmoid()))

            def forward(self, x):
                return self.layers[1][1](x)

        source = write_program(torch.fx.symbolic_trace(Deep()), (torch.ones(2),), keeps_names=True)

        assert source.body[-1] == "return self.layers[1][1](x)"
        built = nn.Module()
        for name, expression in source.modules.items():
            exec(f"built.{name} = {expression}", {"built": built, "torch": torch})
        assert isinstance(built.get_submodule("layers.1.1"), nn.Sigmoid)


class TestFallbacks:
    """A script that does not fail in a clean process is not offered."""

    def result(self, shows, monkeypatch, fallbacks=()):
        """A result whose script shows the failure or not; `write` is replaced, so that nothing runs."""

        def write(result, path, **_):
            return Repro(path=str(path), confirmed=result.notes[0])

        monkeypatch.setattr(MinifiedGraph, "_write", write)
        graph = torch.fx.symbolic_trace(nn.ReLU())
        words = dict.fromkeys(("case", "report", "signature", "reduction"))
        first, *others = [
            MinifiedGraph(graph=graph, inputs=(), keeps_names=True, notes=(is_there,), **words)
            for is_there in (shows, *fallbacks)
        ]
        return replace(first, fallbacks=lambda: iter(others)), others

    def test_a_script_that_fails_is_the_one(self, monkeypatch, tmp_path):
        small, _ = self.result(True, monkeypatch, [True])

        assert small.with_script(tmp_path / "repro.py")[0] is small

    def test_one_that_does_not_is_replaced_by_the_next_larger_that_does(self, monkeypatch, tmp_path):
        small, others = self.result(False, monkeypatch, [False, True, True])
        chosen, repro = small.with_script(tmp_path / "repro.py")

        assert chosen is others[1]
        assert repro.confirmed

    def test_if_none_does_the_smallest_is_kept_and_said_not_to(self, monkeypatch, tmp_path):
        small, _ = self.result(False, monkeypatch, [False])
        chosen, repro = small.with_script(tmp_path / "repro.py")

        assert chosen is small
        assert not repro.confirmed
