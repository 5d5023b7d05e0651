"""Nothing assumes the CPU."""

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a device other than the CPU"),
]


def test_a_program_on_an_accelerator_is_checked_there():
    device = torch.accelerator.current_accelerator()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    report = td.check(model, (torch.randn(5, 8, device=device),), transform="aot_eager")

    assert report.verdict is Verdict.EQUIVALENT


def test_an_output_on_another_device_has_diverged():
    device = torch.accelerator.current_accelerator()
    report = td.check(lambda x: x + 1, (torch.ones(3, device=device),), candidate=lambda x: (x + 1).cpu())

    assert report.verdict is Verdict.DIVERGED
