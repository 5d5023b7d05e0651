"""Lockstep at a seam: compare the graph before a transform with the graph after it, on the inputs of the first call.

A seam is where a compiler hands a graph over to a pass or backend. `LockstepSeam` is called there instead. It lets the
transform make its graph, and at the first call of that graph it runs both in lockstep (`compare_graphs`). If the
transform returns something that is not a graph, it is counted as a black box, which taps can look into.

    seam = LockstepSeam(judge=LocalJudge())
    ...                                         # run a transform that calls the seam
    seam.comparisons[0].judgements              # one for each matched pair of nodes

Start with `compare_graphs`, which also serves two graphs that exist already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule, Node

from torchdelta._torch.compile.seams import HandedGraph, graph_behind
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import writes_to
from torchdelta.errors import UsageError
from torchdelta.nodewise.gradient_gates import trained_nodes
from torchdelta.nodewise.local import LocalJudge, NodeJudgement
from torchdelta.nodewise.lockstep import Lockstep, pair_inputs, placeholders
from torchdelta.nodewise.matching import Alignment, align_outermost, assign_handles, is_nested
from torchdelta.nodewise.moved_work import mark_moved_work
from torchdelta.nodewise.node_records import node_records
from torchdelta.nodewise.regions import copy_with_redirected_reads
from torchdelta.records.location import NodeRecord
from torchdelta.registry import nearest

AFTER_AOT = ("forward", "backward", "inference")
"""Levels at which gradients are computed by graphs of their own."""


@dataclass(frozen=True, kw_only=True)
class GraphComparison:
    """The result of running two graphs in lockstep."""

    level: str
    judgements: tuple[NodeJudgement, ...]
    alignment: Alignment
    reference: Mapping[str, NodeRecord]
    candidate: Mapping[str, NodeRecord]
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class LockstepSeam:
    """Compares each graph that is handed over with the graph that the transform makes of it."""

    judge: LocalJudge
    with_gradients: bool = True
    mapping: Mapping[str, str] | None = None
    """The user's matches, from names of the reference's nodes to names of the candidate's."""
    comparisons: list[GraphComparison] = field(default_factory=list)
    black_boxes: int = 0
    """The number of graphs of which the transform made something that is not a graph."""

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Let the transform make its version of the graph, and return a callable that runs it.

        The first call also compares both graphs in lockstep on its arguments, and appends the result to `comparisons`.
        A version that is not a graph is returned as it is, and counted in `black_boxes`. Nodes of the handed graph that
        have no handles get them.
        """
        assign_handles(handed.graph)
        original = graphs.copy_graph(handed.graph)
        compiled = handed.on()
        transformed = graph_behind(compiled)
        if transformed is None:
            self.black_boxes += 1
            return compiled
        has_run = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                inputs = graphs.flat_inputs(original, args, kwargs)
                self.comparisons.append(
                    compare_graphs(
                        original,
                        transformed,
                        inputs,
                        self.judge,
                        handed.level,
                        self.mapping,
                        with_gradients=self.with_gradients,
                        is_one_of_several=True,
                    )
                )
            return compiled(*args, **kwargs)

        return call

    def require_used(self) -> None:
        """Raise a UsageError if the mapping names a node of the candidate twice, or does not fit the compared graphs.

        It does not fit if no graph has a node that it names, or if it matches nodes of different graphs. Without
        compared graphs that is not checked.
        """
        mapping = self.mapping or {}
        for name, times in Counter(mapping.values()).items():
            if times > 1:
                raise UsageError(f"the mapping names {name!r} of the candidate {times} times: a node has one partner")
        if not self.comparisons:
            return
        our_names, their_names = (
            [name for graphs in self.comparisons for name in getattr(graphs, side)]
            for side in ("reference", "candidate")
        )
        for name, other in mapping.items():
            for side, node_name, known in (("reference", name, our_names), ("candidate", other, their_names)):
                if node_name not in known:
                    suggestion = nearest(node_name, known)
                    raise UsageError(f"the mapping names {node_name!r}, and the {side} has no such node: {suggestion}")
            if not any(name in graphs.reference and other in graphs.candidate for graphs in self.comparisons):
                raise UsageError(f"the mapping matches {name!r} with {other!r}, which is in another graph")


def compare_graphs(
    reference: GraphModule,
    candidate: GraphModule,
    inputs: list[Any],
    judge: LocalJudge,
    level: str,
    mapping: Mapping[str, str] | None = None,
    *,
    with_gradients: bool = True,
    candidate_inputs: list[Any] | None = None,
    is_one_of_several: bool = False,
) -> GraphComparison:
    """Match two graphs, run them in lockstep on the inputs, and return the judgement of each pair of nodes, with notes.

    `mapping` has the user's matches, from names of the reference's nodes to the candidate's. Raise UsageError if it
    names an unknown node, or a node twice; with `is_one_of_several` matches of unknown nodes are ignored. Without
    `candidate_inputs` the candidate gets the values of the paired inputs, and None for others. Gradients are compared
    if `with_gradients` is set and `level` is not in `AFTER_AOT`. Nodes of nested graphs count as unmatched, and dead
    nodes of the candidate are left out. A node that raises ends the run, with a note. The graphs are not changed.
    """
    candidate = graphs.copy_sharing_parameters(candidate)
    candidate.graph.eliminate_dead_code(lambda node: node.is_impure() or writes_to(node))
    candidate.recompile()
    reference, candidate = copy_with_redirected_reads(reference), copy_with_redirected_reads(candidate)
    ours, theirs = node_records(reference), node_records(candidate)
    if is_one_of_several:
        names, others = ({record.name for record in records} for records in (ours, theirs))
        mapping = {name: other for name, other in (mapping or {}).items() if name in names and other in others}
    alignment = align_outermost(ours, theirs, mapping)
    lockstep = Lockstep(
        reference=reference,
        candidate=candidate,
        alignment=alignment,
        judge=judge,
        trained=trained_nodes(reference, inputs) if with_gradients and level not in AFTER_AOT else (),
    )

    def rerun(excluded: frozenset[Node]) -> tuple[Lockstep, list[NodeJudgement]]:
        again = Lockstep(
            reference=reference,
            candidate=candidate,
            alignment=alignment,
            judge=judge,
            trained=lockstep.trained,
            excluded=excluded,
        )
        return again, list(again.run(inputs, candidate_inputs))

    pairs = pair_inputs(reference, candidate)
    if candidate_inputs is None:
        # an input without a value makes a node raise, which becomes a note
        known = dict(zip(placeholders(reference), inputs, strict=False))
        candidate_inputs = [known.get(pairs[node]) if node in pairs else None for node in placeholders(candidate)]
    judgements = mark_moved_work(lockstep, tuple(lockstep.run(inputs, candidate_inputs)), rerun)
    judgements = tuple(_with_reader(judgement, lockstep) for judgement in judgements)
    notes = [*_unpaired_inputs(reference, candidate, pairs), *lockstep.notes]
    if nested := [record.name for record in ours if is_nested(record)]:
        notes.append(
            f"{len(nested)} nodes are inside of graphs that a node runs, and were judged with that node and not by "
            "themselves"
        )
    if lockstep.failure is not None:
        message = str(lockstep.failure).splitlines()[0] if str(lockstep.failure) else ""
        notes.append(
            f"{lockstep.failed_at} raised {type(lockstep.failure).__name__}: {message}; up to there both were run"
        )
    return GraphComparison(
        level=level,
        judgements=judgements,
        alignment=alignment,
        reference={record.name: record for record in ours},
        candidate={record.name: record for record in theirs},
        notes=tuple(notes),
    )


def _with_reader(judgement: NodeJudgement, lockstep: Lockstep) -> NodeJudgement:
    """Return the judgement of a node that the candidate put behind an input of the graph with its reader as culprit.

    The reader is the partner of the first that has one. An input computes nothing, so it cannot be wrong itself. Return
    the judgement unchanged if it has another culprit or none, or if no reader has a partner.
    """
    culprit, pair = judgement.culprit, lockstep.pairs.get(judgement.candidate)
    if culprit is None or culprit.op != "placeholder" or pair is None or pair.reference.result is not culprit:
        return judgement
    readers = (lockstep.partners.get(user) for user in judgement.candidate.users)
    return replace(judgement, culprit=next((reader for reader in readers if reader is not None), culprit))


def _unpaired_inputs(reference: GraphModule, candidate: GraphModule, pairs: Mapping[Node, Node]) -> Iterator[str]:
    """Yield a note for each side that has inputs which the other side does not have.

    `pairs` has the reference's input for each of the candidate's that has one.
    """
    paired = set(pairs.values())
    for side, other, names in (
        ("reference", "candidate", [node.name for node in placeholders(reference) if node not in paired]),
        ("candidate", "reference", [node.name for node in placeholders(candidate) if node not in pairs]),
    ):
        if names:
            yield f"the {side} takes {', '.join(names)}, and the {other} has no such input"
