"""Return less.

Give what was computed: a node becomes an input with the value that the reference has there.

Leave out what writes, draws or asserts, and is read by nobody.

Skip an operation: who reads it reads one of its operands.

Ask for fewer gradients.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import has_effect
from torchdelta.minify.edits import Edit, can_be_given
from torchdelta.minify.search import Proposals, Search, guilty_outputs, merging
from torchdelta.minify.subject import Name, Subject


def drop_outputs(search: Search) -> Proposals:
    """Propose to return only what differs, then to leave outputs out."""
    returned = search.subject.outputs
    told = guilty_outputs(search.subject, search.answer, search.wanted)
    if told and len(returned) > 1 and (yield Edit(outputs=tuple(told[:1]))):
        return
    # something inside may be enough to return: what only its readers did then goes
    yield from merging([Edit(unreturned=frozenset({name})) for name in returned])
    for node in [node for node in search.subject.nodes if node.name in search.subject.outputs]:
        others = tuple(each for each in search.subject.outputs if each != node.name)
        inner = tuple(source.name for source in node.all_input_nodes if source.op != "placeholder")
        if inner:
            yield Edit(outputs=(*others, *inner))


def cut_edges(search: Search) -> Proposals:
    """Propose to cut behind each node."""
    subject = search.subject
    # late nodes first: one success removes every ancestor that only it used
    names = [node.name for node in reversed(subject.nodes) if node.users and can_be_given(subject.values[node.name])]
    yield from merging([Edit(cut=frozenset({name}), dropped=frozenset({name})) for name in names])


def drop_effects(search: Search) -> Proposals:
    """Propose to drop each node that is only there for its effect."""
    names = [node.name for node in reversed(search.subject.nodes) if has_effect(node)]
    yield from merging([Edit(dropped=frozenset({name})) for name in names])


def skip_operations(search: Search) -> Proposals:
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


def drop_gradients(search: Search) -> Proposals:
    """Propose inputs that do not require grad."""
    asked = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    if len(asked) > 1 and (yield Edit(is_detached=True)):
        return
    yield from merging([Edit(inputs={name: value.detach()}) for name, value in asked.items()])
