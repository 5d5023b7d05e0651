"""Faults in activations: one is taken for another, or a cheaper formula replaces the exact one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import Fault, aten, call_fault, is_call

GELU_CUBIC = 0.044715
"""The coefficient of the cubic term in the tanh approximation of gelu."""
_LEAKY = {aten.relu.default: aten.leaky_relu.default, aten.relu_.default: aten.leaky_relu_.default}


def tanh_by_fraction(x: torch.Tensor) -> torch.Tensor:
    """Return the Padé approximation of tanh, which has two correct digits."""
    return (x * (27 + x * x) / (27 + 9 * x * x)).clamp(-1, 1)


_CHEAPER: dict[object, Callable[..., torch.Tensor]] = {
    aten.silu.default: aten.gelu.default,
    aten.sigmoid.default: aten.hardsigmoid.default,
    aten.tanh.default: tanh_by_fraction,
}


def _swap_gelu(node: Node) -> None:
    """Change an exact gelu in the graph to the tanh approximation, and an approximated one to the exact one."""
    is_exact = arguments(node)["approximate"] == "none"
    set_argument(node, "approximate", "tanh" if is_exact else "none")


def _has_gelu_coefficient(node: Node) -> bool:
    """Tell whether the node multiplies by the constant `GELU_CUBIC`, as its second argument."""
    return is_call(node, aten.mul.Tensor) and isinstance(node.args[1], float) and node.args[1] == GELU_CUBIC


FAULTS = (
    Fault(
        name="gelu_approximation",
        summary="gelu by tanh where erf was asked for, or the other way round",
        needs="a gelu",
        is_eligible=lambda node: is_call(node, aten.gelu.default),
        plant=_swap_gelu,
    ),
    Fault(
        name="gelu_coefficient",
        summary=f"0.0447 for {GELU_CUBIC} in a gelu that is written out",
        needs=f"a multiplication by {GELU_CUBIC}",
        is_eligible=_has_gelu_coefficient,
        plant=lambda node: node.update_arg(1, 0.0447),
    ),
    call_fault("relu_leaky", "negative values are scaled by 0.01 and not cut off", "a relu", _LEAKY),
    call_fault(
        "activation_approximated",
        "gelu for silu, a piecewise linear sigmoid, or tanh as a fraction",
        "a silu, sigmoid or tanh",
        _CHEAPER,
    ),
)
