"""Make a size smaller wherever it occurs: in inputs, and in what nodes are called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from torchdelta.execute.copies import copy_together
from torchdelta.minify.subject import Subject


def sizes_of(subject: Subject) -> set[int]:
    """Return every size above one that an input has."""
    return {size for value in subject.inputs if isinstance(value, torch.Tensor) for size in value.shape if size > 1}


def narrowed(value: Any, changes: Mapping[int, int]) -> Any:
    """Return the beginning of a tensor along each axis whose size changes."""
    if not isinstance(value, torch.Tensor) or not any(size in changes for size in value.shape):
        return value
    made = value.detach()
    for axis, size in enumerate(value.shape):
        if size in changes:
            made = made.narrow(axis, 0, changes[size])
    # memory of its own: what was left out is not to be kept
    dense = made.contiguous().clone() if value.is_contiguous() else copy_together(made, name="an input")
    return dense.requires_grad_(value.requires_grad)


def renumber(node: Node, changes: Mapping[int, int], sizes: set[int]) -> None:
    """Change the numbers of a call that follow from a size: itself, and its product with another."""
    numbers = dict(changes)
    for old, new in changes.items():
        for other in sizes:
            numbers.setdefault(old * other, new * changes.get(other, other))

    def change(value: Any) -> Any:
        return numbers[value] if type(value) is int and value in numbers else value

    node.args = map_aggregate(node.args, change)
    node.kwargs = map_aggregate(node.kwargs, change)
