"""Models whose inputs are exact values in floats: categories, masks of ones and zeros, constants far beyond the scores.

An audit of them counts how many planted faults a check catches, because noise on such values would hide the faults.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Tabular(nn.Module):
    """Columns of one table: a category, a day, and measured numbers, all of them floats."""

    def __init__(self):
        super().__init__()
        self.category, self.day = nn.Embedding(12, 8), nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(18)
        self.first, self.second = nn.Linear(18, 32), nn.Linear(32, 3)

    def forward(self, table):
        category, day, measured = table[:, 0].long(), (table[:, 1] % 7).long(), table[:, 2:]
        is_weekend = (table[:, 1] % 7 >= 5).to(measured.dtype)
        scaled = (measured - measured.mean(0)) / (measured.std(0) + 1e-5)
        features = torch.cat([self.category(category), self.day(day), scaled * (1 + is_weekend[:, None])], -1)
        return self.second(F.gelu(self.first(self.norm(features))))


class MaskedAttention(nn.Module):
    """One attention with a mask of ones and zeros in floats, or with a constant at masked places."""

    def __init__(self, constant=None):
        super().__init__()
        self.constant = constant
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x, mask):
        h = self.norm(x)
        scores = self.query(h) @ self.key(h).transpose(-1, -2) * 0.25
        if self.constant is None:
            weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * (mask == 1.0)[:, None]
            weights = weights / weights.sum(-1, keepdim=True)
        else:
            weights = torch.softmax(scores + (1.0 - mask[:, None]) * self.constant, -1)
        pooled = (x + F.gelu(self.out(weights @ self.value(h)))) * mask[..., None]
        return pooled.sum(1) / mask.sum(1, keepdim=True), scores


def tabular():
    torch.manual_seed(0)
    table = torch.randn(24, 8)
    table[:, 0], table[:, 1] = torch.randint(0, 12, (24,)).float(), torch.arange(24.0)
    return Tabular().eval(), (table,)


def _sequences(model, dtype):
    mask = torch.ones(3, 10)
    mask[0, 6:] = 0
    mask[2, 3:] = 0
    return model.eval().to(dtype), (torch.randn(3, 10, 16).to(dtype), mask.to(dtype))


def float_mask():
    torch.manual_seed(0)
    return _sequences(MaskedAttention(), torch.float32)


def mask_constant():
    torch.manual_seed(0)
    return _sequences(MaskedAttention(constant=-1e9), torch.bfloat16)
