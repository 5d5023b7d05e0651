"""Stand at a seam where one graph is made of another, and run both in lockstep on the inputs of the first call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from torchdelta._torch.compile.seams import HandedGraph, graph_behind
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import writes_to
from torchdelta.errors import UsageError
from torchdelta.nodewise.gradient_gates import trained_nodes
from torchdelta.nodewise.local import LocalJudge, NodeJudgement
from torchdelta.nodewise.lockstep import Lockstep, paired_inputs, placeholders
from torchdelta.nodewise.matching import Alignment, align_outermost, assign_handles, is_nested
from torchdelta.nodewise.node_records import node_records
from torchdelta.nodewise.regions import reading_writers
from torchdelta.records.location import NodeRecord
from torchdelta.registry import nearest

AFTER_AOT = ("forward", "backward", "inference")
"""Levels at which gradients are graphs of their own."""


@dataclass(frozen=True, kw_only=True)
class GraphComparison:
    """Two graphs that were run in lockstep."""

    level: str
    judged: tuple[NodeJudgement, ...]
    alignment: Alignment
    reference: Mapping[str, NodeRecord]
    candidate: Mapping[str, NodeRecord]
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class LockstepSeam:
    """Compares what is handed over with what is made of it, graph by graph."""

    judge: LocalJudge
    with_gradients: bool = True
    given: Mapping[str, str] | None = None
    """What the user says about who matches whom."""
    seen: list[GraphComparison] = field(default_factory=list)
    black_boxes: int = 0
    """What was made of a graph, and is none."""

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Hand the graph on, and compare once it is called."""
        assign_handles(handed.graph)
        before = graphs.copy_graph(handed.graph)
        made = handed.on()
        after = graph_behind(made)
        if after is None:
            self.black_boxes += 1
            return made
        has_run = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                inputs = graphs.flat_inputs(before, args, kwargs)
                self.seen.append(
                    compare_graphs(
                        before,
                        after,
                        inputs,
                        self.judge,
                        handed.level,
                        self.given,
                        with_gradients=self.with_gradients,
                        is_one_of_several=True,
                    )
                )
            return made(*args, **kwargs)

        return call

    def require_used(self) -> None:
        """Refuse a mapping that names what no graph has; each of several graphs may have a part of it."""
        given = self.given or {}
        for name, times in Counter(given.values()).items():
            if times > 1:
                raise UsageError(f"the mapping names {name!r} of the candidate {times} times: a node has one partner")
        if not self.seen:
            return
        ours, theirs = (
            [name for graphs in self.seen for name in getattr(graphs, side)] for side in ("reference", "candidate")
        )
        for name, other in given.items():
            for side, wanted, known in (("reference", name, ours), ("candidate", other, theirs)):
                if wanted not in known:
                    words = nearest(wanted, known)
                    raise UsageError(f"the mapping names {wanted!r}, and the {side} has no such node: {words}")
            if not any(name in graphs.reference and other in graphs.candidate for graphs in self.seen):
                raise UsageError(f"the mapping matches {name!r} with {other!r}, which is in another graph")


def compare_graphs(
    reference: GraphModule,
    candidate: GraphModule,
    inputs: list[Any],
    judge: LocalJudge,
    level: str,
    given: Mapping[str, str] | None = None,
    *,
    with_gradients: bool = True,
    candidate_inputs: list[Any] | None = None,
    is_one_of_several: bool = False,
) -> GraphComparison:
    """Match two graphs and run them in lockstep; the candidate is copied, and what nobody reads in it is left out.

    Of one of several graphs a mapping may name others' nodes, too.
    """
    candidate = graphs.copy_sharing_parameters(candidate)
    candidate.graph.eliminate_dead_code(lambda node: node.is_impure() or writes_to(node))
    candidate.recompile()
    reference, candidate = reading_writers(reference), reading_writers(candidate)
    ours, theirs = node_records(reference), node_records(candidate)
    if is_one_of_several:
        names, others = ({record.name for record in records} for records in (ours, theirs))
        given = {name: other for name, other in (given or {}).items() if name in names and other in others}
    alignment = align_outermost(ours, theirs, given)
    lockstep = Lockstep(
        reference=reference,
        candidate=candidate,
        alignment=alignment,
        judge=judge,
        trained=trained_nodes(reference, inputs) if with_gradients and level not in AFTER_AOT else (),
    )
    pairs = paired_inputs(reference, candidate)
    if candidate_inputs is None:
        known = dict(zip(placeholders(reference), inputs, strict=False))  # what lacks a value raises, and is noted
        candidate_inputs = [known.get(pairs[node]) if node in pairs else None for node in placeholders(candidate)]
    judged = tuple(lockstep.run(inputs, candidate_inputs))
    notes = [*_unpaired(reference, candidate, pairs), *lockstep.notes]
    if inside := [record.name for record in ours if is_nested(record)]:
        notes.append(
            f"{len(inside)} nodes are inside of graphs that a node runs, and were judged with that node and not by "
            "themselves"
        )
    if lockstep.failure is not None:
        words = str(lockstep.failure).splitlines()[0] if str(lockstep.failure) else ""
        notes.append(
            f"{lockstep.failed_at} raised {type(lockstep.failure).__name__}: {words}; up to there both were run"
        )
    return GraphComparison(
        level=level,
        judged=judged,
        alignment=alignment,
        reference={record.name: record for record in ours},
        candidate={record.name: record for record in theirs},
        notes=tuple(notes),
    )


def _unpaired(reference: GraphModule, candidate: GraphModule, pairs: Mapping[Node, Node]) -> Iterator[str]:
    taken = set(pairs.values())
    for side, other, left in (
        ("reference", "candidate", [node.name for node in placeholders(reference) if node not in taken]),
        ("candidate", "reference", [node.name for node in placeholders(candidate) if node not in pairs]),
    ):
        if left:
            yield f"the {side} takes {', '.join(left)}, and the {other} has no such input"
