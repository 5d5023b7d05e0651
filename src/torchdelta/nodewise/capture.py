"""Log the value of every node of one graph, batch by batch, so that another side can be compared with it later.

The two sides of a comparison need not be in memory together: a capture is in memory, or in a directory that any
process reads (`storage.captures`).

A value is logged without a copy, and copied only when a node is about to write to its memory. So the log of an `add`
whose result `relu_` overwrites has the sum, and no other value costs memory twice. Beyond the limit only statistics of
values are kept, and the notes say so.

    before = capture(graph_module, [(x,), (y,)], out="before")
    before.leaves(0, "add")     ->  {"value": tensor(…)}

Start reading at `capture`.
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
from torchdelta.storage.captures import Batch, Capture, CaptureWriter, LeafDescription, StoredTensor
from torchdelta.storage.tensors import TensorRow, TensorTable

LIMIT_BYTES = 4 << 30
_PLAIN = (bool, int, float, complex, str, type(None), Container, Unreadable)
_DESCRIBED = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, type, slice, range)


def capture(
    graph: Any,
    batches: Iterable[Any],
    *,
    out: str | os.PathLike[str] | None = None,
    keep: str = "values",
    limit_bytes: int = LIMIT_BYTES,
    seed: int = 0,
) -> Capture:
    """Run a graph module or exported program over batches, and return a capture with the values of its nodes.

    A batch is a tuple of arguments, or a pair of such a tuple and a dict of keyword arguments. The generators are
    seeded with `seed` plus the number of the batch, from 0. `keep` is "values" or "statistics"; once the values of all
    batches would exceed `limit_bytes`, only statistics are kept. With `out`, the values are written to that directory.
    A node that raises ends the capture with a note. The graph's state goes on from batch to batch, and is restored at
    the end. Raise UsageError for arguments that cannot be used.
    """
    if keep not in ("values", "statistics"):
        raise UsageError(f"keep is 'values' or 'statistics', not {keep!r}")
    graph_module = as_graph_module(graph)
    writer = CaptureWriter(Path(out)) if out is not None else None
    recorder = Recorder(keep=keep, limit_bytes=limit_bytes, writer=writer)
    finished: list[Batch] = []
    unlogged: dict[str, str] = {}
    with runtime.preserved(), restored([graph_module]):
        for batch in batches:
            args, kwargs = copy_together(_split_arguments(batch), name="the batch")
            runtime.seed_everything(seed + len(finished))
            interpreter = ObservingInterpreter(
                graph_module, before_write=recorder.before_write, after_node=recorder.log, unlogged=unlogged
            )
            recorder.begin(graph_module)
            try:
                recorder.log_outputs(interpreter.run_on(args, kwargs))
                runtime.synchronise()
            except TorchDeltaError:
                raise
            except Exception as error:
                summary = brief(f"{type(error).__name__}: {error}")
                recorder.fail(f"batch {len(finished)}: {interpreter.at or 'the graph'} raised {summary}")
            finished.append(recorder.end())
            if finished[-1].failure:
                break
    if not finished:
        raise UsageError("there is no batch to run: give at least one tuple of arguments")
    notes = [f"the inside of {name} ({op}) was not logged" for name, op in unlogged.items()]
    notes += recorder.notes
    notes += [batch.failure for batch in finished if batch.failure]
    files = tuple(writer.files) if writer else ()
    result = Capture(
        nodes=_add_kinds(node_records(graph_module), finished, files),
        batches=tuple(finished),
        keep=keep,
        environment=versions.environment(),
        notes=tuple(dict.fromkeys(notes)),
        files=files,
        directory=writer.directory if writer else None,
    )
    if writer:
        writer.finish(result)
    return result


@dataclass(kw_only=True)
class _LoggedTensor:
    """A tensor that was logged without a copy: its place in the log, and its version at that time."""

    leaves: Leaves
    path: str
    tensor: torch.Tensor
    version: int


@dataclass(kw_only=True)
class Recorder:
    """Logs one batch after the other, as the interpreter reports values and writes."""

    keep: str
    limit_bytes: int
    writer: CaptureWriter | None
    notes: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    is_full: bool = False
    batch: Batch = field(default_factory=Batch)
    uncopied: dict[int, list[_LoggedTensor]] = field(default_factory=dict)
    """Tensors that were logged without a copy, by the storage that they are in."""
    state_storages: frozenset[int] = frozenset()
    """The storages of the graph's state, which outlives the batch and may be written to later."""
    state_leaves: dict[Any, Any] = field(default_factory=dict)
    """The leaf that was logged for state that no batch changed, by view, dtype and version."""
    new_state: list[tuple[Any, Leaves, str]] = field(default_factory=list)
    """The places where state was logged for the first time in this batch, by the keys of `state_leaves`."""

    def begin(self, graph_module: torch.nn.Module) -> None:
        """Begin a new, empty batch, and record the storages of the graph's parameters, buffers and attributes."""
        self.batch = Batch()
        state = state_of(graph_module)
        tensors_by_name: Mapping[str, Any] = {**state.parameters, **state.buffers, **state.attributes}
        self.state_storages = frozenset(
            key for tensor in tensors_by_name.values() if (key := tensors.storage_key(tensor))
        )

    def fail(self, failure: str) -> None:
        """Set the `failure` of the current batch: a text that says what raised."""
        self.batch = replace(self.batch, failure=failure)

    def log(self, name: str, value: Any) -> None:
        """Log the leaves of a node's value; a second value of the node in this batch is logged at `calls[1].value`."""
        leaves = self.batch.values.setdefault(name, {})
        # a graph that is called from two places runs each of its nodes twice
        calls = 1 + sum(path == "value" or path.endswith("].value") for path in leaves)
        self._log_leaves(leaves, leaves_of(value, "value" if calls == 1 else f"calls[{calls - 1}].value"))

    def log_outputs(self, value: Any) -> None:
        """Add the leaves of the graph's outputs to the `results` of the batch; their paths begin with `outputs`."""
        self._log_leaves(self.batch.results, leaves_of(value, "outputs"))

    def before_write(self, targets: Sequence[torch.Tensor]) -> None:
        """Replace each uncopied tensor in the log by a copy if it shares memory with one of `targets`.

        The interpreter calls it before a node writes to the targets.
        """
        for target in targets:
            for logged in self.uncopied.pop(tensors.storage_key(target) or 0, []):
                self._replace_by_copy(logged)

    def end(self) -> Batch:
        """Finish the batch and return it; logged tensors that share memory with the graph's state are copied first.

        With a writer, the tensors that wait are written to the directory instead. A tensor that was overwritten without
        a call of `before_write` becomes `Unreadable`, with a note. State logged for the first time is remembered for
        later batches, unless it is `Unreadable`.
        """
        if self.writer:
            self._flush()
        for entries in self.uncopied.values():
            for logged in entries:
                if not self._drop_overwritten(logged) and tensors.storage_key(logged.tensor) in self.state_storages:
                    self._replace_by_copy(logged)
        self.uncopied.clear()
        for key, leaves, path in self.new_state:
            if not isinstance(leaves[path], Unreadable):
                self.state_leaves[key] = leaves[path]
        self.new_state.clear()
        return self.batch

    def _log_leaves(self, log: Leaves, leaves: Leaves) -> None:
        """Add the leaves of a value to `log`, each as `_keep_leaf` returns it, and flush the writer if it is due."""
        for path, leaf in leaves.items():
            log[path] = self._keep_leaf(log, path, leaf)
        if self.writer and self.writer.is_due:
            self._flush()

    def _keep_leaf(self, log: Leaves, path: str, leaf: Any) -> Any:
        """Return a leaf as it is logged: itself, its statistics, or a record that stands for it.

        A tensor is returned detached and without a copy, counted in `kept_bytes`, and remembered as uncopied at `path`
        of `log`; a writer is told of it. If only statistics are kept, those are returned. Unchanged state is returned
        as the leaf that was logged first. Python's numbers, texts, None and containers stay as they are; dtypes and the
        like become a `LeafDescription`, and other objects and tensors without values `Unreadable`.
        """
        if isinstance(leaf, _PLAIN):
            return leaf
        if isinstance(leaf, _DESCRIBED):
            return LeafDescription(kind=type(leaf).__name__, text=describe(leaf))
        if not isinstance(leaf, torch.Tensor):
            return Unreadable(type(leaf).__qualname__, "a capture does not hold objects of this kind")
        if not tensors.has_values(leaf):
            return Unreadable("tensor", "it has no values")
        tensor = tensors.without_class(leaf).detach()
        storage = tensors.storage_key(tensor)
        if storage in self.state_storages:
            key = tensors.view_key(tensor), tensor.dtype, tensors.version(tensor)
            if key in self.state_leaves:
                return self.state_leaves[key]
            self.new_state.append((key, log, path))
        size = tensor.numel() * tensor.itemsize
        if self.keep == "statistics" or not self._fits(size):
            return statistics_of(tensor)
        self.kept_bytes += size
        if self.writer:
            self.writer.add(log, path, tensor)
        if storage:
            logged = _LoggedTensor(leaves=log, path=path, tensor=tensor, version=tensors.version(tensor))
            self.uncopied.setdefault(storage, []).append(logged)
        return tensor

    def _fits(self, size: int) -> bool:
        """Tell whether a tensor of `size` bytes fits into the limit with those that were kept before.

        After the first one that does not fit, which adds a note, no tensor does.
        """
        # once one tensor did not fit none does, because small values kept at random could not be understood
        if not self.is_full and self.kept_bytes + size > self.limit_bytes:
            self.is_full = True
            self.notes.append(
                f"the limit of {self.limit_bytes} bytes was reached after {self.kept_bytes}: from then on only "
                "statistics were kept"
            )
        return not self.is_full

    def _replace_by_copy(self, logged: _LoggedTensor) -> None:
        """Put a copy in the place of a logged tensor, unless something else is in that place of the log already."""
        if logged.leaves.get(logged.path) is logged.tensor:
            logged.leaves[logged.path] = logged.tensor.clone()

    def _drop_overwritten(self, logged: _LoggedTensor) -> bool:
        """Tell whether a logged tensor was overwritten without a call of `before_write`.

        If so, `Unreadable` takes its place in the log, with a note. A tensor that is no longer in the log itself,
        because a copy or record took its place, does not count.
        """
        if tensors.version(logged.tensor) == logged.version or logged.leaves.get(logged.path) is not logged.tensor:
            return False
        logged.leaves[logged.path] = Unreadable("tensor", "it was overwritten by an operation that does not say so")
        self.notes.append("a node writes to memory without saying so: values that it overwrote are missing")
        return True

    def _flush(self) -> None:
        """Write the tensors that wait to the directory, and forget the uncopied ones.

        Tensors that were overwritten without a call of `before_write` become `Unreadable` instead.
        """
        assert self.writer is not None
        for entries in self.uncopied.values():
            for logged in entries:
                self._drop_overwritten(logged)
        self.writer.flush()
        self.uncopied.clear()


