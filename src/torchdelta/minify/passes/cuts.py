"""Strategies: cut a large graph down to the few operations that fail, in as few queries as possible.

Three ways, tried in this order:

- `widen_from_culprit` keeps the suspected operation alone, then with more and more of its neighbours.
- `isolate_operations` cuts every edge, so that each operation reads the reference's values. One compile then tests all
  operations at once: the report names those that differ, and halving finds one that crashes.
- `bisect_graph` removes the end of the graph, then its beginning, by halving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from torchdelta._torch.graphs.nodes import op_name, short_name
from torchdelta.minify.edits import Edit, cuttable, keep_only, region_outputs
from torchdelta.minify.search import Proposals, Search, failing_outputs
from torchdelta.minify.subject import Subject

RADII = (0, 1, 2, 4, 8)
"""How many edges away from the culprit a neighbour may be, in the order in which that is tried."""
SMALL_GRAPH = 3
"""A subject of at most so many operations is left to the passes."""


def widen_from_culprit(search: Search) -> Proposals:
    """Propose to keep only a culprit and its neighbours, for each culprit and each radius, smallest radius first.

    The first accepted edit ends it. A culprit that is not a node of the subject is skipped. A region of the whole graph
    is not proposed: the next culprit follows.
    """
    subject = search.subject
    names = {node.name for node in subject.nodes}
    for culprit in search.culprits:
        if culprit not in names:
            continue
        for radius in RADII:
            region = _neighbourhood(subject, culprit, radius)
            if len(region) >= len(names):
                break
            # the culprit alone probably fails, because most failures are of a single operation
            if (yield replace(keep_only(subject, region), guess=True if radius == 0 else None)):
                return


def _neighbourhood(subject: Subject, culprit: str, radius: int) -> list[str]:
    """Return the names of the computing nodes at most `radius` edges away from the culprit, in the order of the graph.

    The culprit itself is one of them. Edges are followed in both directions, but not through inputs.
    """
    by_name = {node.name: node for node in subject.nodes}
    region = {culprit}
    for _ in range(radius):
        neighbours = (each for name in region for each in (*by_name[name].all_input_nodes, *by_name[name].users))
        region |= {node.name for node in neighbours if node.name in by_name}
    return [name for name in by_name if name in region]


def isolate_operations(search: Search) -> Proposals:
    """Propose to isolate one operation of each kind, or if that is refused all operations, then narrow down to one.

    If both are refused, it ends. Isolated operations read the reference's values instead of each other's, and are
    returned. Only operations that compute a tensor are isolated. The first edit also drops gradients if the failure is
    in forward. Of one operation of each kind (see `_kind`), those of rare kinds are suspected first; of all operations,
    those that the first edit had are suspected last. A graph of at most `SMALL_GRAPH` operations gets no proposals.
    """
    subject = search.subject
    if len(subject.nodes) <= SMALL_GRAPH:
        return
    kinds = _kinds(subject)
    samples, counts = _first_of_each(kinds), Counter(kinds.values())
    # without gradients, because a failure in forward needs no backward, which would double the time to compile
    if (yield _isolate(subject, samples, is_detached=search.wanted.stage == "forward")):
        yield from _narrow_down(search, {name: counts[kinds[name]] for name in samples})
    elif (yield _isolate(subject, list(kinds))):
        # the samples have just passed, so they are suspected last
        yield from _narrow_down(search, {name: int(name in samples) for name in kinds})


def _isolate(subject: Subject, names: list[str], *, is_detached: bool = False) -> Edit:
    """Return the edit that cuts every edge with a tensor or number, and returns the named operations.

    With `is_detached`, no input requires grad any more.
    """
    cut = cuttable(subject, (node.name for node in subject.nodes))
    return Edit(cut=cut, outputs=tuple(names), is_detached=is_detached)


def _narrow_down(search: Search, ranks: Mapping[str, int]) -> Proposals:
    """Propose to return fewer of the isolated operations, until one is left or a whole round is refused.

    A round proposes the first of `failing_outputs`, if there is one; the outputs whose operation the error message
    mentions, if these are some but not all; the edits of `_find_single`; and each half. An accepted edit begins a new
    round. `ranks` has a number for each operation, by name: the lowest is suspected first.
    """
    while len(outputs := search.subject.outputs) > 1:
        failing = failing_outputs(search)
        if failing and (yield _keep_outputs(search.subject, failing[:1], guess=True)):
            continue
        mentioned = [name for name in outputs if _is_mentioned(search, name)]
        if 0 < len(mentioned) < len(outputs) and (yield _keep_outputs(search.subject, mentioned, guess=True)):
            continue
        suspects = sorted(outputs, key=ranks.__getitem__)
        if (yield from _find_single(search, suspects, ranks)):
            continue
        half = len(suspects) // 2
        if (yield _keep_outputs(search.subject, suspects[:half])) or (
            yield _keep_outputs(search.subject, suspects[half:])
        ):
            continue
        return


def _find_single(search: Search, suspects: list[str], ranks: Mapping[str, int]) -> Generator[Edit, bool, bool]:
    """Propose to keep the first half of `suspects`, then of the rest, and so on; return whether an edit was accepted.

    The first accepted edit ends it. At last the only suspect that is left is proposed. `ranks` is for the guesses: a
    suspect of a lower rank than the next one probably fails.
    """
    while len(suspects) > 1:
        first, suspects = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        # several suspects cannot be predicted; a single one probably fails if its rank is lower than the others'
        guess = ranks[first[0]] < ranks[suspects[0]] if len(first) == 1 else None
        if (yield _keep_outputs(search.subject, first, guess=guess)):
            return True
    return (yield _keep_outputs(search.subject, suspects, guess=True))


def _keep_outputs(subject: Subject, names: Collection[str], *, guess: bool | None = None) -> Edit:
    """Return the edit that keeps only the named outputs, in the graph's order, and drops all nodes they do not need.

    `guess` is whether the edit will probably be accepted, or None.
    """
    needed = set(names)
    # in the order of the graph, so that the same set of names always makes the same subject
    outputs = tuple(name for name in subject.outputs if name in needed)
    for node in reversed(subject.nodes):
        if node.name in needed:
            needed.update(source.name for source in node.all_input_nodes)
    dropped = frozenset(node.name for node in subject.nodes) - needed
    return Edit(outputs=outputs, dropped=dropped, guess=guess)


def _is_mentioned(search: Search, name: str) -> bool:
    """Tell whether the candidate's error message has the short name of the named node's operation.

    Names of one or two letters do not count.
    """
    node = next(node for node in search.subject.nodes if node.name == name)
    word = short_name(op_name(node))
    return len(word) > 2 and word in search.answer.message


def _first_of_each(kinds: Mapping[str, str]) -> list[str]:
    """Return the name of the first node of each kind; `kinds` has the kind of each node by its name."""
    first: dict[str, str] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, name)
    return list(first.values())


def _kinds(subject: Subject) -> dict[str, str]:
    """Return the kind (see `_kind`) of each node that computes a tensor, by name, in the order of the graph."""
    inputs = subject.named_inputs
    nodes = {node.name: node for node in subject.nodes}
    computed = [
        name for name, value in subject.values.items() if isinstance(value, torch.Tensor) and name not in inputs
    ]
    return {name: _kind(subject, nodes[name]) for name in computed}


def _kind(subject: Subject, node: Node) -> str:
    """Return a text that two nodes share if they do the same operation on operands of the same dtypes and ranks.

    An operand that is not a tensor counts by its type. An item of a collection (`getitem`) is of the kind of the node
    that made the collection, at its index.
    """
    operands = [_describe(subject.values.get(source.name)) for source in node.all_input_nodes]
    is_item = op_name(node) == "getitem"
    producers = [_kind(subject, each) for each in node.all_input_nodes if is_item and each.op != "placeholder"]
    return f"{node.op} {node.target} {operands} {producers} {node.args[1:] if is_item else ''}"


def _describe(value: object) -> str:
    """Return dtype and number of axes of a tensor as text, or the name of another value's type."""
    return f"{value.dtype}{value.dim()}" if isinstance(value, torch.Tensor) else type(value).__name__


