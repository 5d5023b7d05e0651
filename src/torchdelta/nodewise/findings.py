"""What a search found, in records: the table of nodes, and those that are wrong by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from torchdelta._torch.graphs.nodes import module_path, op_name, source_line
from torchdelta.nodewise.lockstep_seam import GraphComparison
from torchdelta.nodewise.taps import TappedNode
from torchdelta.nodewise.trials import is_wrong
from torchdelta.records.comparison import Comparison
from torchdelta.records.location import NodeRecord, Row
from torchdelta.records.report import Coverage, Culprit


@dataclass(kw_only=True)
class NodeFindings:
    """The table so far; a search may find nothing."""

    rows: tuple[Row, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    coverage: Coverage | None = None
    unmatched_reference: tuple[NodeRecord, ...] = ()
    unmatched_candidate: tuple[NodeRecord, ...] = ()
    notes: tuple[str, ...] = ()


def found_in_lockstep(compared: Sequence[GraphComparison], notes: Iterable[str] = ()) -> NodeFindings:
    """Put what both graphs did, pair by pair, into records."""
    rows: list[Row] = []
    culprits: dict[Node, Culprit] = {}
    how: Counter[str] = Counter()
    for graphs in compared:
        order = {name: place for place, name in enumerate(graphs.reference)}
        blamed = []
        for judged in graphs.judged:
            rows.append(
                Row(
                    reference=graphs.reference.get(judged.reference.name) or record_of(judged.reference),
                    candidate=graphs.candidate.get(judged.candidate.name) or record_of(judged.candidate),
                    how=judged.how,
                    local=judged.local,
                    local_gradients=judged.local_gradients,
                    inherited=judged.inherited,
                )
            )
            if judged.culprit is not None and graphs.alignment.matches:
                is_forward = is_wrong(judged.local) and graphs.level != "backward"
                stage = "forward" if is_forward else "gradients"
                seen = judged.local if is_wrong(judged.local) else judged.local_gradients
                blamed.append((judged.culprit, seen, stage))
        for node, seen, stage in sorted(blamed, key=lambda each: order.get(each[0].name, -1)):
            culprits.setdefault(node, culprit_at(graphs.reference.get(node.name) or record_of(node), seen, stage))
        how.update(graphs.alignment.coverage.how)
    return NodeFindings(
        rows=tuple(rows),
        culprits=tuple(culprits.values()),
        coverage=Coverage(
            matched=sum(graphs.alignment.coverage.matched for graphs in compared),
            total=sum(graphs.alignment.coverage.total for graphs in compared),
            how=dict(how),
        ),
        unmatched_reference=tuple(node for graphs in compared for node in graphs.alignment.unmatched_reference),
        unmatched_candidate=tuple(node for graphs in compared for node in graphs.alignment.unmatched_candidate),
        notes=(*(note for graphs in compared for note in graphs.notes), *notes),
    )


def found_behind_taps(tapped: Sequence[TappedNode], total: int, notes: Iterable[str]) -> NodeFindings:
    """Put what was seen behind taps into records; both sides have the same graph there."""
    rows, culprits = [], []
    wrong: set[Node] = set()
    judged = 0
    for seen in tapped:
        record = record_of(seen.node)
        stage = "gradients" if seen.level == "backward" else "forward"
        if not seen.is_judged:
            continue
        judged += 1
        rows.append(Row(reference=record, candidate=record, how="name", local=seen.local))
        if is_wrong(seen.local) and wrong.isdisjoint(seen.region):
            wrong.add(seen.node)
            culprit = culprit_at(record, seen.local, stage)
            if len(seen.region) > 1:
                others = ", ".join(node.name for node in seen.region[:-1])
                culprit = replace(culprit, reason=f"{culprit.reason}; it, or one before it that had no tap: {others}")
            culprits.append(culprit)
    return NodeFindings(
        rows=tuple(rows),
        culprits=tuple(culprits),
        coverage=Coverage(matched=judged, total=total, how={"name": judged}),
        notes=tuple(notes),
    )


def joined(values: NodeFindings, gradients: NodeFindings) -> NodeFindings:
    """Return what two looks at the same nodes found: at their values, and at their gradients."""
    both = [coverage for coverage in (values.coverage, gradients.coverage) if coverage is not None]
    how = Counter[str]()
    for coverage in both:
        how.update(coverage.how)
    return NodeFindings(
        rows=(*values.rows, *gradients.rows),
        culprits=(*values.culprits, *gradients.culprits),
        coverage=Coverage(
            matched=sum(coverage.matched for coverage in both),
            total=sum(coverage.total for coverage in both),
            how=dict(how),
        ),
        notes=tuple(dict.fromkeys((*values.notes, *gradients.notes))),
    )


def found_in_modules(rows: tuple[Row, ...], culprits: tuple[Row, ...], coverage: Coverage) -> NodeFindings:
    """Put what modules did, pair by pair, into records."""
    blamed = []
    for row in culprits:
        stage = "forward" if is_wrong(row.local) else "gradients"
        blamed.append(culprit_at(row.reference, row.local if stage == "forward" else row.local_gradients, stage))
    return NodeFindings(rows=rows, culprits=tuple(blamed), coverage=coverage)


def record_of(node: Node) -> NodeRecord:
    """Return what a node is, to somebody who has not its graph."""
    return NodeRecord(
        name=node.name,
        op=op_name(node),
        module_path=module_path(node),
        source_line=source_line(node),
        inputs=tuple(source.name for source in node.all_input_nodes),
    )


def culprit_at(record: NodeRecord, seen: Sequence[Comparison], stage: str) -> Culprit:
    """Return the culprit that a node is, with the worst of what was seen of it."""
    worst = max(seen, key=lambda each: each.rank)
    return Culprit(
        op=record.op,
        node=record.name,
        module_path=record.module_path,
        source_line=record.source_line,
        local_error=worst.error if worst.error is not None else float("inf"),
        noise=worst.noise or 0.0,
        stage=stage,
        reason=worst.reason,
    )