def _split_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a batch; raise UsageError if it is not a tuple.

    A pair of a tuple and a dict has both; any other tuple has the positional arguments alone.
    """
    if not isinstance(batch, tuple):
        raise UsageError(
            f"a batch is a tuple of arguments or (arguments, keyword arguments), and this is a {type(batch).__name__}: "
            "write (x,) for a single argument"
        )
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        return batch
    return batch, {}


def _add_kinds(
    nodes: Sequence[NodeRecord], batches: Sequence[Batch], files: Sequence[TensorTable]
) -> tuple[NodeRecord, ...]:
    """Return the nodes; those whose graph does not say their kinds get the kinds of the tensors that were logged.

    The first batch that has a value of the node counts. `files` are the tables of the tensors that are in files.
    """

    def kinds(node: NodeRecord) -> tuple[str, ...]:
        leaves: Leaves = next((batch.values[node.name] for batch in batches if node.name in batch.values), {})
        return tuple(kind for leaf in leaves.values() if (kind := _kind(leaf, files)))

    return tuple(node if node.kinds else replace(node, kinds=kinds(node)) for node in nodes)


def _kind(leaf: Any, files: Sequence[TensorTable]) -> str | None:
    """Return dtype and shape of a logged tensor, as in `float32[2, 3]`; None if the leaf is not a tensor.

    The statistics of a tensor, and a tensor in one of the `files`, count as tensors.
    """
    row = files[leaf.file].tensors[leaf.row] if isinstance(leaf, StoredTensor) else leaf
    if isinstance(row, torch.Tensor):
        return f"{tensors.dtype_name(row.dtype)}{list(row.shape)}"
    return f"{row.dtype}{list(row.shape)}" if isinstance(row, (Statistics, TensorRow)) else None
