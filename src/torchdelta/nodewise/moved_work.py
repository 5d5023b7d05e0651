"""Work that a correct rewrite moved from one node to another is not a fault.

A pass may move a scale behind a matmul: each of the two nodes then computes something else than its partner, and both
together are right. Judged one by one both would be blamed:

    reference   mul(x, 0.5) → matmul → tanh         candidate   matmul(x) → mul(…, 0.5) → tanh

So both graphs run once more without the pairs that are wrong. The pairs behind them are then judged with all the work
before them: `tanh` from `x`. A wrong pair that no such judgement finds wrong has moved its work, and is marked so. A
judgement that still finds something wrong is narrowed to the part that is (`narrowing`), because a fault next to moved
work does not make that wrong. The pairs behind are left out too, up to `ROUNDS` times: work may be moved past them.

Wrong pairs that remain and belong to one rewrite have one culprit, with all of them as its region. Start with
`mark_moved_work`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from torch.fx import Node

from torchdelta._torch.graphs.nodes import is_cast
from torchdelta.nodewise.local import NodeJudgement
from torchdelta.nodewise.lockstep import Lockstep
from torchdelta.nodewise.trials import is_wrong

ROUNDS = 3
"""How often the judged part is widened: work is moved past few nodes."""
Rerun = Callable[[frozenset[Node]], tuple[Lockstep, Sequence[NodeJudgement]]]
"""Runs the graphs in lockstep without these matched nodes of the candidate, and returns the run and its judgements."""


def mark_moved_work(first: Lockstep, judgements: Sequence[NodeJudgement], rerun: Rerun) -> tuple[NodeJudgement, ...]:
    """Return the judgements; wrong pairs whose work was only moved get `is_moved`, and the rest goes through `_joined`.

    `first` is the run that gave the judgements, and `rerun` runs the graphs without some pairs. `rerun` is called up to
    `ROUNDS` times. If no pair is wrong (`_is_wrong_pair`), it is not called and the judgements are returned unchanged.
    The work of a wrong pair was moved if it is not in the wrong part of any judgement of one of the reruns, and it has
    company in the last (`_has_company`). A rerun that fails proves nothing, and is the last.
    """
    wrong = {each.candidate: each for each in judgements if _is_wrong_pair(each, first)}
    if not wrong:
        return tuple(judgements)
    suspects, dropped = set(wrong), set(wrong)
    lockstep, again = first, judgements
    wrong_nodes: set[Node] | None = None
    for _ in range(ROUNDS):
        lockstep, again = rerun(frozenset(dropped))
        if lockstep.failure is not None:
            break
        still_wrong = [each for each in again if each.culprit is not None]
        part = {node for each in still_wrong for node in _wrong_part(each, lockstep, wrong)}
        wrong_nodes = part if wrong_nodes is None else wrong_nodes & part
        suspects &= _pairs_in(part, wrong)
        behind = {each.candidate for each in still_wrong} & first.partners.keys()
        if not suspects or behind <= dropped:
            break
        dropped |= behind
    moved = {node for node in wrong.keys() - suspects if _has_company(node, wrong, first, lockstep, again)}
    marked = [replace(each, is_moved=True) if each.candidate in moved else each for each in judgements]
    if wrong_nodes is not None:
        marked = [_without_right_nodes(each, wrong_nodes) if each.candidate in wrong else each for each in marked]
    return tuple(_joined(marked, first))


def _without_right_nodes(judgement: NodeJudgement, wrong_nodes: Set[Node]) -> NodeJudgement:
    """Return the judgement with those of its `replaced` nodes that are in a wrong part; the last is the culprit.

    Return it unchanged if there are none.
    """
    replaced = tuple(node for node in judgement.replaced if node in wrong_nodes)
    return replace(judgement, culprit=replaced[-1], replaced=replaced) if replaced else judgement


def _has_company(
    node: Node,
    wrong: dict[Node, NodeJudgement],
    first: Lockstep,
    lockstep: Lockstep,
    judgements: Sequence[NodeJudgement],
) -> bool:
    """Tell whether a wrong pair was judged together with another node that may have taken its work over.

    That is another wrong pair, or a node without a partner on either side in the run `first`, except a cast, which
    takes over no work. Without one, the nodes behind the pair only hide its fault, as an `argmax` does, or a cast to a
    lower precision. A pair needs no company if its own value is right with the work before it. `judgements` are those
    of the run `lockstep`.
    """
    others = {each.candidate for each in wrong.values()} | {each.reference for each in wrong.values()}
    matched = {*first.aligned, *first.aligned.values()}
    own = {node, wrong[node].reference}
    for each in judgements:
        narrowing = lockstep.parts_of_regions.get(each.candidate)
        if narrowing and narrowing.equal.get(node) is wrong[node].reference:
            return True
        for region in narrowing.right if narrowing else (_region_of(each, lockstep),):
            if own & region and any(
                other in others or (other not in matched and other.op.startswith("call") and not is_cast(other))
                for other in region - own
            ):
                return True
    return False


def _is_wrong_pair(judgement: NodeJudgement, lockstep: Lockstep) -> bool:
    """Tell whether a judgement is about two partners, has a culprit, and has a local comparison that diverged."""
    is_pair = lockstep.partners.get(judgement.candidate) is judgement.reference
    return judgement.culprit is not None and is_pair and is_wrong(judgement.local)


def _wrong_part(judgement: NodeJudgement, lockstep: Lockstep, wrong: dict[Node, NodeJudgement]) -> Set[Node]:
    """Return the nodes of both sides in the wrong part of a judgement's region, or in the region if it has no parts.

    Return the region too if no pair of `wrong` is in the wrong part, because one of them must explain it.
    """
    narrowing = lockstep.parts_of_regions.get(judgement.candidate)
    if narrowing and _pairs_in(narrowing.wrong, wrong):
        return narrowing.wrong
    return _region_of(judgement, lockstep)


def _pairs_in(part: Set[Node], wrong: dict[Node, NodeJudgement]) -> set[Node]:
    """Return the candidate's nodes of those wrong pairs that have a node of either side in a part, or their culprit.

    If there are none, return those that have another node of their region in it.
    """
    return {node for node, each in wrong.items() if part & {node, each.reference, _culprit(each)}} or {
        node for node, each in wrong.items() if part & set(each.replaced)
    }


def _region_of(judgement: NodeJudgement, lockstep: Lockstep) -> Set[Node]:
    """Return the nodes of both sides that a judgement is about.

    A judgement of an output or state has no pair of regions. Its region has the candidate's node of the judgement and
    the unmatched nodes that it depends on.
    """
    pair = lockstep.pairs.get(judgement.candidate)
    if pair is None:
        return _with_ancestors(judgement.candidate, lockstep)
    return {*pair.reference.nodes, *pair.candidate.nodes}


def _with_ancestors(node: Node, lockstep: Lockstep) -> set[Node]:
    """Return a node and all unmatched nodes that it depends on, through unmatched nodes alone."""
    ancestors, waiting = {node}, [node]
    while waiting:
        sources = [each for each in waiting.pop().all_input_nodes if each not in lockstep.partners]
        waiting += [each for each in sources if each not in ancestors]
        ancestors.update(sources)
    return ancestors


def _joined(judgements: Sequence[NodeJudgement], lockstep: Lockstep) -> list[NodeJudgement]:
    """Return the judgements; of two wrong pairs that belong to one rewrite, only the later one keeps its culprit.

    The `replaced` nodes of the later one are then those of both. Each wrong pair is held against the next one in the
    order of the reference's culprits. They belong together if the later culprit depends on the earlier and the
    candidate has the two in the other order, or if the later culprit reads the earlier and one of both has no partner.
    """
    places = {node: place for place, node in enumerate(lockstep.reference.graph.nodes)}
    theirs = {node: place for place, node in enumerate(lockstep.candidate.graph.nodes)}
    matched = set(lockstep.aligned.values())
    joined = list(judgements)
    wrong = [
        index
        for index, each in enumerate(joined)
        if each.culprit in places and not each.is_moved and is_wrong(each.local) and each.candidate in theirs
    ]
    wrong.sort(key=lambda index: places[_culprit(joined[index])])
    for earlier, later in itertools.pairwise(wrong):
        one, other = joined[earlier], joined[later]
        first, last = _culprit(one), _culprit(other)
        is_crossed = (
            first is one.reference
            and last is other.reference
            and theirs[one.candidate] > theirs[other.candidate]
            and _depends_on(last, first)
        )
        is_taken_over = not {first, last} <= matched and first in last.all_input_nodes
        if first is not last and (is_crossed or is_taken_over):
            region = dict.fromkeys((*(one.replaced or (first,)), *(other.replaced or (last,))))
            joined[later] = replace(other, replaced=tuple(sorted(region, key=places.__getitem__)))
            joined[earlier] = replace(one, culprit=None, replaced=())
    return joined


def _depends_on(node: Node, source: Node) -> bool:
    """Tell whether a node depends on `source`, directly or not, or is that node."""
    known, waiting = {node}, [node]
    while waiting:
        inputs = [each for each in waiting.pop().all_input_nodes if each not in known]
        known.update(inputs)
        waiting += inputs
    return source in known


def _culprit(judgement: NodeJudgement) -> Node:
    """Return the culprit of a judgement, which must have one."""
    assert judgement.culprit is not None
    return judgement.culprit
