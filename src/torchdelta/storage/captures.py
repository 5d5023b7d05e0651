"""A capture: the values that every node of a graph computed, batch by batch, in memory or in a directory.

A directory has one JSON file and any number of tensor files. Tensors are written a group at a time while the graph
runs, so that a capture never holds all of them, and are read only for the node that is looked at.

    run/values-00000.safetensors      the tensors of the first group, as `storage.tensors` writes them
    run/values-00001.safetensors      …
    run/capture.json                  written last: a capture that has it is complete

    {"format": "torchdelta capture", "capture_version": 2, "keep": "values", "environment": {…}, "notes": […],
     "nodes": [{"name": "add", "op": "aten.add.Tensor", …}],
     "files": [{"tensors": […], "storages": […]}, …],
     "batches": [{"values": {"add": {"value": {"stored": {"file": 0, "row": 3}}}},
                  "results": {"outputs": {"container": {"kind": "tuple"}}, "outputs[0]": 3},
                  "failure": ""}]}

A leaf is a value as in `storage.values`, or one of `_RECORDS` by its tag. The names of the tensor files follow from
their numbers, so a capture cannot make its reader open any other file.

Start reading at `Capture`; `nodewise.capture` makes one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchdelta._torch.modes import outside
from torchdelta.compare.leaves import Container, Leaves, Unreadable
from torchdelta.compare.statistics import Statistics
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.codec import decode, encode
from torchdelta.records.location import NodeRecord
from torchdelta.records.report import Environment
from torchdelta.records.strict_json import FileFormat
from torchdelta.storage.tensors import TensorTable, TensorWriter, read_tensors
from torchdelta.storage.values import Unwritable, decode_value, encode_value, expect

CAPTURE_VERSION = 2
GROUP_BYTES = 64 << 20
"""Tensors of about this size are written together: the most that waits in memory."""
_MANIFEST = "capture.json"
_FORMAT = FileFormat(kind="capture", version=CAPTURE_VERSION, remedy="capture the graph again")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Stands for a tensor that is in a file of the capture: the file's number, and the row in its table."""

    file: int
    row: int


@dataclass(frozen=True, kw_only=True)
class LeafDescription:
    """Stands for an object without values, such as a dtype, by its text."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


_RECORDS: dict[str, type] = {
    "stored": StoredTensor,
    "statistics": Statistics,
    "description": LeafDescription,
    "container": Container,
    "unreadable": Unreadable,
}
"""The leaves that are records, by their tags in the file."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The results of one call of the graph: the leaves of each node that ran, and of the outputs."""

    values: dict[str, Leaves] = field(default_factory=dict)
    results: Leaves = field(default_factory=dict)
    failure: str = ""
    """Which node raised which exception; the nodes before it are in `values`."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One side of a comparison that can be made later, in another process."""

    nodes: tuple[NodeRecord, ...]
    batches: tuple[Batch, ...]
    keep: str
    environment: Environment
    notes: tuple[str, ...] = ()
    files: tuple[TensorTable, ...] = ()
    """The tables of the tensor files, by their numbers."""
    directory: Path | None = None
    """The directory of the tensor files; None if the values are in memory."""

    def leaves(self, batch: int, node: str) -> Leaves:
        """Return the leaves of a node's value in a batch, by path; an empty dict if the node did not run.

        Tensors on disk are read now. Raise ReportUnreadable if that fails, and EnvironmentUnfit if their device is
        missing.
        """
        return self._load(self.batches[batch].values.get(node, {}))

    def outputs(self, batch: int) -> Leaves:
        """Return the leaves of the graph's outputs for a batch, by path.

        Tensors on disk are read now. Raise ReportUnreadable if that fails, and EnvironmentUnfit if their device is
        missing.
        """
        return self._load(self.batches[batch].results)

    @property
    def failure(self) -> str:
        """The failure of the first batch that has one; empty if none has."""
        return next((batch.failure for batch in self.batches if batch.failure), "")

    def _load(self, leaves: Leaves) -> Leaves:
        """Return the leaves with a tensor, read from its file, in the place of each `StoredTensor`.

        Without any, or if the capture is in memory, `leaves` itself is returned. Leaves of one call that were views of
        one storage share it again. Raise ReportUnreadable if a tensor cannot be read, and EnvironmentUnfit if this
        machine lacks its device.
        """
        rows: dict[int, list[int]] = {}
        for leaf in leaves.values():
            if isinstance(leaf, StoredTensor):
                rows.setdefault(leaf.file, []).append(leaf.row)
        if self.directory is None or not rows:
            return leaves
        loaded: dict[tuple[int, int], torch.Tensor] = {}
        with outside.outside_modes():
            for file, indices in rows.items():
                path = _name_file(self.directory, file)
                try:
                    tensors = read_tensors(path, self.files[file], indices)
                except ReportUnreadable as error:
                    raise ReportUnreadable(f"{path}: {error}") from error
                loaded.update(((file, index), tensor) for index, tensor in zip(indices, tensors, strict=True))
        return {
            path: loaded[leaf.file, leaf.row] if isinstance(leaf, StoredTensor) else leaf
            for path, leaf in leaves.items()
        }


