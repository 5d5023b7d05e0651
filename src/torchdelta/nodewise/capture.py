"""Keep what nodes make: as it is, and copied only when something is about to write to its memory.

An `add` whose result `relu_` overwrites is logged as the sum. What goes beyond the limit is kept as statistics, and
the notes say so.

Log what every node of one graph computes, batch by batch, so that another side can be held against it later.

The sides of a comparison need never be alive together: a capture is in memory, or in a directory that any process
reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.graphs.interpreter import ObservingInterpreter, as_graph_module
from torchdelta._torch.process import runtime, versions
from torchdelta.compare.leaves import Container, Leaves, Unreadable, brief, describe, leaves_of
from torchdelta.compare.statistics import Statistics, statistics_of
from torchdelta.errors import TorchDeltaError, UsageError
from torchdelta.nodewise.node_records import node_records
from torchdelta.program.copies import copy_together
from torchdelta.program.restore import restored
from torchdelta.program.sides import state_of
from torchdelta.records.location import NodeRecord
from torchdelta.records.report import Environment
from torchdelta.storage.captures import LeafDescription, StoredTensor, Writer, load, read_manifest, write_manifest

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
            return LeafDescription(kind=type(leaf).__name__, text=describe(leaf))
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


LIMIT_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One side of a comparison that can be made later, in another process."""

    nodes: tuple[NodeRecord, ...]
    batches: tuple[Batch, ...]
    keep: str
    environment: Environment
    notes: tuple[str, ...] = ()
    directory: Path | None = None
    """Where the values are; None where they are in memory."""

    def leaves(self, batch: int, node: str) -> Leaves:
        """Return what a node made in a batch, by path; nothing where it did not run."""
        return self._loaded(self.batches[batch].values.get(node, {}))

    def outputs(self, batch: int) -> Leaves:
        """Return what the graph returned for a batch, by path."""
        return self._loaded(self.batches[batch].results)

    @property
    def failure(self) -> str:
        """What went wrong in the first batch in which something did."""
        return next((batch.failure for batch in self.batches if batch.failure), "")

    def _loaded(self, leaves: Leaves) -> Leaves:
        if self.directory is None:
            return leaves
        where = self.directory
        return {path: load(where, leaf) if isinstance(leaf, StoredTensor) else leaf for path, leaf in leaves.items()}


def capture(
    graph: Any,
    batches: Iterable[Any],
    *,
    out: str | os.PathLike[str] | None = None,
    keep: str = "values",
    limit_bytes: int = LIMIT_BYTES,
    seed: int = 0,
) -> Capture:
    """Run a graph module or exported program over batches, and log every node.

    A batch is a tuple of arguments, or a pair of such a tuple and a dict of keyword arguments. With `out`, values go
    to that directory. The generators are rewound before each batch. State goes on from batch to batch, and is as
    before afterwards, as inputs are. A batch in which a node raises is logged up to there, and ends the capture.
    """
    if keep not in ("values", "statistics"):
        raise UsageError(f"keep is 'values' or 'statistics', not {keep!r}")
    graph_module = as_graph_module(graph)
    writer = Writer(Path(out)) if out is not None else None
    recorder = Recorder(keep=keep, limit_bytes=limit_bytes, writer=writer)
    done: list[Batch] = []
    unlogged: dict[str, str] = {}
    with runtime.preserved(), restored([graph_module]):
        for given in batches:
            args, kwargs = copy_together(_arguments(given), name="the batch")
            runtime.seed_everything(seed + len(done))
            watched = ObservingInterpreter(
                graph_module, before_write=recorder.before_write, after_node=recorder.log, unlogged=unlogged
            )
            recorder.begin(graph_module)
            try:
                recorder.log_outputs(watched.run_on(args, kwargs))
                runtime.synchronise()
            except TorchDeltaError:
                raise
            except Exception as error:
                words = brief(f"{type(error).__name__}: {error}")
                recorder.fail(f"batch {len(done)}: {watched.at or 'the graph'} raised {words}")
            done.append(recorder.end())
            if done[-1].failure:
                break
    if not done:
        raise UsageError("there is no batch to run: give at least one tuple of arguments")
    notes = [f"the inside of {name} ({op}) was not logged" for name, op in unlogged.items()]
    notes += recorder.notes
    notes += [batch.failure for batch in done if batch.failure]
    made = Capture(
        nodes=_described(node_records(graph_module), done),
        batches=tuple(done),
        keep=keep,
        environment=versions.environment(),
        notes=tuple(dict.fromkeys(notes)),
        directory=writer.directory if writer else None,
    )
    if writer:
        write_manifest(writer.directory, made)
    return made


def read_capture(path: str | os.PathLike[str]) -> Capture:
    """Read a capture from its directory; values are loaded when they are asked for."""
    found = read_manifest(Path(path))
    return Capture(
        nodes=found.nodes,
        batches=tuple(
            Batch(
                values={name: {leaf.path: leaf.value for leaf in leaves} for name, leaves in batch.values.items()},
                results={leaf.path: leaf.value for leaf in batch.results},
                failure=batch.failure,
            )
            for batch in found.batches
        ),
        keep=found.keep,
        environment=found.environment,
        notes=found.notes,
        directory=Path(path),
    )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(batch, tuple):
        raise UsageError(
            f"a batch is a tuple of arguments or (arguments, keyword arguments), and this is a {type(batch).__name__}: "
            "write (x,) for a single argument"
        )
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        return batch
    return batch, {}


def _described(nodes: Sequence[NodeRecord], batches: Sequence[Batch]) -> tuple[NodeRecord, ...]:
    """Return the nodes with what each tensor is that they returned, where the graph does not say so itself."""

    def kinds(node: NodeRecord) -> tuple[str, ...]:
        leaves: Leaves = next((batch.values[node.name] for batch in batches if node.name in batch.values), {})
        return tuple(
            _kind(leaf) for leaf in leaves.values() if isinstance(leaf, (torch.Tensor, Statistics, StoredTensor))
        )

    return tuple(node if node.kinds else replace(node, kinds=kinds(node)) for node in nodes)


def _kind(leaf: torch.Tensor | Statistics | StoredTensor) -> str:
    dtype = tensors.dtype_name(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf.dtype
    return f"{dtype}{list(leaf.shape)}"
