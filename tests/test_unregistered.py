"""State outside of parameters and buffers: what a run changed in it is compared, wherever the program keeps it.

For each place there is a candidate that forgets to write to it, or writes something else, and a correct twin.
"""

import collections
import dataclasses
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict

DIVERGED, EQUIVALENT = Verdict.DIVERGED, Verdict.EQUIVALENT
X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)


def diverged(report):
    """Return the paths of the leaves that have diverged."""
    return [each.path for each in report.comparisons if each.verdict is DIVERGED]


@dataclasses.dataclass
class Record:
    count: int = 0
    last: torch.Tensor | None = None


class Keeper(nn.Module):
    """A module that keeps state in every place but a buffer; `write` is what its forward does to it."""

    calls = 0

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.write = write
        self.steps = 0
        self.mode = "fresh"
        self.cache = {"keys": torch.zeros(2, 3)}
        self.history = []
        self.recent = collections.deque(maxlen=2)
        self.record = Record()
        self.table = {"a": 1, "b": 2}
        self.generator = torch.Generator().manual_seed(0)
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.array = np.zeros(3)
        self.scratch = 1.0

    def forward(self, x):
        y = self.linear(x)
        self.write(self, y)
        return torch.tanh(y)


def write_nothing(module, y):
    pass


def count(module, y):
    module.steps += 1


def count_twice(module, y):
    module.steps += 2


def set_mode(module, y):
    module.mode = "used"


def set_other_mode(module, y):
    module.mode = "spent"


def fill_cache(module, y):
    module.cache["keys"].copy_(y.detach())


def fill_cache_negated(module, y):
    module.cache["keys"].copy_(-y.detach())


def append(module, y):
    module.history.append(y * 2)


def append_another(module, y):
    module.history.append(y * 3)


def append_to_deque(module, y):
    module.recent.append(y.detach())


def append_twice_to_deque(module, y):
    module.recent.extend((y.detach(), y.detach()))


def fill_record(module, y):
    module.record.count += 1
    module.record.last = y.detach()


def fill_half_of_the_record(module, y):
    module.record.count += 1


def reorder(module, y):
    module.table["a"] = module.table.pop("a")


def count_in_the_class(module, y):
    type(module).calls += 1


def count_twice_in_the_class(module, y):
    type(module).calls += 2


def draw(module, y):
    torch.rand(2, generator=module.generator)


def draw_more(module, y):
    torch.rand(20, generator=module.generator)


def draw_in_python(module, y):
    module.random.random()


def draw_in_numpy(module, y):
    module.numpy.random()


def write_to_an_array(module, y):
    module.array[0] += 1


def add_an_attribute(module, y):
    module.extra = 3


def remove_an_attribute(module, y):
    if hasattr(module, "scratch"):
        del module.scratch


def keep_a_number(module, y):
    module.scratch = float(y.detach().sum())


def keep_another_number(module, y):
    module.scratch = float(y.detach().sum()) + 1e-3


def leave_training(module, y):
    module.linear.eval()


FAULTS = [
    (count, write_nothing, "attributes['steps']"),
    (count, count_twice, "attributes['steps']"),
    (write_nothing, count, "attributes['steps']"),
    (set_mode, write_nothing, "attributes['mode']"),
    (set_mode, set_other_mode, "attributes['mode']"),
    (fill_cache, write_nothing, "attributes['cache']['keys']"),
    (fill_cache, fill_cache_negated, "attributes['cache']['keys']"),
    (append, write_nothing, "attributes['history'][0]"),
    (append, append_another, "attributes['history'][0]"),
    (append_to_deque, write_nothing, "attributes['recent'][0]"),
    (append_to_deque, append_twice_to_deque, "attributes['recent'][1]"),
    (fill_record, write_nothing, "attributes['record'].count"),
    (fill_record, fill_half_of_the_record, "attributes['record'].last"),
    (reorder, write_nothing, "attributes['table']"),
    (count_in_the_class, write_nothing, "attributes['Keeper.calls']"),
    (count_in_the_class, count_twice_in_the_class, "attributes['Keeper.calls']"),
    (draw, write_nothing, "attributes['generator']"),
    (draw, draw_more, "attributes['generator']"),
    (draw_in_python, write_nothing, "attributes['random']"),
    (draw_in_numpy, write_nothing, "attributes['numpy']"),
    (write_to_an_array, write_nothing, "attributes['array']"),
    (remove_an_attribute, write_nothing, "attributes['scratch']"),
    (keep_a_number, keep_another_number, "attributes['scratch']"),
    (leave_training, write_nothing, "attributes['linear.training']"),
]
WRITES = sorted({write for pair in FAULTS for write in pair[:2]} | {add_an_attribute}, key=lambda each: each.__name__)


@pytest.mark.parametrize(
    ("right", "wrong", "path"), FAULTS, ids=[f"{right.__name__}-{wrong.__name__}" for right, wrong, _ in FAULTS]
)
def test_state_that_the_candidate_leaves_otherwise_is_seen(right, wrong, path):
    report = td.check(Keeper(right), (X,), candidate=Keeper(wrong))

    assert report.verdict is DIVERGED
    assert path in diverged(report)
    assert Keeper.calls == 0


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_state_that_both_sides_leave_alike_is_no_difference(write):
    assert td.check(Keeper(write), (X,), candidate=Keeper(write)).verdict is EQUIVALENT
    assert Keeper.calls == 0


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_a_compiler_that_keeps_the_writes_is_equivalent(write):
    report = td.check(Keeper(write), (X,), transform="eager", stages="forward,gradients")

    assert report.verdict is EQUIVALENT, report.comparisons
    assert Keeper.calls == 0