class CaptureWriter:
    """Writes a capture to an empty directory while the graph runs: tensors a group at a time, the JSON last."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if it is not there; raise UsageError if it cannot be created or is not empty."""
        self.directory = directory
        self.files: list[TensorTable] = []
        self._waiting: list[tuple[Leaves, str]] = []
        self._waiting_bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            is_taken = any(directory.iterdir())
        except OSError as error:
            raise UsageError(f"cannot write a capture to {directory}: {error.strerror or error}") from error
        if is_taken:
            raise UsageError(f"{directory} is not empty: give a capture a directory of its own")

    def add(self, leaves: Leaves, path: str, tensor: torch.Tensor) -> None:
        """Plan that `flush` writes the tensor which is then in `leaves` at this path; nothing is written yet.

        `tensor` only tells how many bytes that will be.
        """
        self._waiting.append((leaves, path))
        self._waiting_bytes += tensor.numel() * tensor.itemsize

    @property
    def is_due(self) -> bool:
        """Whether the planned tensors have `GROUP_BYTES` or more, so that it is time for `flush`."""
        return self._waiting_bytes >= GROUP_BYTES

    def flush(self) -> None:
        """Write the tensors that `add` planned to one new file; in their leaves, put a `StoredTensor` in their place.

        The table of the new file is appended to `files`. A leaf that is not a tensor any more stays, and a tensor that
        no file can hold becomes an `Unreadable`. If no tensor remains, no file is written. Raise UsageError if it
        cannot be written.
        """
        group = TensorWriter()
        rows: list[tuple[Leaves, str, int]] = []
        with outside.outside_modes():
            for leaves, path in self._waiting:
                tensor = leaves[path]
                # something else is in its place if the tensor was overwritten meanwhile
                if isinstance(tensor, torch.Tensor):
                    try:
                        rows.append((leaves, path, group.add(_prepare(tensor))))
                    except Unwritable as error:
                        leaves[path] = Unreadable("tensor", str(error))
            self._waiting, self._waiting_bytes = [], 0
            if not rows:
                return
            table = group.write(_name_file(self.directory, len(self.files)))
        for leaves, path, row in rows:
            leaves[path] = StoredTensor(file=len(self.files), row=row)
        self.files.append(table)

    def finish(self, capture: Capture) -> None:
        """Write `capture.json`: everything in the capture but its tensors. Raise UsageError if it cannot be written.

        The tensors have to be flushed before, because a leaf that is still a tensor raises Unwritable.
        """
        header = _Header(
            keep=capture.keep,
            environment=capture.environment,
            notes=capture.notes,
            nodes=capture.nodes,
            files=capture.files,
        )
        batches = [_encode_batch(batch) for batch in capture.batches]
        _FORMAT.write(self.directory / _MANIFEST, {**encode(header), "batches": batches}, indent=1)


def read_capture(path: str | os.PathLike[str]) -> Capture:
    """Return the capture in a directory; its tensors are read when they are needed.

    Raise ReportUnreadable if the directory has no `capture.json`, or if that is damaged or of another version.
    """
    directory = Path(path)
    file = directory / _MANIFEST
    try:
        document = _FORMAT.read(file)
    except ReportUnreadable as error:
        if error.__cause__ is None:
            raise
        raise ReportUnreadable(f"{directory} does not hold a finished capture: {error}") from error
    try:
        batches = expect(document.pop("batches", None), list, "batches")
        header = decode(_Header, document, "capture")
        return Capture(
            nodes=header.nodes,
            batches=tuple(_decode_batch(batch, f"batches[{index}]", header) for index, batch in enumerate(batches)),
            keep=header.keep,
            environment=header.environment,
            notes=header.notes,
            files=header.files,
            directory=directory,
        )
    except RecursionError as error:
        raise ReportUnreadable(f"{file}: it is nested too deeply") from error
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{file}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Header:
    """The JSON of a capture without its batches."""

    keep: str
    environment: Environment
    notes: tuple[str, ...]
    nodes: tuple[NodeRecord, ...]
    files: tuple[TensorTable, ...]


