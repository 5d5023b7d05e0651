"""Cut every edge, so that each operation stands by itself, then find the one that fails.

One compile answers for all operations at once: which differs is on the report, and who crashes is found by halving.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch.fx import Node

from torchdelta._torch.nodes import op_name, short_name
from torchdelta.minify.edit import Edit, can_be_given
from torchdelta.minify.oracle import guilty_outputs
from torchdelta.minify.search import Proposals, Search
from torchdelta.minify.subject import Subject

ENOUGH = 3
"""A subject of so few operations needs no leap."""


def propose(search: Search) -> Proposals:
    """Propose one operation of each kind by itself, then all, and narrow down what that shows."""
    subject = search.subject
    if len(subject.nodes) <= ENOUGH:
        return
    # a forward that fails needs no backward, which takes as long to compile again
    for edit in (_kinds(subject, is_detached=search.wanted.stage == "forward"), _cut(subject, _computed(subject))):
        if (yield edit):
            yield from _narrow(search)
            return


def _kinds(subject: Subject, *, is_detached: bool) -> Edit:
    return _cut(subject, _one_of_each(subject, _computed(subject)), is_detached=is_detached)


def _cut(subject: Subject, returned: list[str], *, is_detached: bool = False) -> Edit:
    cut = frozenset(node.name for node in subject.nodes if can_be_given(subject.values[node.name]))
    return Edit(cut=cut, outputs=tuple(returned), is_detached=is_detached)


def _narrow(search: Search) -> Proposals:
    """Propose what the answer points to, then halves."""
    while len(returned := search.subject.outputs) > 1:
        told = guilty_outputs(search.subject, search.answer, search.wanted)
        if told and (yield _only(search.subject, told[:1], guess=True)):
            continue
        named = [name for name in returned if _is_named(search, name)]
        if 0 < len(named) < len(returned) and (yield _only(search.subject, named, guess=True)):
            continue
        if (yield from _halved(search, returned)):
            continue
        half = len(returned) // 2
        if (yield _only(search.subject, returned[:half])) or (yield _only(search.subject, returned[half:])):
            continue
        return


def _halved(search: Search, returned: tuple[str, ...]) -> Generator[Edit, bool, bool]:
    """Ask about first halves only: who is alone, and not in one half, is in the other."""
    suspects = returned
    while len(suspects) > 1:
        first, suspects = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        # a single one of two or three is most likely not the one, or as likely as not
        if (yield _only(search.subject, first, guess=False if len(first) == 1 else None)):
            return True
    return (yield _only(search.subject, suspects, guess=True))


def _only(subject: Subject, names: list[str] | tuple[str, ...], *, guess: bool | None = None) -> Edit:
    needed = set(names)
    for node in reversed(subject.nodes):
        if node.name in needed:
            needed.update(source.name for source in node.all_input_nodes)
    dropped = frozenset(node.name for node in subject.nodes) - needed
    return Edit(outputs=tuple(names), dropped=dropped, guess=guess)


def _is_named(search: Search, name: str) -> bool:
    """Tell whether the candidate's own words name the operation."""
    node = next(node for node in search.subject.nodes if node.name == name)
    word = short_name(op_name(node))
    return len(word) > 2 and word in search.answer.message


def _one_of_each(subject: Subject, names: list[str]) -> list[str]:
    by_name = {node.name: node for node in subject.nodes}
    seen: dict[str, str] = {}
    for name in names:
        seen.setdefault(_kind(subject, by_name[name]), name)
    return list(seen.values())


def _kind(subject: Subject, node: Node) -> str:
    operands = [_described(subject.values.get(source.name)) for source in node.all_input_nodes]
    # what is taken out of a collection is of the kind of what made it
    made = [
        _kind(subject, source)
        for source in node.all_input_nodes
        if op_name(node) == "getitem" and source.op != "placeholder"
    ]
    return f"{node.op} {node.target} {operands} {made} {node.args[1:] if op_name(node) == 'getitem' else ''}"


def _described(value: object) -> str:
    return f"{value.dtype}{value.dim()}" if isinstance(value, torch.Tensor) else type(value).__name__


def _computed(subject: Subject) -> list[str]:
    given = subject.named_inputs
    return [name for name, value in subject.values.items() if isinstance(value, torch.Tensor) and name not in given]
