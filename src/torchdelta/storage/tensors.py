"""Tensors as views of storages: what shares memory when written shares it when read.

Each storage is one run of bytes in a safetensors file, trimmed to what its tensors can reach, with a checksum in the
table; each tensor is one row: storage, offset, shape, strides, dtype and whether it is a parameter. Gradients and
attributes that were hung on a tensor are not kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.errors import EnvironmentUnfit, ReportUnreadable
from torchdelta.storage.values import Unwritable

_ALIGNMENT = 64
"""What a trimmed storage starts at a multiple of, so that every dtype's elements stay where they can be."""


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
    """One storage; None for the checksum of one on the meta device, which has no bytes."""

    device: str
    size: int
    checksum: int | None


class TensorWriter:
    """Collects tensors, each once."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the row that a tensor will have; Unwritable says why it can have none."""
        if id(tensor) not in self._index:
            refuse_special(tensor)
            self._index[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        return self._index[id(tensor)]

    def rows(self) -> tuple[list[TensorRow], list[StorageRow], dict[str, torch.Tensor]]:
        """Return the tables, and the bytes by the names that they have in the file."""
        shared: dict[Any, list[int]] = {}
        for index, tensor in enumerate(self._kept):
            shared.setdefault(tensors.storage_reference(tensor), []).append(index)
        rows: dict[int, TensorRow] = {}
        storages: list[StorageRow] = []
        data: dict[str, torch.Tensor] = {}
        for indices in shared.values():
            members = [self._kept[index] for index in indices]
            start, stop = _reach(members)
            content = None if members[0].is_meta else _bytes(members[0], start, stop)
            if content is not None:
                data[str(len(storages))] = content
            for index, tensor in zip(indices, members, strict=True):
                rows[index] = _row(tensor, len(storages), start)
            storages.append(
                StorageRow(
                    device=str(members[0].device),
                    size=stop - start,
                    checksum=None if content is None else zlib.crc32(content.numpy().data),
                )
            )
        return [rows[index] for index in range(len(rows))], storages, data


def read_tensors(
    rows: Sequence[TensorRow], storages: Sequence[StorageRow], data: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors of a table; ReportUnreadable says which of them its file does not hold."""
    memory = [_storage(index, row, data) for index, row in enumerate(storages)]
    return [_tensor(f"tensors[{index}]", row, memory) for index, row in enumerate(rows)]


def refuse_special(tensor: torch.Tensor) -> None:
    """Raise Unwritable of a tensor that is more than a view of a storage."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unwritable(f"a tensor is of class {type(tensor).__qualname__}, and only plain tensors can be kept")
    what = tensors.describe(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "not strided"
        raise Unwritable(f"a {what} is {kind}, and only ordinary strided tensors can be kept")
    if not tensor.is_leaf:
        raise Unwritable(f"a {what} was computed under autograd, and its history cannot be kept: detach it")
    if tensor.is_neg():
        raise Unwritable(f"a {what} is a negated view: call resolve_neg() on it")


def _reach(members: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the first and the last byte that any view of a storage can touch."""
    spans = [_span(tensor) for tensor in members if tensor.numel()]
    if not spans:
        return 0, 0
    return min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT, max(stop for _, stop in spans)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[start:stop].cpu().contiguous()


def _row(tensor: torch.Tensor, storage: int, start: int) -> TensorRow:
    # an empty view may lie anywhere, also outside of what is kept
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


def _storage(index: int, row: StorageRow, data: Mapping[str, torch.Tensor]) -> torch.UntypedStorage:
    where = f"storages[{index}]"
    try:
        device = torch.device(row.device)
        if device.type == "meta":
            return torch.empty(row.size, dtype=torch.uint8, device=device).untyped_storage()
    except RuntimeError as error:
        raise ReportUnreadable(f"{where}: no storage of {row.size} bytes on {row.device!r}: {error}") from error
    content = data.get(str(index))
    if content is None or content.dtype is not torch.uint8 or content.dim() != 1 or len(content) != row.size:
        raise ReportUnreadable(f"{where}: the file of tensors has not its {row.size} bytes")
    if zlib.crc32(content.numpy().data) != row.checksum:
        raise ReportUnreadable(f"{where}: its bytes are not those that were written")
    try:
        # a copy: what was read may lie in the mapped file, at any address
        return content.to(device, copy=True).untyped_storage()
    except (RuntimeError, AssertionError) as error:
        raise EnvironmentUnfit(f"{where}: it was on {row.device}, which this machine does not have: {error}") from error


def _tensor(where: str, row: TensorRow, memory: Sequence[torch.UntypedStorage]) -> torch.Tensor:
    try:
        if row.storage < 0 or row.offset < 0 or min((*row.shape, *row.stride), default=0) < 0:
            raise ValueError("a negative number")
        storage = memory[row.storage]
        dtype = getattr(torch, row.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {row.dtype!r}")
        blank = torch.empty(0, dtype=dtype, device=storage.device)
        if blank.itemsize * (row.offset + _extent(row)) > storage.nbytes():
            raise ValueError("it reaches beyond its storage")
        tensor = blank.set_(storage, row.offset, row.shape, row.stride)
        if row.is_conjugate:
            tensor = tensor.conj()
        if row.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=row.requires_grad)
        return tensor.requires_grad_(row.requires_grad)
    except (IndexError, RuntimeError, ValueError) as error:
        raise ReportUnreadable(f"{where}: {error}") from error


def _extent(row: TensorRow) -> int:
    if 0 in row.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(row.shape, row.stride, strict=True))
