"""Normalisation: its epsilon and its variance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import Fault
from torchdelta.audit.faults.nodes import aten, call_instead, is_call, is_floating

_LARGEST_EPSILON = 1e-4
_NORMS = (
    aten.batch_norm.default,
    aten.group_norm.default,
    aten.instance_norm.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
)


def layer_norm_of_sample(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 — the operator has it
) -> torch.Tensor:
    """Return the layer norm with the variance of a sample, which divides by n - 1."""
    centred, variance = _moments(x, normalized_shape, correction=1)
    return _affine(centred * torch.rsqrt(variance + eps), weight, bias).to(x.dtype)


def layer_norm_with_added_epsilon(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001 — the operator has it
) -> torch.Tensor:
    """Return the layer norm with epsilon added to the standard deviation and not to the variance."""
    centred, variance = _moments(x, normalized_shape, correction=0)
    return _affine(centred / (torch.sqrt(variance) + eps), weight, bias).to(x.dtype)


def _moments(x: torch.Tensor, shape: Sequence[int], *, correction: int) -> tuple[torch.Tensor, torch.Tensor]:
    # the operator computes half precision in float32: doing less would be another fault
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = tuple(range(-len(shape), 0))
    return wide - wide.mean(dims, keepdim=True), wide.var(dims, correction=correction, keepdim=True)


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _epsilon(node: Node) -> float | None:
    """Return the epsilon that a norm, or an addition that looks like a part of one, has."""
    if is_call(node, *_NORMS):
        epsilon = arguments(node)["eps"]
    elif is_call(node, aten.add.Tensor) and is_floating(node):
        epsilon = node.args[1]
    else:
        return None
    return epsilon if isinstance(epsilon, float) and 0 < epsilon <= _LARGEST_EPSILON else None


def _with_epsilon(change: Callable[[float], float]) -> Callable[[Node], None]:
    def plant(node: Node) -> None:
        epsilon = _epsilon(node)
        assert epsilon is not None
        set_argument(node, "eps" if is_call(node, *_NORMS) else "other", change(epsilon))

    return plant


def _is_layer_norm(node: Node) -> bool:
    return is_call(node, aten.layer_norm.default)


_NEEDS_EPSILON = f"a norm, or the addition of an epsilon of at most {_LARGEST_EPSILON}"

FAULTS = (
    Fault(
        name="epsilon_divided_by_10",
        summary="a tenth of the epsilon",
        needs=_NEEDS_EPSILON,
        is_eligible=lambda node: _epsilon(node) is not None,
        plant=_with_epsilon(lambda epsilon: epsilon / 10),
    ),
    Fault(
        name="epsilon_1e_3",
        summary="an epsilon of 0.001",
        needs=_NEEDS_EPSILON,
        is_eligible=lambda node: _epsilon(node) is not None,
        plant=_with_epsilon(lambda _: 1e-3),
    ),
    Fault(
        name="layer_norm_unbiased_variance",
        summary="a layer norm whose variance is divided by n - 1",
        needs="a layer norm",
        is_eligible=_is_layer_norm,
        plant=call_instead({aten.layer_norm.default: layer_norm_of_sample}),
    ),
    Fault(
        name="layer_norm_epsilon_outside_root",
        summary="a layer norm that adds epsilon to the standard deviation",
        needs="a layer norm",
        is_eligible=_is_layer_norm,
        plant=call_instead({aten.layer_norm.default: layer_norm_with_added_epsilon}),
    ),
)
