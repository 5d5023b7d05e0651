"""Run something of the user's without leaving a trace in it: state and random generators are put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchdelta._torch import tensors


@dataclass(frozen=True, kw_only=True)
class GeneratorDraws:
    """The state of every global generator at one moment: what runs from it draws the same numbers."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> GeneratorDraws:
        """Take the state as it is."""
        return cls(
            cpu=torch.get_rng_state(),
            devices=tuple(_device_module().get_rng_state(index) for index in _devices()),
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def rewind(self) -> None:
        """Put the generators back to this moment."""
        torch.set_rng_state(self.cpu)
        for index, state in enumerate(self.devices):
            _device_module().set_rng_state(state, index)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def restored(holders: Iterable[torch.nn.Module | torch.Tensor]) -> Iterator[None]:
    """Put back what runs inside change in modules and tensors: buffers, attributes, and what is in lists and dicts.

    Parameters are put back where they were replaced, not where they were written to: a copy of every parameter would
    take as much memory as the model.
    """
    met: dict[int, tuple[Any, Any]] = {}
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for holder in holders:
        if isinstance(holder, torch.Tensor):
            _copy(holder, copies)
            continue
        for module in holder.modules():
            _note(vars(module), met, copies)
    try:
        yield
    finally:
        for container, contents in met.values():
            _refill(container, contents)
        with torch.no_grad():
            # whether it was written to or not: batch norm counts no version when it updates its statistics
            for whole, copied in copies.values():
                whole.copy_(copied)


def _note(container: Any, met: dict[int, tuple[Any, Any]], copies: dict[int, Any]) -> None:
    if id(container) in met:
        return
    met[id(container)] = (container, container.copy())
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, (dict, list, set, deque)):
            _note(value, met, copies)
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            _copy(value, copies)


def _copy(tensor: torch.Tensor, copies: dict[int, Any]) -> None:
    key = tensors.storage_key(tensor)
    if key and key not in copies:
        # all of the memory, because elements of an expanded tensor cannot be written to
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        copies[key] = (whole, whole.clone())


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def _devices() -> range:
    return range(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
