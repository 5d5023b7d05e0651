"""Faults in attention: its scale, its mask, its softmax and the order of its heads."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import Fault, add_before, aten, is_call, is_floating, tensor_of

_SDPA = aten.scaled_dot_product_attention.default
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
_TRIANGLES = (aten.tril.default, aten.triu.default)


def attention_one_ahead(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,  # noqa: ARG001 — causal attention takes none
    dropout_p: float = 0.0,
    is_causal: bool = True,  # noqa: ARG001 — that is the fault
    **options: Any,
) -> torch.Tensor:
    """Return causal attention in which every query sees one key too many: the first after its own place.

    `attn_mask` and `is_causal` are ignored.
    """
    size = query.shape[-2], key.shape[-2]
    mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(1)
    return functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)


def _is_scaled(node: Node) -> bool:
    """Tell whether the node is a scaled dot product attention, or scales a matmul or bmm by a float other than 1."""
    if is_call(node, _SDPA):
        return True
    if not is_call(node, *_SCALINGS):
        return False
    scores, scale = node.args
    return is_call(scores, aten.matmul.default, aten.bmm.default) and isinstance(scale, float) and scale != 1.0


def _drop_scale(node: Node) -> None:
    """Set the scale of an attention, or the constant that scales a matmul, to 1."""
    if is_call(node, _SDPA):
        set_argument(node, "scale", 1.0)
    else:
        node.update_arg(1, 1.0)


def _is_causal(node: Node) -> bool:
    """Tell whether the node is an attention with `is_causal`, or may compute a causal mask.

    A result of tril, triu or `<=` is taken for a mask if it has two dimensions or more; `<=` must not compare floats.
    """
    if is_call(node, _SDPA):
        return bool(arguments(node)["is_causal"])
    mask = tensor_of(node)
    if mask is None or mask.dim() < 2:
        return False
    # a mask may come from a comparison of positions, which are integers
    return is_call(node, *_TRIANGLES) or (is_call(node, aten.le.Tensor) and not any(map(is_floating, node.args)))


def _look_ahead(node: Node) -> None:
    """Change a causal attention or mask in the graph, so that a query sees the next key too.

    An attention calls `attention_one_ahead`, the diagonal of a tril or triu is increased by 1, and 1 is added to the
    second operand of `<=`.
    """
    if is_call(node, _SDPA):
        node.target = attention_one_ahead
    elif is_call(node, *_TRIANGLES):
        set_argument(node, "diagonal", arguments(node)["diagonal"] + 1)
    else:
        add_before(node, 1, aten.add.Tensor, 1)


def _has_another_dimension(node: Node) -> bool:
    """Tell whether the node is a softmax of a tensor with two dimensions or more."""
    tensor = tensor_of(node)
    return is_call(node, aten.softmax.int) and tensor is not None and tensor.dim() >= 2


def _mistake_dimension(node: Node) -> None:
    """Let a softmax run over the last dimension but one; if it does so already, over the last."""
    tensor = tensor_of(node)
    assert tensor is not None
    is_last_but_one = arguments(node)["dim"] % tensor.dim() == tensor.dim() - 2
    set_argument(node, "dim", -1 if is_last_but_one else -2)


def _repeats_heads(node: Node) -> bool:
    """Tell whether the node seems to repeat key and value heads: a reshape of an expand to five dimensions.

    The sizes of the second and the third dimension have to be above 1.
    """
    if not (is_call(node, aten.reshape.default) and is_call(node.args[0], aten.expand.default)):
        return False
    heads = tensor_of(node.args[0])
    return heads is not None and heads.dim() == 5 and heads.shape[1] > 1 and heads.shape[2] > 1


FAULTS = (
    Fault(
        name="attention_scale_dropped",
        summary="the scores are not scaled",
        needs="an attention, or a matmul that is multiplied or divided by a constant",
        is_eligible=_is_scaled,
        plant=_drop_scale,
    ),
    Fault(
        name="causal_mask_off_by_one",
        summary="every query sees one key of its future",
        needs="a causal attention, tril, triu, or integers compared by <= into a mask",
        is_eligible=_is_causal,
        plant=_look_ahead,
    ),
    Fault(
        name="softmax_dimension",
        summary="softmax over the last dimension but one, or over the last where it was that one",
        needs="a softmax of two dimensions or more",
        is_eligible=_has_another_dimension,
        plant=_mistake_dimension,
    ),
    Fault(
        name="head_order",
        summary="repeated key and value heads are tiled and not interleaved",
        needs="a grouped attention that repeats its heads by expand and reshape",
        is_eligible=_repeats_heads,
        plant=lambda node: add_before(node, 0, aten.transpose.int, 1, 2),
    ),
)
