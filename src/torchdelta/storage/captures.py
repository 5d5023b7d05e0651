"""A capture on disk: tensors in safetensors files, all else in one strict JSON manifest, and nothing unpickled.

A dtype that safetensors does not know is stored as its bytes, and strides as the order of the dimensions in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchdelta._torch import tensors
from torchdelta.compare.leaves import Container, Leaves, Unreadable
from torchdelta.compare.statistics import Statistics
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.codec import decode, encode
from torchdelta.records.location import NodeRecord
from torchdelta.records.report import Environment

CAPTURE_VERSION = 1
MANIFEST = "capture.json"
GROUP_BYTES = 64 << 20
_DIRECT = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    }
)
_NUMBERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The dimensions as they lie in memory, the slowest first."""


@dataclass(frozen=True, kw_only=True)
class LeafDescription:
    """A plain object, such as a dtype, by its text."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class LeafRecord:
    """One leaf as JSON can hold it."""

    path: str
    kind: str
    text: str = ""
    stored: StoredTensor | None = None
    statistics: Statistics | None = None
    described: LeafDescription | None = None

    @classmethod
    def of(cls, path: str, leaf: Any) -> LeafRecord:
        """Write a leaf down."""
        if isinstance(leaf, StoredTensor):
            return cls(path=path, kind="tensor", stored=leaf)
        if isinstance(leaf, Statistics):
            return cls(path=path, kind="statistics", statistics=leaf)
        if isinstance(leaf, LeafDescription):
            return cls(path=path, kind="described", described=leaf)
        if isinstance(leaf, Container):
            return cls(path=path, kind="container", text=leaf.kind)
        if isinstance(leaf, Unreadable):
            return cls(path=path, kind="unreadable", text=f"{leaf.kind}\n{leaf.error}")
        if leaf is None:
            return cls(path=path, kind="None")
        return cls(path=path, kind=type(leaf).__name__, text=str(leaf))

    @property
    def value(self) -> Any:
        """The leaf; ReportUnreadable where the record does not make one."""
        whole = self.stored or self.statistics or self.described
        if whole is not None:
            return whole
        if self.kind == "container":
            return Container(self.text)
        if self.kind == "unreadable":
            kind, _, error = self.text.partition("\n")
            return Unreadable(kind, error)
        if self.kind == "None":
            return None
        try:
            return _NUMBERS[self.kind](self.text)
        except (KeyError, ValueError) as error:
            raise ReportUnreadable(f"{self.path}: no leaf is a {self.kind} {self.text!r}") from error


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """One batch as JSON can hold it."""

    values: dict[str, tuple[LeafRecord, ...]]
    results: tuple[LeafRecord, ...]
    failure: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A capture without its tensors."""

    capture_version: int
    keep: str
    environment: Environment
    notes: tuple[str, ...]
    nodes: tuple[NodeRecord, ...]
    batches: tuple[BatchRecord, ...]


class _Batch(Protocol):
    @property
    def values(self) -> dict[str, Leaves]: ...
    @property
    def results(self) -> Leaves: ...
    @property
    def failure(self) -> str: ...


class _Capture(Protocol):
    @property
    def nodes(self) -> tuple[NodeRecord, ...]: ...
    @property
    def batches(self) -> tuple[Any, ...]: ...
    @property
    def keep(self) -> str: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass
