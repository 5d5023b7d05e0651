"""Faults in normalisation: its epsilon and its variance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import Fault, aten, is_call, is_floating

_LARGEST_EPSILON = 1e-4
"""A larger constant in an addition is not taken for an epsilon."""
_NORMS = (
    aten.batch_norm.default,
    aten.group_norm.default,
    aten.instance_norm.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
)


def layer_norm_variant(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 — the operator has it
    *,
    correction: int = 0,
    adds_to_deviation: bool = False,
) -> torch.Tensor:
    """Return a layer norm, in the dtype of `x`, whose variance divides by n - `correction`.

    `eps` is added to the variance, or to the standard deviation if `adds_to_deviation`. Half precision is computed in
    float32, as the operator does. `cudnn_enable` is ignored.
    """
    # the operator computes half precision in float32: doing less would be another fault
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = tuple(range(-len(normalized_shape), 0))
    centred, variance = wide - wide.mean(dims, keepdim=True), wide.var(dims, correction=correction, keepdim=True)
    normalized = centred / (torch.sqrt(variance) + eps) if adds_to_deviation else centred * torch.rsqrt(variance + eps)
    scaled = normalized if weight is None else normalized * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def _epsilon(node: Node) -> float | None:
    """Return the epsilon of a norm, or a small constant that an addition of floats adds; None if there is none.

    Only floats above 0 and at most `_LARGEST_EPSILON` count; in an addition, only the second argument.
    """
    if is_call(node, *_NORMS):
        epsilon = arguments(node)["eps"]
    elif is_call(node, aten.add.Tensor) and is_floating(node):
        epsilon = node.args[1]
    else:
        return None
    return epsilon if isinstance(epsilon, float) and 0 < epsilon <= _LARGEST_EPSILON else None


def _change_epsilon(change: Callable[[float], float]) -> Callable[[Node], None]:
    """Return a function for `Fault.plant`, which replaces the `_epsilon` of a node by `change(epsilon)`."""

    def plant(node: Node) -> None:
        epsilon = _epsilon(node)
        assert epsilon is not None
        set_argument(node, "eps" if is_call(node, *_NORMS) else "other", change(epsilon))

    return plant


def _layer_norm_fault(name: str, summary: str, **options: Any) -> Fault:
    """Return a fault that lets a layer norm call `layer_norm_variant`, with `options` as further keyword arguments."""

    def plant(node: Node) -> None:
        node.target = layer_norm_variant
        node.kwargs = {**node.kwargs, **options}

    return Fault(
        name=name,
        summary=summary,
        needs="a layer norm",
        is_eligible=lambda node: is_call(node, aten.layer_norm.default),
        plant=plant,
    )


def _epsilon_fault(name: str, summary: str, change: Callable[[float], float]) -> Fault:
    """Return a fault that replaces the epsilon of a norm, or a small constant in an addition, by `change(epsilon)`.

    The eligible nodes are those for which `_epsilon` returns a number.
    """
    return Fault(
        name=name,
        summary=summary,
        needs=f"a norm, or the addition of an epsilon of at most {_LARGEST_EPSILON}",
        is_eligible=lambda node: _epsilon(node) is not None,
        plant=_change_epsilon(change),
    )


FAULTS = (
    _epsilon_fault("epsilon_divided_by_10", "a tenth of the epsilon", lambda epsilon: epsilon / 10),
    _epsilon_fault("epsilon_1e_3", "an epsilon of 0.001", lambda _: 1e-3),
    _layer_norm_fault("layer_norm_unbiased_variance", "a layer norm whose variance is divided by n - 1", correction=1),
    _layer_norm_fault(
        "layer_norm_epsilon_outside_root",
        "a layer norm that adds epsilon to the standard deviation",
        adds_to_deviation=True,
    ),
)
