"""The candidate cannot touch the yardstick: reference, truth and noise are computed before it runs."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import torchdelta as td
from torchdelta.records.verdict import Verdict

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE


def program(x, w):
    return F.silu(x @ w) + x


def inputs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.randn(16, 32).to(dtype), (torch.randn(32, 32) / 6).to(dtype)


class Override:
    """A pass that overrides a kernel of torch for the whole process when it runs."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.library = None

    def __call__(self, graph_module, example_inputs):
        if self.library is None:
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl("silu", self.kernel, "CPU")
        return graph_module


@pytest.fixture
def override():
    made = []

    def make(kernel):
        made.append(Override(kernel))
        return made[-1]

    yield make
    for each in made:
        if each.library is not None:
            each.library._destroy()


def wrong(x):
    return (x.float() * torch.sigmoid(x.float()) * 0.95).to(x.dtype)


def right(x):
    wide = x.double()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


@pytest.mark.filterwarnings("ignore:.*Warning only once for all operators.*")
@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel.*")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_overridden_kernel_changes_the_side_of_the_candidate_alone(override, dtype):
    report = td.check(program, inputs(dtype), transform=override(wrong))

    assert report.verdict is DIVERGED
    assert any("the candidate changed how this process runs the program itself" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore:.*Warning only once for all operators.*")
@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel.*")
def test_a_kernel_that_is_overridden_by_a_correct_one_is_equivalent(override):
    options = {"unchanged": "ok"}
    assert td.check(program, inputs(torch.float32), transform=override(right), options=options).verdict is EQUIVALENT


def test_a_patched_function_changes_the_side_of_the_candidate_alone(monkeypatch):
    def calls_silu(x, w):
        return F.silu(x @ w) + x

    def patching(graph_module, example_inputs):
        monkeypatch.setattr(F, "silu", lambda x: torch.relu(x))
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == "silu":
                node.target = F.silu
        graph_module.recompile()
        return graph_module

    assert td.check(calls_silu, inputs(), transform=patching).verdict is DIVERGED


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, EQUIVALENT), (1.01, DIVERGED)])
def test_a_patched_function_with_which_the_program_fails_is_not_blamed_on_the_program(factor, verdict, monkeypatch):
    class CallsSilu(torch.nn.Module):
        def forward(self, x):
            return F.silu(x) * 2

    def fails(*_):
        raise RuntimeError("patched")

    def patching(graph_module, example_inputs):
        monkeypatch.setattr(F, "silu", fails)
        return lambda *args: [each * factor for each in graph_module(*args)]

    report = td.check(CallsSilu(), (torch.randn(8),), transform=patching, options={"graph": "aten", "unchanged": "ok"})

    assert report.verdict is verdict
    assert (verdict is EQUIVALENT) or any("after the candidate it fails" in note for note in report.notes)


PASS = """
import torch

_library = torch.library.Library("aten", "IMPL")
_library.impl("silu", lambda x: (x.float() * torch.sigmoid(x.float()) * 0.95).to(x.dtype), "CPU")


def transform(graph_module, example_inputs):
    return graph_module
"""
PROGRAM = """
import torch
import torch.nn.functional as F


def program(x, w):
    return F.silu(x @ w) + x


def build():
    torch.manual_seed(0)
    return program, (torch.randn(16, 32).bfloat16(), (torch.randn(32, 32) / 6).bfloat16())
"""


@pytest.mark.slow
def test_a_pass_whose_module_overrides_a_kernel_on_import_comes_after_the_yardstick(tmp_path):
    (tmp_path / "passes.py").write_text(PASS)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torchdelta", "check", "program.py:build", "-t", "passes.py:transform"]

    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ran.returncode == 1, ran.stdout + ran.stderr


def test_a_reference_that_is_not_deterministic_is_not_taken_for_a_touched_one():
    calls = []

    def unsteady(x):
        calls.append(1)
        return x * (1.0 + 0.01 * len(calls))

    report = td.check(lambda x: unsteady(x), (torch.randn(8),), candidate=lambda x: x * 2.0)

    assert not any("changed how this process" in note for note in report.notes)


ORDERS = {
    "as it is": lambda x: (x[0] + x[1] + x[2]).float(),
    "the other way": lambda x: (x[2] + x[1] + x[0]).float(),
    "without the last": lambda x: (x[0] + x[1]).float(),
    "rounded to float8": lambda x: (x[0] + x[1] + x[2]).to(torch.float8_e5m2).float(),
}


@pytest.mark.parametrize(
    ("order", "verdicts"),
    [
        ("the other way", {EQUIVALENT, INCONCLUSIVE}),
        ("without the last", {DIVERGED}),
        ("rounded to float8", {DIVERGED, INCONCLUSIVE}),
    ],
)
def test_a_single_number_that_only_the_candidate_rounds_is_not_blamed(order, verdicts):
    for seed in range(20):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed)).bfloat16()

        report = td.check(ORDERS["as it is"], (x,), candidate=ORDERS[order])

        assert report.verdict in verdicts, (seed, report.comparisons[0].reason)


def test_a_single_number_that_was_summed_in_a_coarser_dtype_is_seen():
    x = torch.tensor([1.0, 2.0**-9, 2.0**-9])  # exact in float32

    report = td.check(lambda x: x.sum(), (x,), candidate=lambda x: x.bfloat16().sum().float() + x.sum() * 0)

    assert report.verdict is DIVERGED


def draws(x):
    torch.rand(3)
    return x * 2


def switches_gradients_off(x):
    torch.set_grad_enabled(False)
    return x * 2


def changes_the_default_dtype(x):
    torch.set_default_dtype(torch.float64)
    return x * 2


@pytest.mark.parametrize("program", [switches_gradients_off, changes_the_default_dtype])
def test_flags_of_the_process_that_a_call_leaves_changed_are_compared(program):
    kept = td.check(program, (torch.ones(3),), candidate=lambda x: x * 2, stages="forward")
    changed = td.check(program, (torch.ones(3),), candidate=lambda x: program(x) * 1, stages="forward")

    assert kept.verdict is DIVERGED
    assert any(comparison.path.startswith("process") for comparison in kept.comparisons)
    assert changed.verdict is EQUIVALENT
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


def test_random_generators_that_are_left_in_another_state_are_noted():
    note = "leaves the random generators of the process in another state"

    dropped = td.check(draws, (torch.ones(3),), candidate=lambda x: x * 2)
    drawn = td.check(draws, (torch.ones(3),), candidate=lambda x: draws(x) * 1)

    assert any(note in each for each in dropped.notes)
    assert not any(note in each for each in drawn.notes)


def two_sum(a, b):
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        (lambda a, b: (two_sum(a, b)[0], -two_sum(a, b)[1]), INCONCLUSIVE),
        (lambda a, b: (a + b, torch.zeros_like(a)), INCONCLUSIVE),
        (two_sum, EQUIVALENT),
    ],
)
def test_an_output_that_is_rounding_alone_does_not_let_everything_pass(candidate, verdict):
    generator = torch.Generator().manual_seed(0)
    args = (torch.randn(64, generator=generator), torch.randn(64, generator=generator) * 1e-3)

    assert td.check(lambda a, b: two_sum(a, b), args, candidate=candidate).verdict is verdict
