"""Findings: the results of all ways to look at nodes, as one kind of record.

Lockstep, taps and module hooks each have results of their own. The functions here turn them into `NodeFindings`: rows
of a table, one for each judged node, and the culprits, which are wrong by themselves. Start with `NodeFindings`.
"""

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
    """The judged nodes, the culprits among them, and the nodes without a partner."""

    rows: tuple[Row, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    coverage: Coverage | None = None
    unmatched_reference: tuple[NodeRecord, ...] = ()
    unmatched_candidate: tuple[NodeRecord, ...] = ()
    notes: tuple[str, ...] = ()


def findings_from_lockstep(
    comparisons: Sequence[GraphComparison], notes: Iterable[str] = (), *, has_diverged: bool = False
) -> NodeFindings:
    """Return graphs that ran in lockstep as findings: rows, culprits, coverage, unmatched nodes and notes of all.

    Each judgement has a row. A culprit comes once, with the evidence of its first judgement, in the order of the
    reference; a graph without any match has none. The stage of a culprit is `forward` if its value is wrong outside of
    a backward graph, and otherwise `gradients`. Nodes whose work was moved are not culprits, and a note names them; but
    if there are no others and the program `has_diverged`, they are culprits. `notes` come after those of the graphs.
    """
    judged = [judgement for graphs in comparisons for judgement in graphs.judgements if judgement.culprit is not None]
    blames_moved = has_diverged and all(judgement.is_moved for judgement in judged)
    if moved := [judgement.reference.name for judgement in judged if judgement.is_moved and not blames_moved]:
        verb = "does another part of the work, and is" if len(moved) == 1 else "do other parts of the work, and are"
        notes = (*notes, f"{', '.join(moved)} {verb} right together with the nodes around")
    rows: list[Row] = []
    culprits: dict[Node, Culprit] = {}
    how: Counter[str] = Counter()
    for graphs in comparisons:
        order = {name: place for place, name in enumerate(graphs.reference)}
        suspects = []
        for judgement in graphs.judgements:
            rows.append(
                Row(
                    reference=graphs.reference.get(judgement.reference.name) or record_of(judgement.reference),
                    candidate=graphs.candidate.get(judgement.candidate.name) or record_of(judgement.candidate),
                    how=judgement.how,
                    local=judgement.local,
                    local_gradients=judgement.local_gradients,
                    inherited=judgement.inherited,
                )
            )
            is_blamed = judgement.culprit is not None and (blames_moved or not judgement.is_moved)
            if judgement.culprit is not None and is_blamed and graphs.alignment.matches:
                is_forward = is_wrong(judgement.local) and graphs.level != "backward"
                stage = "forward" if is_forward else "gradients"
                evidence = judgement.local if is_wrong(judgement.local) else judgement.local_gradients
                region = tuple(op_name(node) for node in judgement.replaced) if len(judgement.replaced) > 1 else ()
                suspects.append((judgement.culprit, evidence, stage, region))
        for node, evidence, stage, region in sorted(suspects, key=lambda each: order.get(each[0].name, -1)):
            culprit = culprit_at(graphs.reference.get(node.name) or record_of(node), evidence, stage)
            culprits.setdefault(node, replace(culprit, region=region))
        how.update(graphs.alignment.coverage.how)
    return NodeFindings(
        rows=tuple(rows),
        culprits=tuple(culprits.values()),
        coverage=Coverage(
            matched=sum(graphs.alignment.coverage.matched for graphs in comparisons),
            total=sum(graphs.alignment.coverage.total for graphs in comparisons),
            how=dict(how),
        ),
        unmatched_reference=tuple(node for graphs in comparisons for node in graphs.alignment.unmatched_reference),
        unmatched_candidate=tuple(node for graphs in comparisons for node in graphs.alignment.unmatched_candidate),
        notes=(*(note for graphs in comparisons for note in graphs.notes), *notes),
    )


def findings_from_taps(nodes: Sequence[TappedNode], total: int, notes: Iterable[str]) -> NodeFindings:
    """Return tapped nodes as findings: a row for each judged node, the culprits, the coverage and the notes.

    The coverage has the number of judged nodes as matched, and `total`. Both sides of a row are the same node. A judged
    node that diverged is a culprit unless its region contains an earlier culprit; its reason names the other nodes of
    its region. The stage of a culprit is `gradients` if its level is `backward`, and otherwise `forward`.
    """
    rows, culprits = [], []
    blamed_nodes: set[Node] = set()
    judged_count = 0
    for tapped_node in nodes:
        record = record_of(tapped_node.node)
        stage = "gradients" if tapped_node.level == "backward" else "forward"
        if not tapped_node.is_judged:
            continue
        judged_count += 1
        rows.append(Row(reference=record, candidate=record, how="name", local=tapped_node.local))
        if is_wrong(tapped_node.local) and blamed_nodes.isdisjoint(tapped_node.region):
            blamed_nodes.add(tapped_node.node)
            culprit = culprit_at(record, tapped_node.local, stage)
            if len(tapped_node.region) > 1:
                others = ", ".join(node.name for node in tapped_node.region[:-1])
                culprit = replace(culprit, reason=f"{culprit.reason}; it, or one before it that had no tap: {others}")
            culprits.append(culprit)
    return NodeFindings(
        rows=tuple(rows),
        culprits=tuple(culprits),
        coverage=Coverage(matched=judged_count, total=total, how={"name": judged_count}),
        notes=tuple(notes),
    )


def join_findings(values: NodeFindings, gradients: NodeFindings) -> NodeFindings:
    """Return the findings about the values of nodes and those about their gradients as one, those about values first.

    The numbers of both coverages are added, and a note that both have is kept once. Unmatched nodes are left out.
    """
    coverages = [coverage for coverage in (values.coverage, gradients.coverage) if coverage is not None]
    how = Counter[str]()
    for coverage in coverages:
        how.update(coverage.how)
    return NodeFindings(
        rows=(*values.rows, *gradients.rows),
        culprits=(*values.culprits, *gradients.culprits),
        coverage=Coverage(
            matched=sum(coverage.matched for coverage in coverages),
            total=sum(coverage.total for coverage in coverages),
            how=dict(how),
        ),
        notes=tuple(dict.fromkeys((*values.notes, *gradients.notes))),
    )


def findings_from_modules(rows: tuple[Row, ...], culprits: tuple[Row, ...], coverage: Coverage) -> NodeFindings:
    """Return the findings about modules: all rows, the coverage, and a culprit for each row in `culprits`.

    If a value of the row diverged, or the row has no gradients, the values are the evidence, and the stage is
    `forward`. Otherwise the gradients are, in the stage `gradients`.
    """
    module_culprits = []
    for row in culprits:
        # a module that raised has no gradients
        is_forward = is_wrong(row.local) or not row.local_gradients
        evidence, stage = (row.local, "forward") if is_forward else (row.local_gradients, "gradients")
        module_culprits.append(culprit_at(row.reference, evidence, stage))
    return NodeFindings(rows=rows, culprits=tuple(module_culprits), coverage=coverage)


def record_of(node: Node) -> NodeRecord:
    """Return the name, operation, module, source line and inputs of a node as a record, without kinds and handles."""
    return NodeRecord(
        name=node.name,
        op=op_name(node),
        module_path=module_path(node),
        source_line=source_line(node),
        inputs=tuple(source.name for source in node.all_input_nodes),
    )


def culprit_at(record: NodeRecord, evidence: Sequence[Comparison], stage: str) -> Culprit:
    """Return a node as a culprit of a stage, with error, noise and reason of the worst comparison in `evidence`.

    An error that was not measured counts as infinite, and such a noise as 0. `evidence` must not be empty.
    """
    worst = max(evidence, key=lambda each: each.rank)
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
