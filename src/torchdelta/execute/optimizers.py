"""Optimizers by name: what the `steps` stage trains with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchdelta.registry import Registry

OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer")
OPTIMIZERS.add("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.01))
OPTIMIZERS.add("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