def bisect_graph(search: Search) -> Proposals:
    """Propose to keep fewer and fewer of the first nodes, then fewer and fewer of the last nodes that are left.

    Each number is found by halving; see `_bisect`. The last nodes read the reference's values as inputs.
    """
    subject = search.subject
    yield from _bisect(len(subject.nodes), lambda count: _keep_first(subject, count))
    rest = search.subject
    yield from _bisect(len(rest.nodes), lambda count: _keep_last(rest, count))


def _bisect(total: int, keep: Callable[[int], Edit]) -> Proposals:
    """Propose `keep(count)` for counts of nodes below `total`, and close in by halving on the smallest accepted.

    An accepted count is followed by a smaller one, and a refused count by a larger one.
    """
    too_few, enough = 0, total
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (yield keep(middle)):
            enough = middle
        else:
            too_few = middle


def _keep_first(subject: Subject, count: int) -> Edit:
    """Return the edit that keeps the first `count` nodes, and drops the effects of the others.

    The graph then returns the tensors of kept nodes that it returned before or that later nodes read.
    """
    names = [node.name for node in subject.nodes]
    return Edit(outputs=region_outputs(subject, names[:count]), dropped=frozenset(names[count:]))


def _keep_last(subject: Subject, count: int) -> Edit:
    """Return the edit that keeps the last `count` nodes, which read the reference's values as inputs.

    The other nodes are not returned any more; one whose value is neither a tensor nor a number stays if it is read.
    """
    nodes = subject.nodes
    removed = frozenset(node.name for node in nodes[: len(nodes) - count])
    return Edit(cut=cuttable(subject, removed), removed_outputs=removed, dropped=removed)
