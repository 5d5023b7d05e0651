"""Tensors in a safetensors file, as views of storages: tensors that shared memory when written share it when read.

The file holds one run of bytes for each storage, trimmed to the bytes that its tensors can reach. A table in a JSON
file beside it describes them. Each tensor is one row (storage, offset, shape, strides, dtype, whether it is a
parameter), and each storage is one row (device, size, checksum). A matrix and its transpose:

    {"tensors":  [{"storage": 0, "offset": 0, "shape": [2, 3], "stride": [3, 1], "dtype": "float32", …},
                  {"storage": 0, "offset": 0, "shape": [3, 2], "stride": [1, 3], "dtype": "float32", …}],
     "storages": [{"device": "cpu", "size": 24, "checksum": 1103515245}]}

Gradients, and attributes that were set on a tensor, are not written.

Graphs write all their tensors to one file; captures write one file after the other, so that they never hold all values.
Start reading at `TensorWriter.write` and `read_tensors`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchdelta._torch import tensors
from torchdelta.errors import EnvironmentUnfit, ReportUnreadable, UsageError
from torchdelta.records.strict_json import replace_file
from torchdelta.storage.values import Unwritable

_ALIGNMENT = 64
"""A trimmed storage starts at a multiple of this many bytes, so that every offset is a whole number of elements."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor; the same tensor in two places is one row."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_parameter: bool
    is_conjugate: bool


@dataclass(frozen=True, kw_only=True)
class StorageRow:
    """One storage; the checksum is None on the meta device, where a storage has no bytes."""

    device: str
    size: int
    checksum: int | None


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """The description of every tensor of one file."""

    tensors: tuple[TensorRow, ...]
    storages: tuple[StorageRow, ...]


