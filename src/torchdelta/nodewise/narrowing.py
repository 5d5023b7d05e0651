"""Narrow a wrong pair of regions to the part that is wrong.

A region that was widened has correct rewrites next to the wrong one. The value at its end does not tell them apart, but
the values inside do:

    reference   mul(x, 0.5) → matmul → tanh → relu      candidate   matmul(x) → mul(…, 0.5) → sigmoid → relu

The candidate's `mul` has the value of the reference's `matmul`, so all work up to there is right. If `relu` reads the
value of the reference's `tanh`, it is right too, so all work behind `sigmoid` is right. Only `sigmoid` in the place of
`tanh` remains. Start with `narrow`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.process import runtime
from torchdelta.nodewise.regions import Region, Values
from torchdelta.nodewise.trials import Trial
from torchdelta.records.verdict import Verdict

MOST_CUTS = 256
"""Places that are tried for the end of the wrong part; two regions of 16 nodes have at most as many."""
LARGEST_REGION = 64
"""A candidate's region with more nodes than this is not narrowed, because that would take longer than both graphs."""
NEAR = 0.05
"""An error beyond this part of the largest value needs no judgement: the two values are not the same."""


@dataclass(frozen=True, kw_only=True)
class RegionParts:
    """A wrong pair of regions, divided into parts. A part has nodes of both sides."""

    wrong: frozenset[Node]
    right: tuple[frozenset[Node], ...] = ()
    equal: Mapping[Node, Node]
    """The candidate's nodes of the right parts that have the value of a node of the reference, with that node."""


def narrow(trial: Trial, reference: Any) -> RegionParts:
    """Return the pair of a trial, whose regions have different values, divided into the wrong part and right ones.

    `reference` is the value of the reference's region. The wrong part is the whole pair if no value inside is right, if
    a region raises, or if the candidate's has more than `LARGEST_REGION` nodes.
    """
    whole = RegionParts(wrong=frozenset((*trial.pair.reference.nodes, *trial.pair.candidate.nodes)), equal={})
    if len(trial.pair.candidate.nodes) > LARGEST_REGION:
        return whole
    try:
        return _Narrower(trial, reference).narrow()
    except Exception:  # a node that raises on other values tells nothing about the parts
        return whole


