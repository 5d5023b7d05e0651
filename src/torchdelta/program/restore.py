"""Put back what a run of the user's code changes: module state (`restored`) and random generators.

draws = GeneratorDraws.now()
with restored([model]):
    model(x)                # may update buffers, lists, dicts
draws.rewind()
"""

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
    """The state of every global random generator at one moment; two runs from it draw the same numbers."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> GeneratorDraws:
        """Return the present states of torch's generators on the CPU and every device, and of Python's and NumPy's."""
        return cls(
            cpu=torch.get_rng_state(),
            devices=tuple(_device_module().get_rng_state(index) for index in _devices()),
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def rewind(self) -> None:
        """Set torch's generators on the CPU and every device, and Python's and NumPy's, to these states."""
        torch.set_rng_state(self.cpu)
        for index, state in enumerate(self.devices):
            _device_module().set_rng_state(state, index)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def restored(holders: Iterable[torch.nn.Module | torch.Tensor]) -> Iterator[None]:
    """Run the block, then undo its changes to modules and tensors: buffers, attributes, contents of containers.

    Containers are lists, dicts, sets and deques. It is undone in place, in all submodules and in containers within
    containers, even if the block raises. A parameter of a module that was replaced is put back, but one that was
    written to is not, because copies of all parameters would take as much memory as the model. A tensor among `holders`
    gets its values back.
    """
    contents_before: dict[int, tuple[Any, Any]] = {}
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for holder in holders:
        if isinstance(holder, torch.Tensor):
            _copy(holder, copies)
            continue
        for module in holder.modules():
            _remember(vars(module), contents_before, copies)
    try:
        yield
    finally:
        for container, contents in contents_before.values():
            refill(container, contents)
        with torch.no_grad():
            # always, because batch norm updates its statistics without a new version number
            for memory, duplicate in copies.values():
                memory.copy_(duplicate)


def _remember(container: Any, contents: dict[int, tuple[Any, Any]], copies: dict[int, Any]) -> None:
    """Add the contents of a container, and of those within it, to `contents`, and copies of their tensors to `copies`.

    `contents` has, by id, the container and a shallow copy of it. Parameters are not copied. A container that is in
    `contents` already is skipped.
    """
    if id(container) in contents:
        return
    contents[id(container)] = (container, container.copy())
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, (dict, list, set, deque)):
            _remember(value, contents, copies)
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            _copy(value, copies)


def _copy(tensor: torch.Tensor, copies: dict[int, Any]) -> None:
    """Add the memory behind a tensor, with a copy of it, to `copies`, once for each piece of memory.

    The key is `storage_key`; the value is a pair of a flat tensor of the whole memory and its clone. A tensor without a
    plain buffer adds nothing.
    """
    key = tensors.storage_key(tensor)
    if key and key not in copies:
        # all of the memory, because elements of an expanded tensor cannot be written to
        memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        copies[key] = (memory, memory.clone())


def refill(container: Any, contents: Any) -> None:
    """Give a list, deque, dict or set these contents in place of its own."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def _devices() -> range:
    """Return the indices of all devices of the accelerator; an empty range if there is none."""
    return range(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _device_module() -> Any:
    """Return the module of torch for the present accelerator, such as `torch.cuda`."""
    return torch.get_device_module(torch.accelerator.current_accelerator())
