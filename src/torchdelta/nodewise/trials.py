"""Trials: run both regions of a matched pair again, with changes, to judge them and to find the node to blame.

A region that is wrong may end in a node that is right and only reads something else: a residual is left out, or a
factor was put in between. So `blame` replaces one value that the candidate's region reads by one that the reference
has there. If that mends the region, the node of the reference that has this value is the culprit:

    reference   add(mul(h, 2), x)       candidate   add(h, x)
    with mul's value in place of h the candidate's add is right, so the culprit is mul, whose work is missing

`Trial` holds one pair with the reference's values and has the questions that can be asked of it. Start there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
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

MOST_TRIALS = 64
"""Replacements that are tried before the last node of a region is blamed."""
Replacements = Mapping[tuple[Node, Node], Node]
"""The node of the reference to read instead, for a (producer, reader) edge of the candidate."""


@dataclass(frozen=True, kw_only=True)
class RegionPair:
    """The regions of two matched nodes, which should compute the same."""

    reference: Region
    candidate: Region
    how: str
    is_same_call: bool
    """Whether both nodes call the same operation with the same arguments, so that their gradients are equal too."""
    has_same_inputs: bool
    """Whether the reference's region reads every input of the candidate's, so that gradients can be compared."""
    needs: frozenset[Node]
    """The nodes of the reference whose values are needed to judge the pair."""


@dataclass(frozen=True)
class Trial:
    """Both regions of a pair, ready to run again on the reference's values."""

    pair: RegionPair
    values: Mapping[Node, Any]
    """The values of the reference's nodes."""
    partners: Mapping[Node, Node]
    """The reference's node for each matched node of the candidate."""
    draws: runtime.GeneratorStates | None
    """The state of the random generators before the reference's region ran, if it drew from them."""
    judge: LocalJudge
    trained: Collection[Node]
    """The nodes of the reference that need a gradient."""
    lowered: Mapping[Node, torch.dtype]
    """The candidate's nodes that have another float dtype than the reference on purpose."""
    aligned: Mapping[Node, Node] = field(default_factory=dict)
    """The partners, and those of nodes that only count as unmatched."""

    @cached_property
    def inputs(self) -> dict[Node, Any]:
        """The values that the reference's region reads, by node, as far as they are known."""
        return {node: self.values[node] for node in self.pair.reference.reads if node in self.values}

    @cached_property
    def trained_inputs(self) -> list[Node]:
        """The inputs of either region that need a gradient and have a value, as nodes of the reference."""
        sources = (self.partners[node] for node in self.pair.candidate.reads)
        reads = dict.fromkeys((*self.pair.reference.reads, *sources))
        return [node for node in reads if node in self.values and node in self.trained]

    def run_reference(self, values: Mapping[Any, Any]) -> Any:
        """Return the value of the reference's region, run on these values."""
        with runtime.drawing_from(self.draws):
            return self.pair.reference.run(values)

    def candidate_inputs(self, values: Mapping[Node, Any]) -> dict[Node, Any]:
        """Return the values that the candidate's region reads, by node; `values` are by nodes of the reference.

        They are cast where the candidate has another float dtype on purpose.
        """
        return {
            node: values[self.partners[node]].to(self.lowered[node])
            if node in self.lowered
            else values[self.partners[node]]
            for node in self.pair.candidate.reads
        }

    def judge_values(self, reference: Any, replacements: Replacements) -> tuple[Comparison, ...]:
        """Run the candidate's region with these replacements; return the comparisons of its value with the reference's.

        A replacement makes a node of the region read the value of a node of the reference instead. The result is empty
        if both values are the same. If the region raises, return one comparison that is DIVERGED.
        """
        try:
            value = self._run_candidate(self.values, replacements)
        except Exception as error:  # a replacement may have a shape that the candidate's node does not take
            return (_raised_comparison(self.pair.reference.result.name, error),)
        return self.judge.judge(
            self.pair.reference.result.name, reference, value, self.run_reference, self.inputs, within=self
        )

    def judge_written(self, reference: Mapping[Node, Any], candidate: Mapping[Node, Any]) -> tuple[Comparison, ...]:
        """Return the comparisons of the inputs that the reference's last node changed with those of the candidate's.

        Both arguments have the inputs after the writes, by the node of their side. An input of the candidate whose
        partner is not in `reference` is left out. The result is empty if the reference's region has no nodes.
        """
        comparisons: list[Comparison] = []
        for theirs, value in candidate.items():
            ours = self.partners.get(theirs)
            if ours is None or ours not in reference or not self.pair.reference.nodes:
                continue

            def again(values: Mapping[Any, Any], written: Node = ours) -> Any:
                with runtime.drawing_from(self.draws):
                    return self.pair.reference.run_with_writes(values)[1][written]

            path = f"{self.pair.reference.result.name} → {ours.name}"
            comparisons += self.judge.judge(path, reference[ours], value, again, self.inputs)
        return tuple(comparisons)

    def judge_gradients(self, replacements: Replacements) -> tuple[Comparison, ...]:
        """Return the comparisons of the trained inputs' gradients, under the same random cotangent on both sides.

        They are empty if the gradients are the same. With `replacements`, nodes of the candidate's region read other
        nodes of the reference instead. If either side raises, or the value of an input is missing, return one
        comparison that is DIVERGED.
        """
        name = self.pair.reference.result.name
        dtypes: dict[str, torch.dtype] = {}  # those of the reference, which runs first

        def gradients_of(run: Callable[[Mapping[Any, Any]], Any], values: Mapping[Any, Any]) -> Any:
            return gradients(run, values, self.trained_inputs, name, self.judge.seed, dtypes)

        def run_candidate(inputs: Mapping[Any, Any]) -> Any:
            return self._run_candidate({**self.values, **inputs}, replacements)

        try:
            values = {node: self.values[node] for node in (*self.pair.reference.reads, *self.trained_inputs)}
            reference = gradients_of(self.run_reference, values)
            candidate = gradients_of(run_candidate, values)
        except Exception as error:
            return (_raised_comparison(name, error),)
        again = partial(gradients_of, self.run_reference)
        return self.judge.judge(name, reference, candidate, again, values)

    def blame(self, is_mended: Callable[[Replacements], bool]) -> Node:
        """Return the culprit of this pair, a node of the reference, as the function `blame` finds it.

        `is_mended` tells whether the pair is right with some replacements.
        """
        return blame(self.pair.reference, self.pair.candidate, self.values, self.partners, is_mended)

    def _run_candidate(self, values: Mapping[Node, Any], replacements: Replacements) -> Any:
        """Return the value of the candidate's region, run on the reference's values with these replacements.

        `values` are by nodes of the reference.
        """
        inputs = self.candidate_inputs(values)
        with runtime.drawing_from(self.draws):
            return self.pair.candidate.run(inputs, {edge: values[node] for edge, node in replacements.items()})