class Writer:
    """Collects tensors and writes them a group at a time; each is then a `Stored` where it was logged."""

    directory: Path
    waiting: list[tuple[Leaves, str]] = field(default_factory=list)
    waiting_bytes: int = 0
    files: int = 0

    def __post_init__(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            is_taken = any(self.directory.iterdir())
        except OSError as error:
            raise UsageError(f"cannot write a capture to {self.directory}: {error.strerror or error}") from error
        if is_taken:
            raise UsageError(f"{self.directory} is not empty: give a capture a directory of its own")

    def add(self, leaves: Leaves, path: str, tensor: torch.Tensor) -> None:
        """Remember a tensor that is logged at this place."""
        self.waiting.append((leaves, path))
        self.waiting_bytes += tensor.numel() * tensor.itemsize

    @property
    def is_due(self) -> bool:
        """Whether what waits is a group."""
        return self.waiting_bytes >= GROUP_BYTES

    def flush(self) -> None:
        """Write what waits."""
        file = f"values-{self.files:05}.safetensors"
        data: dict[str, torch.Tensor] = {}
        for leaves, path in self.waiting:
            tensor = leaves[path]
            if isinstance(tensor, torch.Tensor):  # what was overwritten is none any more
                key = str(len(data))
                order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
                data[key] = _storable(tensor.permute(order))
                leaves[path] = StoredTensor(
                    file=file,
                    key=key,
                    dtype=tensors.dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    order=order,
                )
        self.waiting, self.waiting_bytes = [], 0
        if data:
            try:
                save_file(data, self.directory / file)
            except (OSError, SafetensorError) as error:
                raise UsageError(f"cannot write {self.directory / file}: {error}") from error
            self.files += 1


def load(directory: Path, stored: StoredTensor) -> torch.Tensor:
    """Read one tensor back as it was."""
    try:
        with safe_open(directory / stored.file, framework="pt") as file:
            raw = file.get_tensor(stored.key)
        dtype = getattr(torch, stored.dtype)
        shape = [stored.shape[dim] for dim in stored.order]
        whole: torch.Tensor = raw if raw.dtype is dtype else raw.view(dtype)
        inverse = sorted(range(len(stored.order)), key=stored.order.__getitem__)
        return whole.reshape(shape).permute(inverse)
    except (OSError, SafetensorError, RuntimeError, AttributeError, TypeError, IndexError) as error:
        raise ReportUnreadable(f"cannot read {stored.key} of {directory / stored.file}: {error}") from error


def write_manifest(directory: Path, capture: _Capture) -> None:
    """Write everything but the tensors; it comes last, so that a capture with a manifest is whole."""
    manifest = Manifest(
        capture_version=CAPTURE_VERSION,
        keep=capture.keep,
        environment=capture.environment,
        notes=capture.notes,
        nodes=capture.nodes,
        batches=tuple(_record(batch) for batch in capture.batches),
    )
    text = json.dumps(encode(manifest), indent=1, allow_nan=False)
    try:
        (directory / MANIFEST).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {directory / MANIFEST}: {error.strerror or error}") from error


def read_manifest(directory: Path) -> Manifest:
    """Read everything but the tensors; ReportUnreadable says what is wrong with it."""
    file = directory / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ReportUnreadable(f"{directory} holds no capture that was finished: {file.name}: {why}") from error
    version = data.get("capture_version") if isinstance(data, dict) else None
    if version != CAPTURE_VERSION:
        raise ReportUnreadable(f"{file} has version {version}, and this torchdelta reads {CAPTURE_VERSION}")
    try:
        manifest = decode(Manifest, data, "capture")
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{file}: {error}") from error
    assert isinstance(manifest, Manifest)
    every = (leaves for batch in manifest.batches for leaves in (*batch.values.values(), batch.results))
    for leaf in (leaf for leaves in every for leaf in leaves):
        if leaf.stored and Path(leaf.stored.file).name != leaf.stored.file:
            raise ReportUnreadable(f"{file}: {leaf.stored.file} is not beside it")
    return manifest


def _record(batch: _Batch) -> BatchRecord:
    return BatchRecord(
        values={
            name: tuple(LeafRecord.of(path, leaf) for path, leaf in leaves.items())
            for name, leaves in batch.values.items()
        },
        results=tuple(LeafRecord.of(path, leaf) for path, leaf in batch.results.items()),
        failure=batch.failure,
    )


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in memory of its own, as safetensors asks; as bytes where it does not know the dtype."""
    owned = tensor.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return owned if owned.dtype in _DIRECT else owned.reshape(-1).view(torch.uint8)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
