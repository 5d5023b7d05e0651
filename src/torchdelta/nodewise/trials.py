"""Who in a region is to blame: the last node, or one whose value it read and should not have.

A region that is wrong may end in a node that does its work and was only given something else: a residual that is left
out, a factor that was put in between. So each value that is read in the candidate's region is replaced by one that the
reference has there; if that mends the region, what the reference computes at this place is what the candidate lost.

Both regions of a matched pair on the reference's values, once more and with other things read in single places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.graphs.handles import handles_of
from torchdelta._torch.graphs.nodes import returns_what_it_writes
from torchdelta._torch.process import runtime
from torchdelta.nodewise.local import LocalJudge, gradients
from torchdelta.nodewise.regions import Region
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict

TRIALS = 64

Edges = Mapping[tuple[Node, Node], Node]
"""Which node of the reference is read instead, by who is read and who reads."""


def blame(
    reference: Region,
    candidate: Region,
    values: Mapping[Node, Any],
    partners: Mapping[Node, Node],
    is_mended: Callable[[Edges], bool],
) -> Node:
    """Return the node of the reference whose work is not done; `values` has those of the reference's nodes."""
    for edge, instead in _replacements(reference, candidate, values, partners)[:TRIALS]:
        if is_mended({edge: instead}):
            return reference.result if _is_readers_work(edge[0], instead, reference, candidate, partners) else instead
    return reference.result


def _is_readers_work(
    wrong: Node, right: Node, reference: Region, candidate: Region, partners: Mapping[Node, Node]
) -> bool:
    """Tell whether what was read wrongly belongs to the reader.

    By its handle, because an input does no work, or because it was read after it was overwritten and not before.
    """
    if returns_what_it_writes(wrong) and isinstance(wrong.args[0], Node) and partners.get(wrong.args[0]) is right:
        return True
    if handles_of(wrong) & handles_of(reference.result):
        return True
    is_altered = right in [partners.get(node) for node in candidate.reads]
    return is_altered and right.op in ("placeholder", "get_attr")


def _replacements(
    reference: Region, candidate: Region, values: Mapping[Node, Any], partners: Mapping[Node, Node]
) -> list[tuple[tuple[Node, Node], Node]]:
    there = [
        node
        for node in (*reference.nodes[:-1], *reference.reads)
        if isinstance(values.get(node), (torch.Tensor, tuple, list))
    ]
    edges = [(source, node) for node in candidate.nodes for source in node.all_input_nodes]
    # what nobody matched, or what the reference does not read there, is more likely to be wrong
    edges.sort(key=lambda edge: partners.get(edge[0]) in reference.reads)
    return [(edge, instead) for edge in edges for instead in there if partners.get(edge[0]) is not instead]


@dataclass(frozen=True, kw_only=True)
class RegionPair:
    """A node of the reference and the one of the candidate that should compute the same."""

    reference: Region
    candidate: Region
    how: str
    is_same_call: bool
    """Whether both call the same with the same: then their gradients are the same too."""
    has_same_inputs: bool
    """Whether all that the candidate's region reads, the reference's reads too: gradients are those of the inputs."""
    needs: frozenset[Node]
    """The reference's nodes whose values it takes to judge it."""


@dataclass(frozen=True)
class Trial:
    """Both regions of a pair on the reference's values, once more and with other things read in single places."""

    pair: RegionPair
    values: Mapping[Node, Any]
    """Of the reference's nodes."""
    partners: Mapping[Node, Node]
    drawn: runtime.Drawn | None
    by: LocalJudge
    trained: Collection[Node]
    lowered: Mapping[Node, torch.dtype]

    @cached_property
    def given(self) -> dict[Node, Any]:
        """What the reference's region reads."""
        return {node: self.values[node] for node in self.pair.reference.reads if node in self.values}

    @cached_property
    def wanted(self) -> list[Node]:
        """What both regions read and a gradient goes to."""
        fed = (self.partners[node] for node in self.pair.candidate.reads)
        read = dict.fromkeys((*self.pair.reference.reads, *fed))
        return [node for node in read if node in self.values and node in self.trained]

    def again(self, values: Mapping[Any, Any]) -> Any:
        """Run the reference's region."""
        with runtime.drawing_from(self.drawn):
            return self.pair.reference.run(values)

    def judge_values(self, reference: Any, edges: Edges) -> tuple[Comparison, ...]:
        """Judge the candidate's value when it reads other nodes of the reference."""
        try:
            value = self._run_candidate(self.values, edges)
        except Exception as error:  # it does not take that value
            return (_unfit(self.pair.reference.result.name, error),)
        return self.by.judge(self.pair.reference.result.name, reference, value, self.again, self.given, within=self)

    def judge_written(self, reference: Mapping[Node, Any], candidate: Mapping[Node, Any]) -> tuple[Comparison, ...]:
        """Judge what the last node left in what it read, where both sides write."""
        found: list[Comparison] = []
        for theirs, left in candidate.items():
            ours = self.partners.get(theirs)
            if ours is None or ours not in reference or not self.pair.reference.nodes:
                continue

            def again(values: Mapping[Any, Any], written: Node = ours) -> Any:
                with runtime.drawing_from(self.drawn):
                    return self.pair.reference.run_with_writes(values)[1][written]

            path = f"{self.pair.reference.result.name} → {ours.name}"
            found += self.by.judge(path, reference[ours], left, again, self.given)
        return tuple(found)

    def judge_gradients(self, edges: Edges) -> tuple[Comparison, ...]:
        """Judge the gradients of what both regions read, given the same cotangent."""
        name = self.pair.reference.result.name

        def slopes(run: Callable[[Mapping[Any, Any]], Any], values: Mapping[Any, Any]) -> Any:
            return gradients(run, values, self.wanted, name, self.by.seed)

        try:
            values = {node: self.values[node] for node in (*self.pair.reference.reads, *self.wanted)}
            reference = slopes(self.again, values)
            candidate = slopes(lambda given: self._run_candidate({**self.values, **given}, edges), values)
        except Exception as error:
            return (_unfit(name, error),)
        return self.by.judge(name, reference, candidate, lambda given: slopes(self.again, given), values)

    def blame(self, is_mended: Callable[[Edges], bool]) -> Node:
        """Return the node of the reference whose work is not done."""
        return blame(self.pair.reference, self.pair.candidate, self.values, self.partners, is_mended)

    def _run_candidate(self, values: Mapping[Node, Any], edges: Edges) -> Any:
        fed = {
            node: values[self.partners[node]].to(self.lowered[node])
            if node in self.lowered
            else values[self.partners[node]]
            for node in self.pair.candidate.reads
        }
        with runtime.drawing_from(self.drawn):
            return self.pair.candidate.run(fed, {edge: values[instead] for edge, instead in edges.items()})


def is_wrong(comparisons: Sequence[Comparison]) -> bool:
    """Tell whether one of them says that both sides do not compute the same."""
    return any(seen.verdict is Verdict.DIVERGED for seen in comparisons)


def _unfit(name: str, error: BaseException) -> Comparison:
    reason = f"the candidate's node raised {type(error).__name__}: {error}".splitlines()[0]
    return Comparison(path=name, verdict=Verdict.DIVERGED, reason=reason)
