"""Edits: changes that make a subject simpler, as plain data.

The idea: a reduction pass does not change a graph itself. It describes the change as an `Edit`, so that several edits
can be merged into one, tested together with a single query, and applied to any later version of the subject. Names
that a subject no longer has are ignored.

    smaller = Edit(cut=frozenset({"relu"}), sizes={64: 2}).apply(subject)

Start reading at `Edit`; `Edit.apply` rebuilds the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from torchdelta.minify.subject import Draw, Name, Subject, rebuild
from torchdelta.program.copies import copy_together


@dataclass(frozen=True, kw_only=True)
class Edit:
    """The changes to make to a subject. Names that the subject does not have are ignored."""

    cut: frozenset[str] = frozenset()
    """Nodes whose readers read a new input instead. The input has the value that the reference computes there."""
    replacements: Mapping[str, Any] = field(default_factory=dict)
    """For a node, the node to read in its place, as a `Name`, or a literal."""
    outputs: tuple[str, ...] | None = None
    """The new outputs; None leaves the outputs as they are."""
    removed_outputs: frozenset[str] = frozenset()
    """Outputs that are not returned any more."""
    dropped: frozenset[str] = frozenset()
    """Nodes that are not kept for their effect alone (a write, a random draw, an assertion)."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """New values for inputs, by name."""
    draws: Mapping[str, Draw] = field(default_factory=dict)
    """Inputs whose values are generated instead of the user's, by name."""
    is_detached: bool = False
    """Whether no input requires grad any more."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """For a size of an input, the smaller size that replaces it everywhere."""
    guess: bool | None = None
    """Whether the reducer will probably accept the edit; None if that cannot be predicted."""

    def merge(self, other: Edit) -> Edit:
        """Return one edit that does both: their sets and mappings joined. Where they contradict, `other` decides.

        Its `guess` is None.
        """
        return Edit(
            cut=self.cut | other.cut,
            replacements={**self.replacements, **other.replacements},
            outputs=other.outputs if other.outputs is not None else self.outputs,
            removed_outputs=self.removed_outputs | other.removed_outputs,
            dropped=self.dropped | other.dropped,
            inputs={**self.inputs, **other.inputs},
            draws={**self.draws, **other.draws},
            is_detached=self.is_detached or other.is_detached,
            sizes={**self.sizes, **other.sizes},
        )

    def apply(self, subject: Subject) -> Subject | None:
        """Return the changed subject as a new one, or None if no operation is left in it; `subject` is not changed.

        Nodes that neither an output nor an effect needs are removed. A node in `cut` whose value is a number becomes a
        literal, and one whose value is neither that nor a tensor is not cut. Inputs that are drawn, by the subject or
        by `draws`, are drawn anew in their new shape; one that only the subject draws is not if `inputs` has a value
        for it. `sizes` change inputs and integer arguments. The result has neither `origin` nor `with_names`. If nodes
        are cut, the subject is run eagerly for its `values`, and an error of that run passes through.
        """
        names = {node.name for node in subject.graph.graph.nodes}
        cut = {name: subject.values[name] for name in cuttable(subject, self.cut & names)}
        # a computed number becomes a literal: it needs no input
        literals = {name: value for name, value in cut.items() if not isinstance(value, torch.Tensor)}
        new_inputs = {name: self._detach(value) for name, value in cut.items() if isinstance(value, torch.Tensor)}
        # values are drawn again for the new shape, so that the result does not depend on the order of the edits
        draws = {**{name: draw for name, draw in subject.drawn.items() if name not in self.inputs}, **self.draws}
        inputs = {
            name: self._detach(self._change_input(name, value, draws.get(name)))
            for name, value in subject.named_inputs.items()
        }
        outputs = subject.outputs if self.outputs is None else tuple(name for name in self.outputs if name in names)
        result = rebuild(
            subject.graph,
            inputs,
            [name for name in outputs if name not in self.removed_outputs],
            cut=new_inputs,
            instead={
                **literals,
                # an earlier edit may have removed the node, or the one that would stand for it
                **{
                    name: value
                    for name, value in self.replacements.items()
                    if name in names and not (isinstance(value, Name) and value.name not in names)
                },
            },
            dropped=self.dropped,
        )
        if self.sizes:
            for node in result.nodes:
                _resize_arguments(node, self.sizes, input_sizes(subject))
            result.graph.recompile()
        remaining = result.named_inputs
        result = replace(result, drawn={name: draw for name, draw in draws.items() if name in remaining})
        return result if result.nodes else None

    def _change_input(self, name: str, value: Any, draw: Draw | None) -> Any:
        """Return the new value of an input: replaced by `inputs`, then narrowed by `sizes`, then drawn by `draw`.

        Without a `draw`, nothing is drawn.
        """
        resized = _narrow(self.inputs.get(name, value), self.sizes)
        return draw.like(resized) if draw is not None else resized

    def _detach(self, value: Any) -> Any:
        """Return the value without `requires_grad` if this edit detaches inputs, else unchanged."""
        has_gradient = isinstance(value, torch.Tensor) and value.requires_grad
        return value.detach() if self.is_detached and has_gradient else value


def merge_edits(edits: Iterable[Edit]) -> Edit:
    """Return one edit that does all of them; where two contradict each other, the later one decides."""
    return reduce(Edit.merge, edits, Edit())


def keep_only(subject: Subject, names: Sequence[str]) -> Edit:
    """Return the edit that keeps the named nodes and removes the others, effects included.

    A removed node that a kept one reads becomes an input with the reference's value, or a literal if that is a number;
    if its value is neither a tensor nor a number, the node stays. The graph then returns the tensors of kept nodes that
    it returned before or that other nodes read.
    """
    outside = frozenset(node.name for node in subject.nodes) - set(names)
    return Edit(cut=cuttable(subject, outside), outputs=region_outputs(subject, names), dropped=outside)


def region_outputs(subject: Subject, names: Collection[str]) -> tuple[str, ...]:
    """Return the names of a region's tensors that the graph returns or that a node outside reads, in the graph's order.

    `names` are the nodes of the region.
    """
    inside, outputs = set(names), set(subject.outputs)
    return tuple(
        node.name
        for node in subject.nodes
        if node.name in inside
        and isinstance(subject.values[node.name], torch.Tensor)
        and (node.name in outputs or any(user.name not in inside for user in node.users))
    )


def cuttable(subject: Subject, names: Iterable[str]) -> frozenset[str]:
    """Return those of the named nodes whose value can be an input instead: tensors and numbers, not collections."""
    return frozenset(name for name in names if isinstance(subject.values[name], (torch.Tensor, bool, int, float)))


def input_sizes(subject: Subject) -> set[int]:
    """Return every size above one that an axis of an input tensor has."""
    return {size for value in subject.inputs if isinstance(value, torch.Tensor) for size in value.shape if size > 1}


def _narrow(value: Any, sizes: Mapping[int, int]) -> Any:
    """Return a smaller copy of a tensor: the first elements along each axis whose size is a key of `sizes`.

    `sizes` maps old sizes to new ones. The copy is a leaf with the same `requires_grad`. A non-tensor and a tensor
    without such an axis are returned themselves.
    """
    if not isinstance(value, torch.Tensor) or not any(size in sizes for size in value.shape):
        return value
    narrow = value.detach()
    for axis, size in enumerate(value.shape):
        if size in sizes:
            narrow = narrow.narrow(axis, 0, sizes[size])
    # copied, because a view would keep the elements that were left out
    copied = narrow.contiguous().clone() if value.is_contiguous() else copy_together(narrow, name="an input")
    return copied.requires_grad_(value.requires_grad)


def _resize_arguments(node: Node, sizes: Mapping[int, int], all_sizes: set[int]) -> None:
    """Change a node's integer arguments in place that equal a changed size, or its product with one of `all_sizes`.

    They become the new size, or the product of the new sizes. `sizes` maps old sizes to new ones; `all_sizes` are those
    of all inputs before the change. Nested integers are changed too.
    """
    numbers = dict(sizes)
    for old, new in sizes.items():
        for other in all_sizes:
            numbers.setdefault(old * other, new * sizes.get(other, other))

    def change(value: Any) -> Any:
        return numbers[value] if type(value) is int and value in numbers else value

    node.args = map_aggregate(node.args, change)
    node.kwargs = map_aggregate(node.kwargs, change)