@dataclass(frozen=True)
class _Narrower:
    """The values inside of both regions of a trial, and the questions about them."""

    trial: Trial
    result: Any
    """The value of the reference's region."""

    def narrow(self) -> RegionParts:
        """Return the pair divided into the wrong part and right ones; raise what a node of the regions raises."""
        starts = self._equal_nodes({})
        wrong: set[Node] = set()
        while True:
            end = self._end_of_fault(starts)
            whole = self._part(*self._ends, starts)
            part = self._part(*end, starts) if end else whole
            restart = self._restart(part - {end[0] if end else None}, starts)
            if restart is None:
                break
            node, partner, equal = restart
            wrong |= self._part(node, partner, starts)
            starts = {**starts, node: partner, **equal}
        wrong |= part
        right = [whole, *(self._part(node, partner, starts) for node, partner in starts.items())]
        if end:
            starts = {**starts, self._ends[0]: self._ends[1]}
        equal = {node: partner for node, partner in starts.items() if node not in wrong}
        return RegionParts(wrong=frozenset(wrong), right=tuple(part - wrong for part in right), equal=equal)

    @property
    def _ends(self) -> tuple[Node, Node]:
        """The last nodes of the regions: the candidate's and the reference's."""
        return self.trial.pair.candidate.result, self.trial.pair.reference.result

    def _part(self, node: Node, partner: Node, starts: Mapping[Node, Node]) -> frozenset[Node]:
        """Return the nodes of both sides that end in these two nodes, and read those in `starts`.

        If the partner is in `starts` too, it is the reference's part: the candidate put a node behind a right one.
        """
        others = {each: ours for each, ours in starts.items() if each is not node}
        is_behind = partner in others.values() or partner in self.trial.pair.reference.reads
        work = (partner,) if is_behind else self._reference_before(partner, others).nodes
        return frozenset((*self._candidate_before(node, others).nodes, *work))

    def _equal_nodes(
        self, starts: Mapping[Node, Node], part: Collection[Node | None] | None = None
    ) -> dict[Node, Node]:
        """Return the inner nodes of the candidate's region that have the value of a node of the reference's region.

        The values of the dict are these nodes of the reference. The nodes in `starts`, which are left out, have the
        values of their partners there. With `part`, nodes outside of it are left out too.
        """
        values = self._run_candidate(self.trial.pair.candidate, starts)
        equal = {}
        for node in self.trial.pair.candidate.nodes[:-1]:
            if node in starts or (part is not None and node not in part):
                continue
            partners = (ours for ours, value in self._values.items() if self._is_equal(ours, value, values[node]))
            if (partner := next(partners, None)) is not None:
                equal[node] = partner
        return equal

    def _restart(
        self, part: Collection[Node | None], starts: Mapping[Node, Node]
    ) -> tuple[Node, Node, dict[Node, Node]] | None:
        """Return the first wrong node of a part that has right work behind it, its partner, and the ends of this work.

        The ends are equal to nodes of the reference (`_equal_nodes`) if the node has the value of its partner. A part
        with several faults has such a node. Return None if there is none.
        """
        for node in self.trial.pair.candidate.nodes:
            partner = self.trial.aligned.get(node)
            if node not in part or partner not in part or partner not in self._values:
                continue
            equal = self._equal_nodes({**starts, node: partner}, part)
            if any(partner in self._reference_before(ours, starts).nodes[:-1] for ours in equal.values()):
                return node, partner, equal
        return None

    def _end_of_fault(self, starts: Mapping[Node, Node]) -> tuple[Node, Node] | None:
        """Return the first node of the candidate that can have a value of the reference so that the result is right.

        The nodes in `starts` have the values of their partners. The node is returned with that node of the reference,
        or None if there is none within `MOST_CUTS`.
        """
        rest, ours = self._candidate_before(self._ends[0], starts), self._reference_before(self._ends[1], starts)
        available = [node for node in (*ours.reads, *ours.nodes[:-1]) if node in self._values]
        inner = self._run_candidate(rest, starts)
        cuts = [
            (node, partner)
            for node in rest.nodes[:-1]
            for partner in available
            if isinstance(inner[node], torch.Tensor) and inner[node].shape == self._values[partner].shape
        ]
        for node, partner in cuts[:MOST_CUTS]:
            values = self._run_candidate(rest, {**starts, node: partner})
            if self._is_right(self.trial.pair.reference, self.result, values[rest.result]):
                return node, partner
        return None

    @cached_property
    def _values(self) -> dict[Node, torch.Tensor]:
        """The float tensors of the reference's region and of its inputs, without the last; constants are left out.

        A tensor whose elements are all equal is left out too: it has the value of another by chance.
        """
        region = self.trial.pair.reference
        with runtime.drawing_from(self.trial.draws):
            values = region.run_all(self.trial.inputs)
        return {
            node: value
            for node in (*region.nodes[:-1], *region.reads)
            if isinstance(value := values.get(node), torch.Tensor)
            and value.is_floating_point()
            and value.numel() > 1
            and bool((value != value.flatten()[0]).any())
        }

    def _run_candidate(self, region: Region, replacements: Mapping[Node, Node]) -> Values:
        """Return the values of a part of the candidate, where some nodes have the value of a node of the reference."""
        inputs = self.trial.candidate_inputs(self.trial.values)
        with runtime.drawing_from(self.trial.draws):
            return region.run_all(inputs, {node: self._values[partner] for node, partner in replacements.items()})

    def _is_equal(self, ours: Node, value: torch.Tensor, other: Any) -> bool:
        """Tell whether a value of the candidate is right where the reference's node `ours` has `value`."""
        if not isinstance(other, torch.Tensor) or other.shape != value.shape or not other.is_floating_point():
            return False
        return self._is_right(self._reference_before(ours, {}), value, other)

    def _is_right(self, region: Region, value: Any, other: Any) -> bool:
        """Tell whether the candidate's value `other` is right where a region of the reference has `value`."""
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.shape == other.shape:
            error = (other.double() - value.double()).abs() if value.is_floating_point() and value.numel() else None
            if error is not None and float(error.max()) > NEAR * float(value.abs().max()):
                return False

        def again(values: Mapping[Any, Any]) -> Any:
            with runtime.drawing_from(self.trial.draws):
                return region.run(values)

        inputs = {node: self.trial.inputs[node] for node in region.reads}
        comparisons = self.trial.judge.judge(region.result.name, value, other, again, inputs)
        return all(each.verdict is Verdict.EQUIVALENT for each in comparisons)

    def _candidate_before(self, node: Node, starts: Collection[Node]) -> Region:
        """Return the part of the candidate's region that ends in this node and reads the nodes in `starts`."""
        region = self.trial.pair.candidate
        return Region.before(node, region.module, {*region.reads, *starts} - {node})

    def _reference_before(self, node: Node, starts: Mapping[Node, Node]) -> Region:
        """Return the part of the reference's region that ends in this node and reads the partners in `starts`.

        It has no nodes if the region only reads the node.
        """
        region = self.trial.pair.reference
        if node in region.reads:
            return Region(region.module, (), (node,))
        return Region.before(node, region.module, {*region.reads, *starts.values()} - {node})
