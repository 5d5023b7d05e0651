"""Programs at the edges of arithmetic: each is right as it is, and hard to say anything about."""

import math

import torch
from torch import nn


def _seeded(build):
    def factory():
        torch.manual_seed(0)
        return build()

    return factory


class _Chaotic(nn.Module):
    """A recurrence whose errors grow at every step, until nothing of the first digits is left."""

    def __init__(self, width=64, steps=40, gain=2.5):
        super().__init__()
        self.steps = steps
        self.recur = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 8)
        nn.init.normal_(self.recur.weight, std=gain / width**0.5)

    def forward(self, state):
        for _ in range(self.steps):
            state = torch.tanh(self.recur(state))
        return self.out(state), state


@_seeded
def chaotic():
    return _Chaotic(), (torch.randn(4, 64),)


@_seeded
def dead_relus():
    """Every ReLU is off: the output is a bias, and all gradients before it are zero."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, -100.0)
    return model, (torch.randn(8, 16),)


class _Multiplied(nn.Module):
    """Outputs through which no gradient comes: multiplied by zero, or the sum of a softmax, which is always one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, x):
        hidden = self.out(torch.tanh(self.inner(x)))
        return hidden * 0.0, torch.softmax(hidden, -1).sum(-1)


@_seeded
def zero_gradients():
    return _Multiplied(), (torch.randn(8, 16),)


def _mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


@_seeded
def tiny_inputs():
    return _mlp(), (1e-30 * torch.randn(8, 16),)


@_seeded
def huge_inputs():
    return _mlp(), (1e30 * torch.randn(8, 16),)


class _OneNan(nn.Module):
    """A model that marks one element of its output as missing."""

    def __init__(self):
        super().__init__()
        self.inner = _mlp()

    def forward(self, x, is_missing):
        return torch.where(is_missing, math.nan, self.inner(x))


@_seeded
def one_nan():
    is_missing = torch.zeros(8, 4, dtype=torch.bool)
    is_missing[2, 3] = True
    return _OneNan(), (torch.randn(8, 16), is_missing)