def _name_file(directory: Path, number: int) -> Path:
    """Return the path of the tensor file with this number."""
    return directory / f"values-{number:05}.safetensors"


def _prepare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is written: on the CPU, a lazy negation carried out, and without a much larger storage.

    A small view of a large storage is copied, because it would make files large and reading slow. Otherwise it may be
    the tensor itself.
    """
    plain = tensor.resolve_neg().cpu()
    is_small_part = 2 * plain.numel() * plain.itemsize < plain.untyped_storage().nbytes()
    return plain.clone() if is_small_part else plain


def _encode_batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as JSON's own types; raise Unwritable if a leaf, such as a tensor, has no encoding."""
    return {
        "values": {node: _encode_leaves(leaves) for node, leaves in batch.values.items()},
        "results": _encode_leaves(batch.results),
        "failure": encode(batch.failure),
    }


def _decode_batch(data: Any, where: str, header: _Header) -> Batch:
    """Return the batch that `_encode_batch` encoded as `data`; its tensors stay `StoredTensor`, and no file is read.

    Raise ReportUnreadable if an entry is missing, unknown or damaged, or if a leaf refers to a tensor that no table of
    `header` has.
    """
    entries = expect(data, dict, where)
    if unknown := entries.keys() - {"values", "results", "failure"}:
        raise ReportUnreadable(f"{where}: unknown {', '.join(sorted(unknown))}")
    values = expect(entries.get("values"), dict, f"{where}.values")
    return Batch(
        values={node: _decode_leaves(leaves, f"{where}.values.{node}", header) for node, leaves in values.items()},
        results=_decode_leaves(entries.get("results"), f"{where}.results", header),
        failure=decode(str, entries.get("failure"), f"{where}.failure"),
    )


def _encode_leaves(leaves: Leaves) -> dict[str, Any]:
    """Return leaves as JSON's own types, by path; raise Unwritable if a leaf, such as a tensor, has no encoding."""
    return {path: encode_value(_strip_subclass(leaf), _refer) for path, leaf in leaves.items()}


def _decode_leaves(data: Any, where: str, header: _Header) -> Leaves:
    """Return the leaves that `_encode_leaves` encoded as `data`, by path; tensors stay `StoredTensor`.

    Raise ReportUnreadable if a leaf is damaged, or refers to a tensor that no table of `header` has.
    """

    def fetch(tag: str, content: Any, place: str) -> Any:
        """Return the leaf that is a record."""
        if tag not in _RECORDS:
            raise ReportUnreadable(f"{place}: {tag!r} is not a kind of leaf")
        leaf = decode(_RECORDS[tag], content, place)
        if isinstance(leaf, StoredTensor):
            is_known = 0 <= leaf.file < len(header.files) and 0 <= leaf.row < len(header.files[leaf.file].tensors)
            if not is_known:
                raise ReportUnreadable(f"{place}: there is no tensor {leaf.row} in file {leaf.file}")
        return leaf

    entries = expect(data, dict, where)
    return {path: decode_value(leaf, f"{where}.{path}", fetch) for path, leaf in entries.items()}


def _refer(leaf: Any) -> dict[str, Any] | None:
    """Return a leaf that is one of `_RECORDS` as `{tag: encoded record}`, or None for any other leaf."""
    tag = next((tag for tag, record in _RECORDS.items() if isinstance(leaf, record)), None)
    return None if tag is None else {tag: encode(leaf)}


def _strip_subclass(leaf: Any) -> Any:
    """Return a number or text of a subclass, such as one of numpy's, as Python's own; any other leaf unchanged."""
    own = (bool, int, float, complex, str)
    kind = next((kind for kind in own if isinstance(leaf, kind)), None)
    return leaf if kind in (None, type(leaf)) else kind(leaf)
