"""Start from where the failure is said to be, and take in its surroundings until it shows.

Cut every edge, so that each operation stands by itself, then find the one that fails.

One compile answers for all operations at once: which differs is on the report, and who crashes is found by halving.
Rare kinds are asked about first: what a program does all the time has been tried most often, in it and elsewhere.

Cut off what comes after the failure, then what comes before it, by halving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import op_name, short_name
from torchdelta.minify.edits import Edit, can_be_given, kept_only
from torchdelta.minify.search import Proposals, Search, guilty_outputs
from torchdelta.minify.subject import Subject

RADII = (0, 1, 2, 4, 8)


def widen_from_culprit(search: Search) -> Proposals:
    """Propose each culprit with its producers and consumers, near ones first."""
    subject = search.subject
    names = {node.name for node in subject.nodes}
    for culprit in search.culprits:
        if culprit not in names:
            continue
        for radius in RADII:
            region = _around(subject, culprit, radius)
            if len(region) >= len(names):
                break
            # most failures are a single operation's own
            if (yield replace(kept_only(subject, region), guess=True if radius == 0 else None)):
                return


def _around(subject: Subject, culprit: str, radius: int) -> list[str]:
    by_name = {node.name: node for node in subject.nodes}
    region = {culprit}
    for _ in range(radius):
        nearby = (each for name in region for each in (*by_name[name].all_input_nodes, *by_name[name].users))
        region |= {node.name for node in nearby if node.name in by_name}
    return [name for name in by_name if name in region]


ENOUGH = 3
"""A subject of so few operations needs no leap."""


def isolate_operations(search: Search) -> Proposals:
    """Propose one operation of each kind by itself, then all, and narrow down what that shows."""
    subject = search.subject
    if len(subject.nodes) <= ENOUGH:
        return
    kinds = _kinds(subject)
    firsts, counted = _first_of_each(kinds), Counter(kinds.values())
    # a forward that fails needs no backward, which takes as long to compile again
    if (yield _cut(subject, firsts, is_detached=search.wanted.stage == "forward")):
        yield from _narrow(search, {name: counted[kinds[name]] for name in firsts})
    elif (yield _cut(subject, list(kinds))):
        # those that were asked about together are most likely innocent
        yield from _narrow(search, {name: int(name in firsts) for name in kinds})


def _cut(subject: Subject, returned: list[str], *, is_detached: bool = False) -> Edit:
    cut = frozenset(node.name for node in subject.nodes if can_be_given(subject.values[node.name]))
    return Edit(cut=cut, outputs=tuple(returned), is_detached=is_detached)


def _narrow(search: Search, turn: Mapping[str, int]) -> Proposals:
    """Propose what the answer points to, then halves; operations of a lower turn are suspected first."""
    while len(returned := search.subject.outputs) > 1:
        told = guilty_outputs(search.subject, search.answer, search.wanted)
        if told and (yield _only(search.subject, told[:1], guess=True)):
            continue
        named = [name for name in returned if _is_named(search, name)]
        if 0 < len(named) < len(returned) and (yield _only(search.subject, named, guess=True)):
            continue
        suspects = sorted(returned, key=turn.__getitem__)
        if (yield from _halved(search, suspects, turn)):
            continue
        half = len(suspects) // 2
        if (yield _only(search.subject, suspects[:half])) or (yield _only(search.subject, suspects[half:])):
            continue
        return


def _halved(search: Search, suspects: list[str], turn: Mapping[str, int]) -> Generator[Edit, bool, bool]:
    """Ask about first halves only: who is alone, and not in one half, is in the other."""
    while len(suspects) > 1:
        first, suspects = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        # of several nobody can tell; a single one of two or three is a good bet if its turn was before the others'
        guess = turn[first[0]] < turn[suspects[0]] if len(first) == 1 else None
        if (yield _only(search.subject, first, guess=guess)):
            return True
    return (yield _only(search.subject, suspects, guess=True))


def _only(subject: Subject, names: Collection[str], *, guess: bool | None = None) -> Edit:
    needed = set(names)
    # in the program's order: the same ones are the same question, whoever asks
    returned = tuple(name for name in subject.outputs if name in needed)
    for node in reversed(subject.nodes):
        if node.name in needed:
            needed.update(source.name for source in node.all_input_nodes)
    dropped = frozenset(node.name for node in subject.nodes) - needed
    return Edit(outputs=returned, dropped=dropped, guess=guess)


def _is_named(search: Search, name: str) -> bool:
    """Tell whether the candidate's own words name the operation."""
    node = next(node for node in search.subject.nodes if node.name == name)
    word = short_name(op_name(node))
    return len(word) > 2 and word in search.answer.message


def _first_of_each(kinds: Mapping[str, str]) -> list[str]:
    first: dict[str, str] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    return list(first.values())


def _kinds(subject: Subject) -> dict[str, str]:
    """Return of which kind each operation is that computes a tensor, by its name."""
    given = subject.named_inputs
    nodes = {node.name: node for node in subject.nodes}
    computed = [name for name, value in subject.values.items() if isinstance(value, torch.Tensor) and name not in given]
    return {name: _kind(subject, nodes[name]) for name in computed}


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


def bisect_graph(search: Search) -> Proposals:
    """Propose ever shorter beginnings of the graph, then ever shorter ends of what is left."""
    subject = search.subject
    yield from _halving(len(subject.nodes), lambda count: _beginning(subject, count))
    rest = search.subject
    # the other way round: the more is cut, the less is left
    total = len(rest.nodes)
    yield from _halving(total, lambda count: _end(rest, total - count))


def _halving(total: int, edit: Callable[[int], Edit]) -> Proposals:
    """Propose edits that leave a number of nodes, and find the smallest that is taken."""
    too_few, enough = 0, total
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (yield edit(middle)):
            enough = middle
        else:
            too_few = middle


def _beginning(subject: Subject, count: int) -> Edit:
    nodes = subject.nodes
    inside = {node.name for node in nodes[:count]}
    returned = set(subject.outputs)
    ends = [
        node.name
        for node in nodes[:count]
        if isinstance(subject.values[node.name], torch.Tensor)
        and (node.name in returned or any(user.name not in inside for user in node.users))
    ]
    return Edit(outputs=tuple(ends), dropped=frozenset(node.name for node in nodes[count:]))


def _end(subject: Subject, count: int) -> Edit:
    before = [node.name for node in subject.nodes[:count]]
    cut = frozenset(name for name in before if can_be_given(subject.values[name]))
    return Edit(cut=cut, unreturned=frozenset(before), dropped=frozenset(before))
