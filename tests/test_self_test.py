"""A candidate that changes operators of torch does not make the comparison blind."""

import pytest
import torch

from torchdelta.check.isolated import check_isolated
from torchdelta.compare import self_test
from torchdelta.records.case import CheckOptions
from torchdelta.records.verdict import Verdict

OPERATORS = {
    "sub": ("sub.Tensor", "lambda a, b, alpha=1: torch.zeros(torch.broadcast_shapes(a.shape, b.shape))"),
    "ne": ("ne.Tensor", "lambda a, b: torch.zeros(torch.broadcast_shapes(a.shape, b.shape), dtype=torch.bool)"),
    "abs": ("abs", "lambda a: torch.zeros_like(a)"),
}
PROGRAM = """
import operator

import torch


def build():
    torch.manual_seed(0)
    return (lambda x, w: x + (x - x @ w) + (x != w) + x.abs()), (torch.randn(32, 32), torch.randn(32, 32) / 6)


def swapped(graph_module):
    for node in graph_module.graph.nodes:
        if node.target is operator.add:
            node.args = (node.args[1], node.args[0])
    graph_module.recompile()
    return graph_module


LIBRARIES = []


def overriding(graph_module, example_inputs):
    if not LIBRARIES:
        LIBRARIES.append(torch.library.Library("aten", "IMPL"))
        LIBRARIES[0].impl("{name}", {kernel}, "CPU")
    return swapped(graph_module)


def patching(graph_module, example_inputs):
    if not LIBRARIES:
        LIBRARIES.append(torch.Tensor.__add__)
        torch.Tensor.__add__ = lambda a, b: LIBRARIES[0](a, b) * 1.05
    return swapped(graph_module)


def right(graph_module, example_inputs):
    return swapped(graph_module)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transform", [*OPERATORS, "patching", "right"])
def test_a_wrong_operator_that_the_judge_uses_too_is_a_divergence(transform, workers, tmp_path):
    name, kernel = OPERATORS.get(transform, OPERATORS["sub"])
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.replace("{name}", name).replace("{kernel}", kernel))
    function = "overriding" if transform in OPERATORS else transform
    options = CheckOptions.read(transform=f"{file}:{function}")

    report = check_isolated(f"{file}:build", options, pool=workers).report

    assert report.verdict is (Verdict.EQUIVALENT if transform == "right" else Verdict.DIVERGED)
    if transform != "right":
        assert "changed operators of torch" in report.stages[0].reason


def test_the_judge_holds_again_once_the_operator_is_right_again():
    assert self_test.holds()
    library = torch.library.Library("aten", "IMPL")
    library.impl("abs", torch.zeros_like, "CPU")
    try:
        assert not self_test.holds()
    finally:
        library._destroy()

    assert self_test.holds()
