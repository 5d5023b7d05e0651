"""Log what every node of one graph computes, batch by batch, so that another side can be held against it later.

The sides of a comparison need never be alive together: a capture is in memory, or in a directory that any process
reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchdelta._torch import runtime, tensors, versions
from torchdelta._torch.interpret import TellingInterpreter, as_graph_module
from torchdelta.compare.leaves import Leaves, brief
from torchdelta.errors import TorchDeltaError, UsageError
from torchdelta.execute.copies import copy_together
from torchdelta.locate.capture_files import Stored, Writer, load, read_manifest, write_manifest
from torchdelta.locate.listing import node_records
from torchdelta.locate.recorder import Batch, Recorder
from torchdelta.locate.restore import restored
from torchdelta.locate.statistics import Statistics
from torchdelta.records.location import NodeRecord
from torchdelta.records.report import Environment

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
        return {path: load(where, leaf) if isinstance(leaf, Stored) else leaf for path, leaf in leaves.items()}


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
            watched = TellingInterpreter(
                graph_module, writes=recorder.before_write, made=recorder.log, unlogged=unlogged
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
        return tuple(_kind(leaf) for leaf in leaves.values() if isinstance(leaf, (torch.Tensor, Statistics, Stored)))

    return tuple(node if node.kinds else replace(node, kinds=kinds(node)) for node in nodes)


def _kind(leaf: torch.Tensor | Statistics | Stored) -> str:
    dtype = tensors.dtype_name(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf.dtype
    return f"{dtype}{list(leaf.shape)}"
