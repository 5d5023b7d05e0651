"""Faults in indexing: the right values in the wrong place, or an index that is off by one."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import (
    Fault,
    add_after,
    add_before,
    aten,
    is_call,
    is_floating,
    result_fault,
    tensor_of,
)

_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_REORDERS = (aten.transpose.int, aten.permute.default, aten.t.default)
_KEEPS_ORDER = (
    aten.reshape.default,
    aten.contiguous.default,
    aten.view.default,
    aten.clone.default,
    aten.flatten.using_ints,
)
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def slice_one_earlier(
    x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """Return a slice that begins and ends one element earlier; before the first element comes the last one."""
    sliced: torch.Tensor = aten.slice.Tensor(torch.roll(x, 1, dim), dim, start, end, step)
    return sliced


def with_stale_tail(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of two elements or more whose last element has the value of the one before."""
    flat = x.reshape(-1)
    return torch.cat((flat[:-1], flat[-2:-1])).reshape(x.shape)


def _is_part_of_tensor(node: Node) -> bool:
    """Tell whether the node takes a proper part of a floating-point tensor, by a slice or one index of a dimension."""
    if not (is_call(node, aten.slice.Tensor, aten.select.int) and is_floating(node)):
        return False
    whole, part, dim = tensor_of(node.args[0]), tensor_of(node), int(arguments(node)["dim"])
    assert whole is not None
    assert part is not None
    return whole.shape[dim] > 1 if is_call(node, aten.select.int) else whole.shape[dim] != part.shape[dim]


def _shift_part(node: Node) -> None:
    """Change a slice in the graph to `slice_one_earlier`, or an index to the next one; the last to the one before."""
    if is_call(node, aten.slice.Tensor):
        node.target = slice_one_earlier
        return
    values, whole = arguments(node), tensor_of(node.args[0])
    assert whole is not None
    size = whole.shape[values["dim"]]
    index = values["index"] % size
    set_argument(node, "index", index + 1 if index + 1 < size else index - 1)


def _reorders_before_reshape(node: Node) -> bool:
    """Tell whether the node is a transpose, permute or t of floats that changes the shape, and its order is relied on.

    That is so if a reader is a reshape, view, flatten, contiguous or clone.
    """
    if not (is_call(node, *_REORDERS) and is_floating(node)):
        return False
    before, after = tensor_of(node.args[0]), tensor_of(node)
    assert before is not None
    assert after is not None
    return before.shape != after.shape and any(is_call(reader, *_KEEPS_ORDER) for reader in node.users)


def _reshape_instead(node: Node) -> None:
    """Replace a transpose, permute or t in the graph by a reshape of its operand to the same shape."""
    after = tensor_of(node)
    assert after is not None
    node.target = aten.reshape.default
    node.args = (node.args[0], list(after.shape))


def _is_integer_count(node: Node) -> bool:
    """Tell whether the node computes integers, in two dimensions at most, by arange, cumsum or floor division."""
    tensor = tensor_of(node)
    is_counting = is_call(node, *_ARANGES, aten.floor_divide.default, aten.cumsum.default)
    return is_counting and tensor is not None and not tensor.is_floating_point() and tensor.dim() <= 2


def _miscount(node: Node) -> None:
    """Change the graph: add 1 to the dividend of a floor division; subtract 1 from other counts, but not below 0."""
    if is_call(node, aten.floor_divide.default):
        add_before(node, 0, aten.add.Tensor, 1)
    else:
        # the count may be an index, so it must not become negative
        add_after(node, (aten.sub.Tensor, 1), (aten.clamp_min.default, 0))


def _mistake_padding(node: Node) -> None:
    """Remove the padding index of an embedding; if it has none, set it to 3, or to the last row of a smaller table."""
    table = tensor_of(node.args[0])
    assert table is not None
    has_padding = arguments(node)["padding_idx"] >= 0
    set_argument(node, "padding_idx", -1 if has_padding else min(3, table.shape[0] - 1))


def _is_padded(node: Node) -> bool:
    """Tell whether the node is a convolution with a padding above 0 in any dimension."""
    return is_call(node, *_CONVOLUTIONS) and any(size > 0 for size in arguments(node)["padding"])


def _pad_at_the_end(node: Node) -> None:
    """Move all padding of a convolution behind the values: a new node pads its input, and the convolution does not."""
    sizes = arguments(node)["padding"]
    # constant_pad_nd counts the dimensions from the last
    add_before(node, 0, aten.constant_pad_nd.default, [pad for size in reversed(sizes) for pad in (0, 2 * size)])
    set_argument(node, "padding", [0] * len(sizes))


FAULTS = (
    Fault(
        name="slice_off_by_one",
        summary="a slice or an index is one off",
        needs="a slice or an index into a floating-point tensor",
        is_eligible=_is_part_of_tensor,
        plant=_shift_part,
    ),
    Fault(
        name="view_order",
        summary="a transposed tensor is reshaped as if it had not been transposed",
        needs="a transpose or permute that a reshape, view or copy follows",
        is_eligible=_reorders_before_reshape,
        plant=_reshape_instead,
    ),
    result_fault("tail_element", "the last element of a result has the value of the one before", (with_stale_tail,)),
    Fault(
        name="integer_off_by_one",
        summary="positions are one too small, or a floor division rounds too late",
        needs="an arange, floor division or cumsum of integers",
        is_eligible=_is_integer_count,
        plant=_miscount,
    ),
    Fault(
        name="embedding_padding",
        summary="the padding index of an embedding is ignored, or one is made up: its gradient is wrong",
        needs="an embedding",
        is_eligible=lambda node: is_call(node, aten.embedding.default),
        plant=_mistake_padding,
    ),
    Fault(
        name="top_k_smallest",
        summary="the smallest in place of the largest, or the other way round",
        needs="a top-k",
        is_eligible=lambda node: is_call(node, aten.topk.default),
        plant=lambda node: set_argument(node, "largest", not arguments(node)["largest"]),
    ),
    Fault(
        name="padding_asymmetric",
        summary="a convolution's padding is all behind the values",
        needs="a convolution with padding",
        is_eligible=_is_padded,
        plant=_pad_at_the_end,
    ),
)
