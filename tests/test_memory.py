"""Sides run one after the other: the peak is that of the largest side plus the values compared."""

import subprocess
import sys

import pytest

CHILD = """
import torch
import torchdelta as td
from torchdelta.program.memory import peak_bytes

class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8192, 8192))  # 256 MiB
    def forward(self, x):
        return x @ self.weight

td.check(torch.nn.Linear(2, 2), (torch.ones(1, 2),), candidate=torch.nn.Linear(2, 2))
model, x = Big(), torch.rand(1, 8192)
with torch.no_grad():
    model(x)
before = peak_bytes()
report = td.check(model, (x,), candidate=model, stages=["forward"])
assert report.verdict is td.Verdict.EQUIVALENT
print(peak_bytes() - before)
"""

MEBI = 2**20


@pytest.mark.slow
def test_the_peak_of_a_check_is_its_largest_side():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    grown = int(child.stdout)

    # the truth is the largest side: 512 MiB in float64. All three sides alive would be 1024 MiB
    assert 256 * MEBI < grown < 640 * MEBI
