"""Facts about one tensor: its components, its memory, its version and its names.

Torch has several kinds of tensors whose elements do not lie in one buffer (sparse, nested, quantized, wrapper
subclasses, lazy, fake). This module is the one place that knows them. `components` takes such a tensor apart into
ordinary ones:

    components(torch.eye(2).to_sparse())  ->  [(".indices()", tensor(…)), (".values()", tensor(…))]
    components(torch.eye(2))              ->  None, because it is an ordinary tensor

Start reading at `components`; `storage_key` and `view_key` tell which tensors share memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_RAW_NAMES = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2")
_NARROW_NAMES = (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
_RAW = frozenset(getattr(torch, name) for name in (*_RAW_NAMES, *_NARROW_NAMES))
"""Storage without arithmetic: torch cannot even read an element of these dtypes."""
_READ_BY_NUMPY = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)
_SPECIAL = _RAW | {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

Component = tuple[str, Any]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def class_of(tensor: torch.Tensor) -> type:
    """Return the tensor's class; that of a parameter is `Tensor`, because values computed from it are plain tensors."""
    return torch.Tensor if type(tensor) in _PLAIN else type(tensor)


def describe(tensor: torch.Tensor) -> str:
    """Return layout, class and shape of a tensor in words, without its dtype: `sparse_coo tensor of shape (2, 2)`.

    A strided layout is left out, and so is the shape of a nested tensor. A parameter is called a tensor.
    """
    layout = "" if tensor.layout is torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    name = "tensor" if class_of(tensor) is torch.Tensor else class_of(tensor).__qualname__
    # a nested tensor has no shape, or one with a symbol that no other tensor has
    shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
    return f"{layout}{name}{shape}"


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the same memory, because operators of a subclass may do anything.

    A plain tensor or parameter is returned itself.
    """
    if type(tensor) in _PLAIN:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def element(tensor: torch.Tensor, index: tuple[int, ...]) -> bool | int | float | complex:
    """Return the element of an ordinary tensor at an index, one number per dimension, as a number of Python's own."""
    if tensor.dtype in _READ_BY_NUMPY and tensor.is_cpu and not tensor.is_neg():
        # numpy takes a third of the time that torch does
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return array.item(index)  # type: ignore[no-any-return]
    return tensor[index].item()


def components(tensor: torch.Tensor) -> list[Component] | None:
    """Return (name, value) pairs of a tensor whose elements cannot be read from one buffer; None for an ordinary one.

    Such a tensor is nested, sparse, quantized, of a dtype without arithmetic, or of a subclass that wraps others or has
    no memory. A name is the expression behind the tensor, such as `.indices()`; a value is a tensor or a fact such as a
    scale or a dtype. Raise ValueError if the tensor is an uninitialized parameter or buffer.
    """
    is_plain = type(tensor) in _PLAIN
    if is_plain and tensor.layout is torch.strided and tensor.dtype not in _SPECIAL and not tensor.is_nested:
        return None
    if is_lazy(tensor):
        raise ValueError("it is not initialized, so it has neither shape nor values")
    if tensor.is_nested:
        return [(f"[{index}]", part) for index, part in enumerate(tensor.unbind())]
    if not is_plain and is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return [*((f".{name}", getattr(tensor, name)) for name in names), (".context", context), *_outer_facts(tensor)]
    if tensor.layout is not torch.strided:
        return _components_by_layout(tensor)
    if tensor.is_quantized:
        return [(".int_repr()", tensor.int_repr()), *_quantizer_parameters(tensor)]
    if tensor.dtype in _RAW:
        bits = torch.uint8 if tensor.itemsize == 1 else torch.uint16
        return [(f".view({dtype_name(bits)})", tensor.view(bits)), (".dtype", tensor.dtype)]
    if not is_plain and not _is_fake(tensor) and not _has_memory(tensor):
        return [*((f".{name}", item) for name, item in vars(tensor).items()), *_outer_facts(tensor)]
    return None


def attributes(tensor: torch.Tensor) -> list[Component]:
    """Return (name, value) pairs of the attributes of an instance of a subclass; a name begins with a dot.

    The list is empty for a plain tensor, a parameter and a fake tensor.
    """
    if type(tensor) in _PLAIN or _is_fake(tensor):
        return []
    return [(f".{name}", item) for name, item in vars(tensor).items()]


