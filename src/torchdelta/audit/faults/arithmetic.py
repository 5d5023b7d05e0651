"""Faults in arithmetic: an operation or an operand is wrong, or a result is off by a factor."""

from __future__ import annotations

from torch.fx import Node

from torchdelta._torch.graphs.nodes import arguments, set_argument
from torchdelta.audit.faults.base import (
    Fault,
    add_after,
    add_before,
    aten,
    is_call,
    is_floating,
    is_sum_of_two,
    replace_call,
    result_fault,
    tensor_of,
)

_DIFFERENCE = {aten.add.Tensor: aten.sub.Tensor, aten.add_.Tensor: aten.sub_.Tensor}
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_WEIGHT: dict[object, int] = {aten.linear.default: 1, aten.addmm.default: 2}
"""The position of the weight among the arguments, which may be transposed by mistake."""
_BIASED = (aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_MEANS = (aten.mean.default, aten.mean.dim)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


def _drop_residual(node: Node) -> None:
    """Replace a sum in the graph by a copy of the operand that was computed last."""
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    # the residual is the operand that was computed first, in whatever order the sum is written
    branch = max(node.all_input_nodes, key=order.__getitem__)
    _replace_by_operand(node, branch)


def _drop_negation(node: Node) -> None:
    """Replace a negation in the graph by a copy of its operand."""
    _replace_by_operand(node, node.all_input_nodes[0])


def _replace_by_operand(node: Node, operand: Node) -> None:
    """Change a node in the graph so that it returns a copy of one of its operands."""
    node.target = aten.clone.default
    node.args = (operand,)


def _has_bias(node: Node) -> bool:
    """Tell whether the node is a linear or convolution with a bias, or an addmm whose beta is not 0."""
    if is_call(node, aten.addmm.default):
        return bool(arguments(node)["beta"])
    return is_call(node, *_BIASED) and arguments(node)["bias"] is not None


def _drop_bias(node: Node) -> None:
    """Remove the bias of a node: an addmm gets `beta=0`, a linear or convolution `bias=None`."""
    if is_call(node, aten.addmm.default):
        set_argument(node, "beta", 0)
    else:
        set_argument(node, "bias", None)


def _is_swappable(node: Node) -> bool:
    """Tell whether the node is a linear or addmm with a square weight, or a matmul or bmm of square matrices.

    The two operands of a matmul or bmm have to be of one shape.
    """
    if is_call(node, *_WEIGHT):
        weight = tensor_of(node.args[_WEIGHT[node.target]])
        return weight is not None and weight.dim() == 2 and weight.shape[0] == weight.shape[1]
    if not is_call(node, *_PRODUCTS):
        return False
    first, second = map(tensor_of, node.args)
    if first is None or second is None or first.dim() < 2:
        return False
    return first.shape == second.shape and first.shape[-1] == first.shape[-2]


def _swap_operands(node: Node) -> None:
    """Change the graph: transpose the weight of a linear or addmm, or swap the two operands of a matmul or bmm."""
    if is_call(node, *_WEIGHT):
        add_before(node, _WEIGHT[node.target], aten.t.default)
    else:
        first, second = node.args
        node.args = (second, first)


def _elements_per_mean(node: Node) -> int:
    """Return how many elements each mean is computed from, or 0 if that is not known."""
    elements, means = tensor_of(node.args[0]), tensor_of(node)
    return elements.numel() // means.numel() if elements is not None and means is not None and means.numel() else 0


def _divide_by_one_less(node: Node) -> None:
    """Add a node after a mean of n elements that multiplies it by n / (n - 1)."""
    number = _elements_per_mean(node)
    add_after(node, (aten.mul.Tensor, number / (number - 1)))


def _is_clamped(node: Node) -> bool:
    """Tell whether the node is a clamp, clamp_min or clamp_max by numbers, of a floating-point tensor."""
    return is_call(node, *_CLAMPS) and is_floating(node)


def _move_bounds(node: Node) -> None:
    """Change all bounds of a clamp in the graph by `_moved_bound`."""
    node.args = (node.args[0], *(_moved_bound(bound) for bound in node.args[1:]))


def _moved_bound(bound: object) -> float | None:
    """Return a bound that is a tenth nearer to zero, 0.02 for zero, or None if the bound is not a number."""
    return (0.9 * bound or 0.02) if isinstance(bound, (int, float)) else None


FAULTS = (
    Fault(
        name="add_to_subtract",
        summary="a difference in place of a sum",
        needs="an addition of two tensors of one shape",
        is_eligible=is_sum_of_two,
        plant=replace_call(_DIFFERENCE),
    ),
    Fault(
        name="residual_dropped",
        summary="of two added tensors only the one computed last is kept",
        needs="an addition of two tensors of one shape",
        is_eligible=is_sum_of_two,
        plant=_drop_residual,
    ),
    Fault(
        name="bias_dropped",
        summary="a linear, addmm or convolution without its bias",
        needs="a linear or convolution with a bias, or an addmm",
        is_eligible=_has_bias,
        plant=_drop_bias,
    ),
    Fault(
        name="matmul_operands_swapped",
        summary="the operands of a square matmul are swapped, or a square weight is transposed",
        needs="a linear or addmm with a square weight, or a matmul of two square matrices",
        is_eligible=_is_swappable,
        plant=_swap_operands,
    ),
    Fault(
        name="negation_dropped",
        summary="a sign is lost",
        needs="a negation",
        is_eligible=lambda node: is_call(node, aten.neg.default) and is_floating(node),
        plant=_drop_negation,
    ),
    Fault(
        name="mean_over_n_minus_1",
        summary="a mean is divided by n - 1",
        needs="a mean of two elements or more",
        is_eligible=lambda node: is_call(node, *_MEANS) and _elements_per_mean(node) > 1,
        plant=_divide_by_one_less,
    ),
    Fault(
        name="clamp_bound",
        summary="bounds are a tenth nearer to zero, and 0.02 in place of zero",
        needs="a clamp of a floating-point tensor",
        is_eligible=_is_clamped,
        plant=_move_bounds,
    ),
    result_fault("scale_by_1_001", "a result is too large by a thousandth", (aten.mul.Tensor, 1.001)),
    result_fault("scale_by_1_00001", "a result is too large by a hundred-thousandth", (aten.mul.Tensor, 1 + 1e-5)),
)
