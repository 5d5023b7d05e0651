"""Gradients within noise of zero: an optimizer that steps by their sign may step either way."""

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.check.decisions import is_near_zero


class Attention(nn.Module):
    """The gradient of a key's bias is zero in exact arithmetic, and all rounding otherwise."""

    def __init__(self, *, reorders=False, scales=False):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.reorders = reorders
        self.scales = scales

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.scales:
            value = value * 1.01
        if self.reorders:
            query, key = query.flip(-1), key.flip(-1)
            value = value.flip(1)
            return (torch.softmax(query @ key.transpose(-1, -2) / 32**0.5, -1).flip(-1)) @ value
        return torch.softmax(query @ key.transpose(-1, -2) / 32**0.5, -1) @ value


X = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(3))


def test_the_sign_of_a_gradient_that_is_all_rounding_is_not_held_against_a_step():
    report = td.check(Attention(), (X,), candidate=Attention(reorders=True), stages="forward,gradients,steps")

    stepped = {seen.path: seen for seen in report.stage("steps").comparisons}
    moved = stepped["steps[0].parameters['key.bias']"]
    assert report.verdict is Verdict.EQUIVALENT
    assert moved.verdict is Verdict.EQUIVALENT


def test_a_wrong_step_is_still_seen_beside_it():
    report = td.check(Attention(), (X,), candidate=Attention(scales=True), stages="steps")

    assert report.stage("steps").verdict is Verdict.DIVERGED


def test_an_element_is_near_zero_by_the_noise_of_its_block():
    truth = torch.zeros(2, 64, dtype=torch.float64)
    truth[0] = 1.0
    truth[1] = 1e-9
    run = truth + 1e-8

    near = is_near_zero(truth, [run])

    assert not near[0].any()
    assert near[1].all()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_model_of_dead_relus_is_equivalent_after_steps(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)

    report = td.check(model, (torch.randn(4, 8),), transform="aot_eager", stages="gradients,steps", optimizer=optimizer)

    assert report.verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_gradient_that_is_zero_in_every_run_settles_nothing(optimizer):
    class Table(nn.Module):
        def __init__(self, *, is_wrong=False):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(64, 16)
            self.is_wrong = is_wrong
            self.calls = 0

        def forward(self, rows):
            self.calls += 1
            if self.is_wrong and self.calls > 1:
                with torch.no_grad():
                    self.table.weight[32:] *= 3
            return self.table(rows)

    rows = torch.arange(16)
    stages = "forward,gradients,steps"
    report = td.check(Table(), (rows,), candidate=Table(is_wrong=True), stages=stages, optimizer=optimizer)

    assert report.stage("steps").verdict is Verdict.DIVERGED


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_parameter_that_is_overwritten_between_steps_is_seen_although_its_gradient_is_all_rounding(optimizer):
    class Overwriting(Attention):
        def __init__(self, write):
            super().__init__()
            self.write = write
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                with torch.no_grad():
                    self.key.bias += self.write
            return super().forward(x)

    stages = "forward,gradients,steps"
    report = td.check(Overwriting(0.0), (X,), candidate=Overwriting(1.0), stages=stages, optimizer=optimizer)
    right = td.check(Overwriting(0.0), (X,), candidate=Overwriting(0.0), stages=stages, optimizer=optimizer)

    diverged = [seen.path for seen in report.comparisons if seen.verdict is Verdict.DIVERGED]
    assert any("key.bias" in path for path in diverged)
    assert right.verdict is Verdict.EQUIVALENT


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_empty_parameter_takes_its_steps():
    model = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4))

    assert td.check(model, (torch.randn(2, 8),), transform="aot_eager", stages="steps").verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_imaginary_part_that_is_wrong_is_seen_although_the_gradient_of_the_real_part_is_all_rounding(optimizer):
    class Complex(nn.Module):
        def __init__(self, write):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))
            self.write = write
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                with torch.no_grad():
                    self.weight += self.write
            rounded = (self.weight.real * x).softmax(-1).sum(-1, keepdim=True)
            return self.weight.imag * x + rounded

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    wrong = td.check(Complex(0j), (x,), candidate=Complex(0.5j), stages="steps", optimizer=optimizer)
    right = td.check(Complex(0j), (x,), candidate=Complex(0j), stages="steps", optimizer=optimizer)

    assert wrong.verdict is Verdict.DIVERGED
    (first,) = (seen for seen in wrong.comparisons if seen.path == "steps[0].parameters['weight']")
    assert "but for 32 elements" in first.reason
    assert right.verdict is Verdict.EQUIVALENT
