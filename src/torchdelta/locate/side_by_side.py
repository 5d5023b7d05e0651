"""Stand at a seam where one graph is made of another, and run both in lockstep on the inputs of the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch import graphs
from torchdelta._torch.nodes import writes_to
from torchdelta._torch.seams import Handed, graph_behind
from torchdelta.locate.align import Alignment, align
from torchdelta.locate.handles import assign_handles
from torchdelta.locate.listing import node_records
from torchdelta.locate.local import LocalJudge
from torchdelta.locate.lockstep import Judged, Lockstep
from torchdelta.locate.trained import trained_nodes
from torchdelta.records.location import NodeRecord

AFTER_AOT = ("forward", "backward", "inference")
"""Levels at which gradients are graphs of their own."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two graphs that were run in lockstep."""

    level: str
    judged: tuple[Judged, ...]
    alignment: Alignment
    reference: Mapping[str, NodeRecord]
    candidate: Mapping[str, NodeRecord]
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class SideBySide:
    """Compares what is handed over with what is made of it, graph by graph."""

    judge: LocalJudge
    with_gradients: bool = True
    given: Mapping[str, str] | None = None
    """What the user says about who matches whom."""
    seen: list[Compared] = field(default_factory=list)
    black_boxes: int = 0
    """What was made of a graph, and is none."""

    def __call__(self, handed: Handed) -> Callable[..., Any]:
        """Hand the graph on, and compare once it is called."""
        assign_handles(handed.graph)
        before = graphs.copied_graph(handed.graph)
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
                        before, after, inputs, self.judge, handed.level, self.given, with_gradients=self.with_gradients
                    )
                )
            return made(*args, **kwargs)

        return call


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
) -> Compared:
    """Match two graphs and run them in lockstep; the candidate is copied, and what nobody reads in it is left out."""
    candidate = graphs.sharing_parameters(candidate)
    candidate.graph.eliminate_dead_code(lambda node: node.is_impure() or writes_to(node))
    candidate.recompile()
    ours, theirs = node_records(reference), node_records(candidate)
    alignment = align(ours, theirs, given=given)
    lockstep = Lockstep(
        reference=reference,
        candidate=candidate,
        alignment=alignment,
        judge=judge,
        trained=trained_nodes(reference, inputs) if with_gradients and level not in AFTER_AOT else (),
    )
    judged = tuple(lockstep.run(inputs, candidate_inputs))
    notes = list(lockstep.notes)
    if lockstep.failure is not None:
        words = str(lockstep.failure).splitlines()[0] if str(lockstep.failure) else ""
        notes.append(
            f"{lockstep.failed_at} raised {type(lockstep.failure).__name__}: {words}; up to there both were run"
        )
    return Compared(
        level=level,
        judged=judged,
        alignment=alignment,
        reference={record.name: record for record in ours},
        candidate={record.name: record for record in theirs},
        notes=tuple(notes),
    )