class TensorWriter:
    """Collects the tensors of one file, each once."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._rows: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the number of the row that a tensor will have; the same tensor always has the same row.

        Raise Unwritable if no file can hold it. The tensor is not copied: `write` writes the values that it has then.
        """
        if id(tensor) not in self._rows:
            refuse_special(tensor)
            self._rows[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._rows[id(tensor)]

    def write(self, path: Path) -> TensorTable:
        """Write the bytes of every added tensor to a file, and return the table that describes the tensors.

        A file of that path is replaced in one step. Raise UsageError if it cannot be written.
        """
        table, contents = self._describe()
        try:
            replace_file(path, lambda file: save_file(contents, file))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
        return table

    def _describe(self) -> tuple[TensorTable, dict[str, torch.Tensor]]:
        """Return the table, and the bytes of each storage by its name in the file, which is the number of its row.

        Bytes before the first and behind the last that the tensors can reach are left out. A storage on the meta device
        has a row, and no bytes.
        """
        members_by_storage: dict[Any, list[int]] = {}
        for index, tensor in enumerate(self._tensors):
            members_by_storage.setdefault(tensors.storage_reference(tensor), []).append(index)
        rows: dict[int, TensorRow] = {}
        storages: list[StorageRow] = []
        contents: dict[str, torch.Tensor] = {}
        for indices in members_by_storage.values():
            members = [self._tensors[index] for index in indices]
            start, stop = _find_reach(members)
            content = None if members[0].is_meta else _read_bytes(members[0], start, stop)
            if content is not None:
                contents[str(len(storages))] = content
            for index, tensor in zip(indices, members, strict=True):
                rows[index] = _describe_tensor(tensor, len(storages), start)
            storages.append(
                StorageRow(
                    device=str(members[0].device),
                    size=stop - start,
                    checksum=None if content is None else zlib.crc32(content.numpy().data),
                )
            )
        table = TensorTable(tensors=tuple(rows[index] for index in range(len(rows))), storages=tuple(storages))
        return table, contents


def read_tensors(path: Path, table: TensorTable, rows: Iterable[int] | None = None) -> list[torch.Tensor]:
    """Return the tensors of a file: all, or those of `rows` in that order; only the storages that they need are read.

    Each call makes new storages, and tensors of one storage share it. Raise ReportUnreadable if the file does not hold
    what `table` describes or its bytes were changed, and EnvironmentUnfit if this machine lacks a device.
    """
    indices = range(len(table.tensors)) if rows is None else list(rows)
    needed = {table.tensors[index].storage for index in indices}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            memory = {
                index: _load_storage(index, row, file.get_tensor(str(index)) if str(index) in names else None)
                for index, row in enumerate(table.storages)
                if index in needed
            }
    except (OSError, SafetensorError) as error:
        raise ReportUnreadable(f"its tensors in {path.name} cannot be read: {error}") from error
    return [_build_tensor(f"tensors[{index}]", table.tensors[index], memory) for index in indices]


def refuse_special(tensor: torch.Tensor) -> None:
    """Raise Unwritable if a tensor is more than a view of a storage.

    That is so for subclasses other than `Parameter`, and for tensors that are sparse or otherwise not strided, nested,
    quantized, computed under autograd, or negated lazily. A lazy conjugate is accepted.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unwritable(f"a tensor is of class {type(tensor).__qualname__}, and only plain tensors can be kept")
    description = tensors.describe(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "not strided"
        raise Unwritable(f"a {description} is {kind}, and only ordinary strided tensors can be kept")
    if not tensor.is_leaf:
        raise Unwritable(f"a {description} was computed under autograd, and its history cannot be kept: detach it")
    if tensor.is_neg():
        raise Unwritable(f"a {description} is a negated view: call resolve_neg() on it")


def _find_reach(members: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the first byte that any of these views of one storage can touch, and the byte after the last.

    The first is rounded down to a multiple of `_ALIGNMENT`. Both are 0 if all views are empty.
    """
    spans = [_find_span(tensor) for tensor in members if tensor.numel()]
    if not spans:
        return 0, 0
    return min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT, max(stop for _, stop in spans)


def _find_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor that is not empty, and the byte after its last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _read_bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the bytes from `start` to `stop` of a tensor's storage, on the CPU; a CPU tensor's are not copied."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[start:stop].cpu().contiguous()


def _describe_tensor(tensor: torch.Tensor, storage: int, start: int) -> TensorRow:
    """Return the row of a tensor in the storage of number `storage`, of which the bytes from `start` on are kept.

    The offset counts elements from `start`; that of an empty tensor is 0.
    """
    # an empty view may lie anywhere, also outside of the bytes that are kept
    offset = int(tensor.storage_offset()) - start // tensor.itemsize if tensor.numel() else 0
    return TensorRow(
        storage=storage,
        offset=offset,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensors.dtype_name(tensor.dtype),
        requires_grad=tensor.requires_grad,
        is_parameter=isinstance(tensor, torch.nn.Parameter),
        is_conjugate=tensor.is_conj(),
    )


def _load_storage(index: int, row: StorageRow, content: torch.Tensor | None) -> torch.UntypedStorage:
    """Return a new storage on the row's device, filled with the content that the file has for it (None: it has none).

    A storage on the meta device needs no content. Raise ReportUnreadable if the device's name is invalid, or if the
    content is missing or not what was written. Raise EnvironmentUnfit if this machine lacks the device.
    """
    where = f"storages[{index}]"
    try:
        device = torch.device(row.device)
        if device.type == "meta":
            return torch.empty(row.size, dtype=torch.uint8, device=device).untyped_storage()
    except (RuntimeError, TypeError) as error:  # torch refuses integers beyond 64 bits with a TypeError
        raise ReportUnreadable(f"{where}: no storage of {row.size} bytes on {row.device!r}: {error}") from error
    if content is None or content.dtype is not torch.uint8 or content.dim() != 1 or len(content) != row.size:
        raise ReportUnreadable(f"{where}: the file of tensors does not have its {row.size} bytes")
    if zlib.crc32(content.numpy().data) != row.checksum:
        raise ReportUnreadable(f"{where}: its bytes are not those that were written")
    try:
        # a copy, because the content may lie in the mapped file, at any address
        return content.to(device, copy=True).untyped_storage()
    except (RuntimeError, AssertionError) as error:
        raise EnvironmentUnfit(f"{where}: it was on {row.device}, which this machine does not have: {error}") from error


def _build_tensor(where: str, row: TensorRow, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the tensor of a row, a leaf that views its storage in `memory` (storages by number) without a copy.

    It is a parameter or a lazy conjugate if the row says so. Raise ReportUnreadable, with the place `where`, if the row
    makes no sense: an unknown storage or dtype, a negative number, or a tensor that reaches beyond the storage.
    """
    try:
        if row.offset < 0 or min((*row.shape, *row.stride), default=0) < 0:
            raise ValueError("a negative number")
        if row.storage not in memory:
            raise ValueError(f"there is no storage {row.storage}")
        storage = memory[row.storage]
        dtype = getattr(torch, row.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {row.dtype!r}")
        blank = torch.empty(0, dtype=dtype, device=storage.device)
        if blank.itemsize * (row.offset + _count_elements(row)) > storage.nbytes():
            raise ValueError("it reaches beyond its storage")
        tensor = blank.set_(storage, row.offset, row.shape, row.stride)
        if row.is_conjugate:
            tensor = tensor.conj()
        if row.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=row.requires_grad)
        return tensor.requires_grad_(row.requires_grad)
    except (RuntimeError, TypeError, ValueError) as error:  # a TypeError for integers beyond 64 bits
        raise ReportUnreadable(f"{where}: {error}") from error


def _count_elements(row: TensorRow) -> int:
    """Return how many elements lie from the first of a tensor to its last, gaps included; 0 if the tensor is empty."""
    if 0 in row.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(row.shape, row.stride, strict=True))
