"""Narrow a wrong pair of regions to the part that is wrong.

A region that was widened has correct rewrites next to the wrong one. The value at its end does not tell them apart, but
the values inside do:

    reference   mul(x, 0.5) → matmul → tanh → relu      candidate   matmul(x) → mul(…, 0.5) → sigmoid → relu

The candidate's `mul` has the value of the reference's `matmul`, so all work up to there is right. If `relu` reads the
value of the reference's `tanh`, it is right too, so all work behind `sigmoid` is right. Only `sigmoid` in the place of
`tanh` remains.
Start with `narrow`.
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
"""Places that are tried for the end of the wrong part; a region of 16 nodes has at most as many."""
NEAR = 0.05
"""An error beyond this part of the largest value needs no judgement: the two values are not the same."""


@dataclass(frozen=True, kw_only=True)
class Narrowing:
    """A wrong pair of regions, divided into parts. A part has nodes of both sides."""

    wrong: frozenset[Node]
    right: tuple[frozenset[Node], ...] = ()
    equal: Mapping[Node, Node]
    """The candidate's nodes of the right parts that have the value of a node of the reference, with that node."""


def narrow(trial: Trial, reference: Any) -> Narrowing:
    """Return the pair of a trial, whose regions have different values, divided into the wrong part and right ones.

    `reference` is the value of the reference's region. If a region raises, or if no value inside is right, the wrong
    part is the whole pair.
    """
    whole = frozenset((*trial.pair.reference.nodes, *trial.pair.candidate.nodes))
    try:
        return _Narrower(trial, reference).narrow()
    except Exception:  # a node that raises on other values tells nothing about the parts
        return Narrowing(wrong=whole, equal={})


@dataclass(frozen=True)
class _Narrower:
    """The values inside of both regions of a trial, and the questions about them."""

    trial: Trial
    result: Any

    def narrow(self) -> Narrowing:
        """Return the pair divided into the wrong part and right ones; raise what a node of the regions raises."""
        starts = self.equal_nodes()
        rest = self._candidate_before(self.trial.pair.candidate.result, starts)
        ours = self._reference_before(self.trial.pair.reference.result, starts)
        right = [
            frozenset(
                (
                    *self._candidate_before(node, starts.keys() - {node}).nodes,
                    *self._reference_before(partner, {k: v for k, v in starts.items() if v is not partner}).nodes,
                )
            )
            for node, partner in starts.items()
        ]
        wrong = whole = frozenset((*rest.nodes, *ours.nodes))
        if end := self._end_of_fault(rest, ours, starts):
            node, partner = end
            # a node that was put behind a right one is a fault of that one
            work = self._reference_before(partner, starts).nodes if partner in ours.nodes else (partner,)
            wrong = frozenset((*self._candidate_before(node, starts).nodes, *work))
            starts = {**starts, rest.result: ours.result}
            right = [part - wrong for part in (*right, whole)]
        return Narrowing(wrong=wrong, right=tuple(right), equal=starts)

    def equal_nodes(self) -> dict[Node, Node]:
        """Return the inner nodes of the candidate's region that have the value of a node of the reference's region.

        The values of the dict are these nodes of the reference.
        """
        values = self._run_candidate(self.trial.pair.candidate, {})
        equal = {}
        for node in self.trial.pair.candidate.nodes[:-1]:
            partners = (ours for ours, value in self._values.items() if self._is_equal(ours, value, values[node]))
            if (partner := next(partners, None)) is not None:
                equal[node] = partner
        return equal

    def _end_of_fault(self, rest: Region, ours: Region, starts: Mapping[Node, Node]) -> tuple[Node, Node] | None:
        """Return the first node of `rest` that can read a node of the reference instead, so that the result is right.

        It is returned with that node of the reference, or None if there is none within `MOST_CUTS`.
        """
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
        if float((other.double() - value.double()).abs().max()) > NEAR * float(value.abs().max()):
            return False
        return self._is_right(self._reference_before(ours, {}), value, other)

    def _is_right(self, region: Region, value: Any, other: Any) -> bool:
        """Tell whether the candidate's value `other` is right where a region of the reference has `value`."""

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
