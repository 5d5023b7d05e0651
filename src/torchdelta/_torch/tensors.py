"""What a tensor is made of: its components, its memory and its names."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return `float32` for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def layout_name(tensor: torch.Tensor) -> str:
    """Return `strided`, `sparse_coo` and so on."""
    return str(tensor.layout).removeprefix("torch.")


def components(tensor: torch.Tensor) -> list[tuple[str, Any]] | None:
    """Return the dense parts of a tensor that has no single buffer of its own; None of an ordinary tensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return [*((f".{name}", getattr(tensor, name)) for name in names), (".context", context)]
    if tensor.layout is torch.sparse_coo:
        merged = tensor.detach().coalesce()
        return [(".indices()", merged.indices()), (".values()", merged.values()), (".shape", tuple(tensor.shape))]
    if tensor.layout in _COMPRESSED:
        parts = [(f".{name}()", getattr(tensor.detach(), name)()) for name in _COMPRESSED[tensor.layout]]
        return [*parts, (".values()", tensor.detach().values()), (".shape", tuple(tensor.shape))]
    if tensor.is_nested:
        return [(f"[{index}]", part) for index, part in enumerate(tensor.unbind())]
    if tensor.is_quantized:
        return [(".int_repr()", tensor.int_repr()), *_quantizer(tensor)]
    if tensor.is_mkldnn:
        return [(".to_dense()", tensor.to_dense())]
    return None


def _quantizer(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [(".q_scale()", tensor.q_scale()), (".q_zero_point()", tensor.q_zero_point())]
    return [
        (".q_per_channel_scales()", tensor.q_per_channel_scales()),
        (".q_per_channel_zero_points()", tensor.q_per_channel_zero_points()),
        (".q_per_channel_axis()", tensor.q_per_channel_axis()),
    ]


def has_own_buffer(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is a plain strided view of one storage, with values in it."""
    return (
        tensor.layout is torch.strided
        and components(tensor) is None
        and tensor.device.type != "meta"
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    )


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change in place."""
    return tensor._version


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return what two tensors have in common exactly when they share memory; None of one that has no memory."""
    if not has_own_buffer(tensor):
        return None
    pointer = tensor.untyped_storage().data_ptr()
    return pointer or None
