"""Skip an operation: who reads it reads one of its operands."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchdelta.minify.edit import Edit
from torchdelta.minify.search import Proposals, Search, merging
from torchdelta.minify.subject import Name, Subject


def propose(search: Search) -> Proposals:
    """Propose for each node its operands of the same shape and dtype."""
    subject = search.subject
    choices = {node.name: _alike(subject, node) for node in reversed(subject.nodes)}
    yield from merging([_skip(name, alike[0]) for name, alike in choices.items() if alike])
    for name, alike in choices.items():
        for operand in alike[1:]:
            yield _skip(name, operand)


def _skip(name: str, operand: str) -> Edit:
    return Edit(instead={name: Name(operand)}, dropped=frozenset({name}))


def _alike(subject: Subject, node: Node) -> list[str]:
    made = subject.values[node.name]
    if not isinstance(made, torch.Tensor):
        return []
    read = {source.name: subject.values[source.name] for source in node.all_input_nodes}
    return [
        name
        for name, value in read.items()
        if isinstance(value, torch.Tensor) and value.shape == made.shape and value.dtype == made.dtype
    ]
