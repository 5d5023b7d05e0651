"""Make a size smaller wherever it occurs: in inputs, and in what nodes are called with.

An edit: a change that makes a subject simpler, as data, so that several can be merged into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from torchdelta.minify.subject import Draw, Subject, rebuild
from torchdelta.program.copies import copy_together


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


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What to change; names that a subject does not have any more mean nothing to it."""

    cut: frozenset[str] = frozenset()
    """Nodes whose readers read an input instead, which has the value that the reference has there."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """For a node another one, as a `Name`, or a literal."""
    outputs: tuple[str, ...] | None = None
    """What is returned from now on; None leaves that as it is."""
    unreturned: frozenset[str] = frozenset()
    """What is not returned any more."""
    dropped: frozenset[str] = frozenset()
    """Nodes with an effect that go although something else stays."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Other values for inputs."""
    drawn: Mapping[str, Draw] = field(default_factory=dict)
    """Inputs whose numbers are not the user's any more."""
    is_detached: bool = False
    """Whether no input requires grad any more."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """For a size of inputs a smaller one."""
    guess: bool | None = None
    """Whether it will be taken; None where nobody would bet on that."""

    def merged_with(self, other: Edit) -> Edit:
        """Return both as one; where they contradict each other, the other's word counts."""
        return Edit(
            cut=self.cut | other.cut,
            instead={**self.instead, **other.instead},
            outputs=other.outputs if other.outputs is not None else self.outputs,
            unreturned=self.unreturned | other.unreturned,
            dropped=self.dropped | other.dropped,
            inputs={**self.inputs, **other.inputs},
            drawn={**self.drawn, **other.drawn},
            is_detached=self.is_detached or other.is_detached,
            sizes={**self.sizes, **other.sizes},
        )

    def applied_to(self, subject: Subject) -> Subject | None:
        """Return the changed subject; None where nothing is left of it."""
        names = {node.name for node in subject.graph.graph.nodes}
        cut = {name: subject.values[name] for name in self.cut & names if can_be_given(subject.values[name])}
        # a number that was computed is as good as one that is written
        literals = {name: value for name, value in cut.items() if not isinstance(value, torch.Tensor)}
        given = {name: self._detached(value) for name, value in cut.items() if isinstance(value, torch.Tensor)}
        before = subject.named_inputs
        # numbers that are drawn are drawn for each shape: where a subject comes from is not seen in them
        drawn = {**{name: draw for name, draw in subject.drawn.items() if name not in self.inputs}, **self.drawn}
        inputs = {name: self._detached(self._input(name, value, drawn.get(name))) for name, value in before.items()}
        instead = {name: value for name, value in self.instead.items() if name in names}
        outputs = subject.outputs if self.outputs is None else tuple(name for name in self.outputs if name in names)
        made = rebuild(
            subject.graph,
            inputs,
            [name for name in outputs if name not in self.unreturned],
            cut=given,
            instead={**literals, **instead},
            dropped=self.dropped,
        )
        if self.sizes:
            for node in made.nodes:
                renumber(node, self.sizes, sizes_of(subject))
            made.graph.recompile()
        there = made.named_inputs
        made = replace(made, drawn={name: draw for name, draw in drawn.items() if name in there})
        return made if made.nodes else None

    def _input(self, name: str, value: Any, draw: Draw | None) -> Any:
        resized = narrowed(self.inputs.get(name, value), self.sizes)
        return draw.like(resized) if draw is not None else resized

    def _detached(self, value: Any) -> Any:
        is_asked = isinstance(value, torch.Tensor) and value.requires_grad
        return value.detach() if self.is_detached and is_asked else value


def merged(edits: Iterable[Edit]) -> Edit:
    """Return several edits as one."""
    return reduce(Edit.merged_with, edits, Edit())


def can_be_given(value: Any) -> bool:
    """Tell whether a graph may be given this instead of computing it: a tensor or a number, and no collection."""
    return isinstance(value, (torch.Tensor, bool, int, float))


def kept_only(subject: Subject, names: Sequence[str]) -> Edit:
    """Return the edit that leaves a region, fed by what the reference has, and returns what was read outside of it."""
    inside, returned = set(names), set(subject.outputs)
    cut = {node.name for node in subject.nodes if node.name not in inside and can_be_given(subject.values[node.name])}
    effects = frozenset(node.name for node in subject.nodes if node.name not in inside)
    ends = [
        node.name
        for node in subject.nodes
        if node.name in inside and (node.name in returned or any(user.name not in inside for user in node.users))
    ]
    return Edit(
        cut=frozenset(cut),
        outputs=tuple(name for name in ends if isinstance(subject.values[name], torch.Tensor)),
        dropped=effects,
    )
