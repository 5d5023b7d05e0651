"""Keep what nodes make: as it is, and copied only when something is about to write to its memory.

An `add` whose result `relu_` overwrites is logged as the sum. What goes beyond the limit is kept as statistics, and
the notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.compare.leaves import Container, Leaves, Unreadable, describe, leaves_of
from torchdelta.execute.sides import state_of
from torchdelta.locate.capture_files import Described, Writer
from torchdelta.locate.statistics import statistics_of

_PLAIN = (bool, int, float, complex, str, type(None), Container, Unreadable)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, type, slice, range)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one call of the graph left: the leaves of each node that ran, and of the outputs."""

    values: dict[str, Leaves] = field(default_factory=dict)
    results: Leaves = field(default_factory=dict)
    failure: str = ""
    """Which node raised what; the nodes before it are there."""


@dataclass(kw_only=True)
class _Held:
    """A value that was logged without a copy: where it is logged, and what it was then."""

    leaves: Leaves
    path: str
    tensor: torch.Tensor
    version: int


@dataclass(kw_only=True)
class Recorder:
    """Logs one batch after the other."""

    keep: str
    limit_bytes: int
    writer: Writer | None
    notes: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    is_full: bool = False
    batch: Batch = field(default_factory=Batch)
    held: dict[int, list[_Held]] = field(default_factory=dict)
    """By the memory that they are in."""
    own: frozenset[int] = frozenset()
    """The memory of the graph's state, which outlives the batch and may be written to later."""
    constants: dict[Any, Any] = field(default_factory=dict)
    """What is logged of state that no batch changed, by the elements that it is of."""
    fresh: list[tuple[Any, Leaves, str]] = field(default_factory=list)
    """Where state was logged for the first time."""

    def begin(self, graph_module: torch.nn.Module) -> None:
        """Begin a batch."""
        self.batch = Batch()
        state = state_of(graph_module)
        held: Mapping[str, Any] = {**state.parameters, **state.buffers, **state.attributes}
        self.own = frozenset(key for tensor in held.values() if (key := tensors.storage_key(tensor)))

    def fail(self, failure: str) -> None:
        """End a batch early."""
        self.batch = replace(self.batch, failure=failure)

    def log(self, name: str, value: Any) -> None:
        """Log what a node made."""
        leaves = self.batch.values.setdefault(name, {})
        # a graph that is called from two places runs each of its nodes twice
        calls = 1 + sum(path == "value" or path.endswith("].value") for path in leaves)
        self._log(leaves, leaves_of(value, "value" if calls == 1 else f"calls[{calls - 1}].value"))

    def log_outputs(self, value: Any) -> None:
        """Log what the graph returned."""
        self._log(self.batch.results, leaves_of(value, "outputs"))

    def _log(self, into: Leaves, found: Leaves) -> None:
        for path, leaf in found.items():
            into[path] = self._logged(into, path, leaf)
        if self.writer and self.writer.is_due:
            self._flush()

    def _logged(self, into: Leaves, path: str, leaf: Any) -> Any:
        if isinstance(leaf, _PLAIN):
            return leaf
        if isinstance(leaf, _NAMED):
            return Described(kind=type(leaf).__name__, text=describe(leaf))
        if not isinstance(leaf, torch.Tensor):
            return Unreadable(type(leaf).__qualname__, "a capture does not hold objects of this kind")
        if not tensors.has_values(leaf):
            return Unreadable("tensor", "it has no values")
        tensor = tensors.without_class(leaf).detach()
        memory = tensors.storage_key(tensor)
        if memory in self.own:
            key = tensors.view_key(tensor), tensor.dtype, tensors.version(tensor)
            if key in self.constants:
                return self.constants[key]
            self.fresh.append((key, into, path))
        size = tensor.numel() * tensor.itemsize
        if self.keep == "statistics" or not self._fits(size):
            return statistics_of(tensor)
        self.kept_bytes += size
        if self.writer:
            self.writer.add(into, path, tensor)
        if memory:
            held = _Held(leaves=into, path=path, tensor=tensor, version=tensors.version(tensor))
            self.held.setdefault(memory, []).append(held)
        return tensor

    def _fits(self, size: int) -> bool:
        # once one did not fit none does: a capture whose small values are there at random could not be understood
        if not self.is_full and self.kept_bytes + size > self.limit_bytes:
            self.is_full = True
            self.notes.append(
                f"the limit of {self.limit_bytes} bytes was reached after {self.kept_bytes}: from then on only "
                "statistics were kept"
            )
        return not self.is_full

    def before_write(self, written: Sequence[torch.Tensor]) -> None:
        """Copy what is held in memory that is about to be written to."""
        for tensor in written:
            for held in self.held.pop(tensors.storage_key(tensor) or 0, []):
                self._replace(held, held.tensor.clone())

    def end(self) -> Batch:
        """Return the batch; memory of the graph's state is not held any more."""
        if self.writer:
            self._flush()
        for entries in self.held.values():
            for held in entries:
                if not self._is_overwritten(held) and tensors.storage_key(held.tensor) in self.own:
                    self._replace(held, held.tensor.clone())
        self.held.clear()
        for key, leaves, path in self.fresh:
            if not isinstance(leaves[path], Unreadable):
                self.constants[key] = leaves[path]
        self.fresh.clear()
        return self.batch

    def _replace(self, held: _Held, copied: torch.Tensor) -> None:
        if held.leaves.get(held.path) is held.tensor:
            held.leaves[held.path] = copied

    def _is_overwritten(self, held: _Held) -> bool:
        if tensors.version(held.tensor) == held.version or held.leaves.get(held.path) is not held.tensor:
            return False
        held.leaves[held.path] = Unreadable("tensor", "it was overwritten by an operation that does not say so")
        self.notes.append("a node writes to memory without saying so: values that it overwrote are missing")
        return True

    def _flush(self) -> None:
        assert self.writer is not None
        for entries in self.held.values():
            for held in entries:
                self._is_overwritten(held)
        self.writer.flush()
        self.held.clear()