def _raised_comparison(name: str, error: BaseException) -> Comparison:
    """Return a comparison at the path `name` that is DIVERGED because the candidate's node raised `error`."""
    reason = f"the candidate's node raised {type(error).__name__}: {error}".splitlines()[0]
    return Comparison(path=name, verdict=Verdict.DIVERGED, reason=reason)


def blame(
    reference: Region,
    candidate: Region,
    values: Mapping[Node, Any],
    partners: Mapping[Node, Node],
    is_mended: Callable[[Replacements], bool],
) -> Node:
    """Return the culprit: the node of the reference whose work the candidate's region does not do.

    `is_mended` tells whether the region is right if one of its edges reads a node of the reference instead. The node of
    the first such replacement that mends the region is the culprit. If none does within `MOST_TRIALS`, or if the reader
    is to blame for what it reads (`_is_readers_work`), it is the last node of the reference's region.
    """
    for edge, replacement in _candidate_replacements(reference, candidate, values, partners)[:MOST_TRIALS]:
        if is_mended({edge: replacement}):
            is_readers_work = _is_readers_work(edge[0], replacement, reference, candidate, partners)
            return reference.result if is_readers_work else replacement
    return reference.result


def _candidate_replacements(
    reference: Region, candidate: Region, values: Mapping[Node, Any], partners: Mapping[Node, Node]
) -> list[tuple[tuple[Node, Node], Node]]:
    """Return (edge, node) pairs: an edge of the candidate's region, and a node of the reference to read there instead.

    Those that are likely to mend the region come first. The nodes are those of the reference's region and its inputs,
    without its last one, the partner of the node that the edge reads already, and nodes without a tensor, tuple or list
    in `values`.
    """
    available = [
        node
        for node in (*reversed(reference.nodes[:-1]), *reference.reads)
        if isinstance(values.get(node), (torch.Tensor, tuple, list))
    ]
    edges = [(source, node) for node in candidate.nodes for source in node.all_input_nodes]
    # an unmatched node, or one that the reference does not read there, is more likely to be wrong; if a whole part was
    # replaced, what the last node reads has the work of all of it
    edges.sort(key=lambda edge: (partners.get(edge[0]) in reference.reads, edge[1] is not candidate.result))
    return [
        (edge, replacement) for edge in edges for replacement in available if partners.get(edge[0]) is not replacement
    ]


def _is_readers_work(
    wrong: Node, right: Node, reference: Region, candidate: Region, partners: Mapping[Node, Node]
) -> bool:
    """Tell whether the reader is to blame for reading the wrong node.

    `wrong` is the candidate's node that is read, and `right` the reference's node that should be. The reader is to
    blame if the wrong node is the partner of the right one after it was overwritten, or if it has a handle of the last
    node of the reference's region. If the right node is an input, the reader is to blame too. If it is an attribute,
    the reader is, if the candidate's region reads the attribute's partner too, or if the wrong node has a partner.
    """
    if returns_what_it_writes(wrong) and isinstance(wrong.args[0], Node) and partners.get(wrong.args[0]) is right:
        return True
    if handles_of(wrong) & handles_of(reference.result):
        return True
    if right.op == "get_attr":
        return wrong in partners or right in [partners.get(node) for node in candidate.reads]
    return right.op == "placeholder"  # an input computes nothing, so its work cannot be missing


def is_wrong(comparisons: Sequence[Comparison]) -> bool:
    """Tell whether one of the comparisons diverged."""
    return any(comparison.verdict is Verdict.DIVERGED for comparison in comparisons)
