"""Passes that make the graph smaller: fewer outputs, edges, effects, operations and gradients.

Each proposes all of its edits merged into one first, then halves of them (`propose_by_halves`), because one query that
removes much is worth more than many that remove a little.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import has_effect
from torchdelta.minify.edits import Edit, cuttable
from torchdelta.minify.search import Proposals, Search, failing_outputs, propose_by_halves
from torchdelta.minify.subject import Name, Subject


def drop_outputs(search: Search) -> Proposals:
    """Propose to return only the worst failing output; else to remove outputs, then to replace them by their operands.

    If the first is accepted, nothing else is proposed; it is left out if there is one output, or if `failing_outputs`
    is empty. Outputs are removed by halves, and replaced one by one, by all operands that are not inputs.
    """
    outputs = search.subject.outputs
    failing = failing_outputs(search)
    if failing and len(outputs) > 1 and (yield Edit(outputs=tuple(failing[:1]))):
        return
    yield from propose_by_halves([Edit(removed_outputs=frozenset({name})) for name in outputs])
    # if an operand alone shows the failure, the operation that computed the output from it can go
    for node in [node for node in search.subject.nodes if node.name in search.subject.outputs]:
        others = tuple(name for name in search.subject.outputs if name != node.name)
        operands = tuple(source.name for source in node.all_input_nodes if source.op != "placeholder")
        if operands:
            yield Edit(outputs=(*others, *operands))


def cut_edges(search: Search) -> Proposals:
    """Propose for each node that its readers read an input with the reference's value instead, last nodes first.

    All at once, then by halves. The node's effect, if it has one, is dropped too. Nodes without a reader, and nodes
    whose value is not a tensor or number, are left out.
    """
    subject = search.subject
    candidates = cuttable(subject, (node.name for node in subject.nodes if node.users))
    # late nodes first: one success removes every ancestor that only this node used
    names = [node.name for node in reversed(subject.nodes) if node.name in candidates]
    yield from propose_by_halves([Edit(cut=frozenset({name}), dropped=frozenset({name})) for name in names])


def drop_effects(search: Search) -> Proposals:
    """Propose to drop each node that has an effect, such as a write, a random draw or an assertion.

    All at once, then by halves, the last nodes first. A dropped node stays if its value is needed.
    """
    names = [node.name for node in reversed(search.subject.nodes) if has_effect(node)]
    yield from propose_by_halves([Edit(dropped=frozenset({name})) for name in names])


def skip_operations(search: Search) -> Proposals:
    """Propose for each node that its readers read one of its operands of the same shape and dtype instead.

    First the first such operand of all nodes at once, then by halves, the last nodes first; then every other such
    operand by itself. The effect of a node that is skipped is dropped too.
    """
    subject = search.subject
    choices = {node.name: _operands_alike(subject, node) for node in reversed(subject.nodes)}
    yield from propose_by_halves([_skip(name, operands[0]) for name, operands in choices.items() if operands])
    for name, operands in choices.items():
        for operand in operands[1:]:
            yield _skip(name, operand)


def _skip(name: str, operand: str) -> Edit:
    """Return the edit by which the readers of the node `name` read its operand instead, and its effect is dropped."""
    return Edit(replacements={name: Name(operand)}, dropped=frozenset({name}))


def _operands_alike(subject: Subject, node: Node) -> list[str]:
    """Return the names of the node's operands that are tensors of the result's shape and dtype.

    Empty if the result is not a tensor.
    """
    result = subject.values[node.name]
    if not isinstance(result, torch.Tensor):
        return []
    operands = {source.name: subject.values[source.name] for source in node.all_input_nodes}
    return [
        name
        for name, value in operands.items()
        if isinstance(value, torch.Tensor) and value.shape == result.shape and value.dtype == result.dtype
    ]


def drop_gradients(search: Search) -> Proposals:
    """Propose that no input requires grad, else that some of them do not, by halves down to single inputs."""
    inputs = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    if len(inputs) > 1 and (yield Edit(is_detached=True)):
        return
    yield from propose_by_halves([Edit(inputs={name: value.detach()}) for name, value in inputs.items()])