def has_values(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has values: on the meta device and in a fake tensor there are none."""
    return not tensor.is_meta and not _is_fake(tensor)


def has_own_buffer(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has values and is ordinary: strided, initialized, and all elements in one storage.

    False for a tensor that `components` takes apart, and for a meta or fake tensor.
    """
    return tensor.layout is torch.strided and has_values(tensor) and not is_lazy(tensor) and components(tensor) is None


def has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have the same dtype, shape, device and bits; False if one has no buffer of its own.

    A NaN equals one of the same bits, and 0.0 does not equal -0.0.
    """
    if (first.dtype, first.shape, first.device) != (second.dtype, second.shape, second.device):
        return False
    if not (has_own_buffer(first) and has_own_buffer(second)):
        return False
    one, other = bytes_of(first), bytes_of(second)
    # torch compares eight bytes as fast as one
    if all(each.numel() % 8 == 0 and each.storage_offset() % 8 == 0 for each in (one, other)):
        one, other = one.view(torch.int64), other.view(torch.int64)
    return bool(torch.equal(one, other))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor with a buffer of its own as flat bytes."""
    dense = resolve(tensor.detach()).contiguous()
    # not a reshape, which keeps any stride of a single element
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change in place; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of for autograd (`_base`); None if it is not such a view."""
    return tensor._base


def hooks_of(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the gradient hooks of a leaf tensor: those on the gradient, and those after its accumulation.

    The list is empty for a tensor that was computed.
    """
    if not tensor.is_leaf:
        return []
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def copy_hooks(tensor: torch.Tensor, duplicate: torch.Tensor, copied: Callable[[Any], Any]) -> None:
    """Register a copy of each gradient hook of a leaf tensor on its duplicate; `copied` returns the copy of a hook.

    These are the hooks on the gradient and those after its accumulation. They are kept if the tensor was frozen since.
    """
    if not hooks_of(tensor):
        return
    requires_grad = duplicate.requires_grad
    duplicate.requires_grad_(True)  # torch registers hooks on no other tensor
    for hook in (tensor._backward_hooks or {}).values():
        duplicate.register_hook(copied(hook))  # type: ignore[no-untyped-call]
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        duplicate.register_post_accumulate_grad_hook(copied(hook))  # type: ignore[no-untyped-call]
    duplicate.requires_grad_(requires_grad)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that two living tensors have in common exactly if they share a storage, or None if there is none.

    There is none for a tensor without a buffer of its own, such as a sparse or fake one, or without memory.
    """
    if not has_own_buffer(tensor):
        return None
    pointer = tensor.untyped_storage().data_ptr()
    return pointer or None


def _components_by_layout(tensor: torch.Tensor) -> list[Component]:
    """Return (name, tensor) pairs: indices and values of a sparse tensor, or a dense copy if it is of any other layout.

    A COO tensor is coalesced first.
    """
    if tensor.layout is torch.sparse_coo:
        merged = tensor.coalesce()
        return [(".indices()", merged.indices()), (".values()", merged.values())]
    if tensor.layout in _COMPRESSED:
        parts = [(f".{name}()", getattr(tensor, name)()) for name in _COMPRESSED[tensor.layout]]
        return [*parts, (".values()", tensor.values())]
    return [(".to_dense()", tensor.to_dense())]


def _quantizer_parameters(tensor: torch.Tensor) -> list[Component]:
    """Return (name, value) pairs of a quantized tensor: its scale and zero point.

    If it is quantized by channel, return the scales and zero points of all channels, and the axis.
    """
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [(".q_scale()", tensor.q_scale()), (".q_zero_point()", tensor.q_zero_point())]
    return [
        (".q_per_channel_scales()", tensor.q_per_channel_scales()),
        (".q_per_channel_zero_points()", tensor.q_per_channel_zero_points()),
        (".q_per_channel_axis()", tensor.q_per_channel_axis()),
    ]


def _outer_facts(tensor: torch.Tensor) -> list[Component]:
    """Return (name, value) pairs of a wrapper's dtype, device and `requires_grad`: its parts may have others."""
    return [(".dtype", tensor.dtype), (".device", tensor.device), (".requires_grad", tensor.requires_grad)]


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether torch gives the address of a tensor's storage, which may be 0; False if it raises RuntimeError."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


ViewKey = tuple[StorageWeakRef, int, tuple[int, ...], tuple[int, ...]]


def view_key(tensor: torch.Tensor) -> ViewKey:
    """Return a key of the elements of a tensor: views with the same storage, offset, shape and strides have equal keys.

    The weak reference in it does not keep the memory alive, but no later storage can be mistaken for this one.
    """
    return storage_reference(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def storage_reference(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the storage of a tensor; the references of two views of one storage are equal."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its values in memory: torch may keep a conjugate or a negative as a bit of the view.

    A tensor with neither bit is returned itself, any other as a copy.
    """
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
