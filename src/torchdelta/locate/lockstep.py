"""Two graphs run side by side, node by node: each node of the candidate is fed the reference's values.

The reference runs as far as its partner goes, the candidate's node runs on the reference's values and on its own, and a
value is dropped when nobody will read it any more. What differs when fed the reference's values is wrong by itself;
what differs only on the candidate's own values inherited that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch import runtime
from torchdelta.locate.align import Alignment
from torchdelta.locate.judged import Judged, inherited_from
from torchdelta.locate.left_behind import LeftBehind
from torchdelta.locate.local import LocalJudge
from torchdelta.locate.places import inserted, is_same_call, is_same_output
from torchdelta.locate.regions import (
    Region,
    copied,
    is_discontinuous,
    is_identical,
    region_from,
    run_writing,
    tensors_of,
)
from torchdelta.locate.running import Running, paired_inputs, readers_within
from torchdelta.locate.trial import Pair, Trial, is_wrong
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict


@dataclass(kw_only=True)
class Lockstep:
    """One run of two graphs on the same inputs."""

    reference: GraphModule
    candidate: GraphModule
    alignment: Alignment
    judge: LocalJudge
    trained: Collection[Node] = frozenset()
    """The reference's nodes on the way of a gradient; without any, gradients are not looked at."""
    failure: BaseException | None = None
    """What a node raised; everything up to there was judged."""
    failed_at: str = ""
    notes: list[str] = field(default_factory=list)
    _lowered: dict[Node, torch.dtype] = field(default_factory=dict)

    @cached_property
    def partners(self) -> dict[Node, Node]:
        """The reference's node for each matched one of the candidate."""
        ours = {node.name: node for node in self.reference.graph.nodes}
        theirs = {node.name: node for node in self.candidate.graph.nodes}
        found = paired_inputs(self.reference, self.candidate) | {
            theirs[match.candidate]: ours[match.reference]
            for match in self.alignment.matches
            if match.reference in ours and match.candidate in theirs
        }
        found |= inserted(found)
        return {node: partner for node, partner in found.items() if is_same_output(partner, node, found)}

    @cached_property
    def pairs(self) -> dict[Node, Pair]:
        """Every pair to be judged, by the candidate's node."""
        how = {match.candidate: match.how for match in self.alignment.matches}
        # a constant is given, too: the truth of a region has it in float64
        held = {node for node in self.reference.graph.nodes if node.op == "get_attr"}
        known = set(self.partners.values()) | held
        found = {}
        for theirs, ours in self.partners.items():
            if theirs.op in ("placeholder", "output"):
                continue
            candidate = Region.before(theirs, self.candidate, self.partners)
            fed = {self.partners[node] for node in candidate.reads}
            reference = region_from(fed, ours, self.reference, known)
            found[theirs] = Pair(
                reference=reference,
                candidate=candidate,
                how=how.get(theirs.name, "name"),
                is_same_call=is_same_call(ours, theirs, self.partners),
                has_same_inputs=fed <= set(reference.reads),
                needs=frozenset((*reference.nodes, *reference.reads, *fed)),
            )
        return found

    def run(self, inputs: Sequence[Any], candidate_inputs: Sequence[Any] | None = None) -> Iterator[Judged]:
        """Judge pair by pair, in the candidate's order; each side gets copies of the inputs, or has its own."""
        needed = Counter(node for pair in self.pairs.values() for node in pair.needs)
        fed = Counter(
            self.partners[source]
            for node in self.candidate.graph.nodes
            for source in node.all_input_nodes
            if source in self.partners
        )
        ours = Running(self.reference, copied(tuple(inputs)), readers_within(self.reference) + needed + fed)
        ours.awaited.update(pair.reference.result for pair in self.pairs.values())
        own = inputs if candidate_inputs is None else candidate_inputs
        theirs = Running(self.candidate, copied(tuple(own)), readers_within(self.candidate))
        same: set[Node] = set()
        culprits: set[Node] = set()
        with torch.no_grad():
            for node in self.candidate.graph.nodes:
                try:
                    if node.op == "output":
                        yield from self._judge_outputs(node, ours, theirs)
                        ours.advance_to(self.reference.graph.output_node())
                        yield from self._left.judged(ours, theirs, culprits)
                    else:
                        for judged in self._step(node, ours, theirs, same):
                            culprits |= {judged.culprit} if judged.culprit is not None else set()
                            yield judged
                        for source in node.all_input_nodes:
                            if source in self.partners:
                                ours.done_with(self.partners[source])
                except Exception as error:
                    self.failure, self.failed_at = error, node.name
                    return

    def _step(self, node: Node, ours: Running, theirs: Running, same: set[Node]) -> Iterator[Judged]:
        partner = self.partners.get(node)
        # what is inside a region draws what the node at its end draws
        end = partner if partner is not None else self._ends.get(node)
        if end is not None:
            ours.advance_to(end)
        drawn = ours.drawn_from.get(end) if end is not None else None
        is_fed_alike = all(
            source in same and self._is_untouched(source, node, ours, theirs) for source in node.all_input_nodes
        )
        given = (
            None
            if is_fed_alike
            else {source: self._fed(source, ours, theirs, partner) for source in node.all_input_nodes}
        )
        own = theirs.advance_to(node, drawn)
        if partner is not None:
            self._note_dtype(node, ours.kept[partner], own)
        if node.op == "placeholder":
            same |= set() if node in self._lowered else {node}
            return
        local, after = (own, theirs.left_by(node)) if given is None else self._run_on(given, node, theirs, drawn)
        theirs.forget_write(node)
        self._left.note(node, after, theirs)
        if partner is None:
            theirs.kept[node] = local
            same |= {node} if is_fed_alike else set()
            return
        reference = ours.kept[partner]
        is_same = is_identical(reference, own)
        same |= {node} if is_same else set()
        pair = self.pairs[node]
        if after or any(True for _ in tensors_of((reference, local))):
            inherited = () if is_same else inherited_from(partner.name, reference, own)
            yield self._judge(pair, reference, local, after, inherited, ours)
        if not after:
            self._left.hold(partner, ours)
        ours.has_judged(partner)
        for needed in pair.needs:
            ours.done_with(needed)

    @cached_property
    def _ends(self) -> dict[Node, Node]:
        """The reference's node at the end of the region that an unmatched node of the candidate is in."""
        return {node: pair.reference.result for pair in self.pairs.values() for node in pair.candidate.nodes[:-1]}

    @cached_property
    def _left(self) -> LeftBehind:
        return LeftBehind(reference=self.reference, partners=self.partners, judge=self.judge, notes=self.notes)

    def _is_untouched(self, source: Node, reader: Node, ours: Running, theirs: Running) -> bool:
        """Tell whether nobody wrote to a value since it was computed, but for who is looked at now."""
        partner = self.partners.get(source)
        writers = (None, self.partners.get(reader))
        return source not in theirs.touched and (partner is None or ours.touched.get(partner) in writers)

    def _fed(self, source: Node, ours: Running, theirs: Running, reader: Node | None = None) -> Any:
        partner = self.partners.get(source)
        if partner is None:
            return theirs.kept[source]
        # who writes was given what was there before
        value = ours.before_write.get(reader, {}).get(partner, ours.kept[partner]) if reader else ours.kept[partner]
        return value.to(self._lowered[source]) if source in self._lowered else value

    def _note_dtype(self, node: Node, reference: Any, own: Any) -> None:
        """Remember where the candidate has another float on purpose: it is fed the reference's values in that."""
        if (
            self.judge.lowered_to is None
            or not isinstance(own, torch.Tensor)
            or not isinstance(reference, torch.Tensor)
        ):
            return
        if own.is_floating_point() and reference.is_floating_point() and own.dtype != reference.dtype:
            self._lowered[node] = own.dtype

    def _run_on(
        self, given: Mapping[Node, Any], node: Node, theirs: Running, drawn: runtime.Drawn | None
    ) -> tuple[Any, dict[Node, Any]]:
        with runtime.drawing_from(drawn):
            return run_writing(theirs.interpreter, node, given)

    def _judge(
        self,
        pair: Pair,
        reference: Any,
        local: Any,
        after: Mapping[Node, Any],
        inherited: tuple[Comparison, ...],
        ours: Running,
    ) -> Judged:
        name = pair.reference.result.name
        values = {node: ours.kept[node] for node in pair.needs if node in ours.kept}
        values |= ours.before_write.get(pair.reference.result, {})
        drawn = next((ours.drawn_from[node] for node in pair.reference.nodes if node in ours.drawn_from), None)
        trial = Trial(pair, values, self.partners, drawn, self.judge, self.trained, self._lowered)
        is_exact = is_discontinuous(pair.reference)
        found = self.judge.judge(name, reference, local, trial.again, trial.given, is_exact=is_exact, within=trial)
        written = trial.judge_written(ours.after_write.get(pair.reference.result, {}), after)
        slopes: tuple[Comparison, ...] = ()
        culprit = None
        if is_wrong(found):
            culprit = trial.blame(lambda edges: not is_wrong(trial.judge_values(reference, edges)))
        elif is_wrong(written):
            culprit = pair.reference.result
        elif pair.reference.result in self.trained and _is_parameter(reference) and not _is_parameter(local):
            slopes, culprit = (_untrained(name),), pair.reference.result
        elif trial.wanted and not pair.is_same_call and pair.has_same_inputs:
            slopes = trial.judge_gradients({})
            if is_wrong(slopes):
                culprit = trial.blame(lambda edges: not is_wrong(trial.judge_gradients(edges)))
        return Judged(
            reference=pair.reference.result,
            candidate=pair.candidate.result,
            how=pair.how,
            local=(*found, *written),
            local_gradients=slopes,
            inherited=inherited,
            culprit=culprit,
        )

    def _judge_outputs(self, output: Node, ours: Running, theirs: Running) -> Iterator[Judged]:
        """Judge what the candidate returns in a place where the reference returns another node's value."""
        reference_output = self.reference.graph.output_node()
        expected, returned = _returned(reference_output), _returned(output)
        if len(expected) != len(returned):
            self.notes.append(f"the reference returns {len(expected)} values and the candidate {len(returned)}")
        for wanted, node in zip(expected, returned, strict=False):
            if not isinstance(wanted, Node) or not isinstance(node, Node) or self.partners.get(node) is wanted:
                continue
            ours.advance_to(wanted)
            reference, local = ours.kept[wanted], self._fed(node, ours, theirs)
            if not is_wrong(inherited_from(wanted.name, reference, theirs.live[node])):
                continue  # what the candidate returns is right, whatever single nodes make of the reference's values
            found = self.judge.judge(wanted.name, reference, local, itemgetter(wanted), {wanted: reference})
            yield Judged(
                reference=wanted,
                candidate=node,
                how="name",
                local=found,
                culprit=wanted if is_wrong(found) else None,
            )


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _untrained(name: str) -> Comparison:
    return Comparison(path=f"{name}.grad", verdict=Verdict.DIVERGED, reason="a constant stands where a parameter was")


def _returned(output: Node) -> list[Any]:
    flat: list[Any] = []

    def take(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                take(item)
        elif isinstance(value, dict):
            for item in value.values():
                take(item)
        else:
            flat.append(value)

    take(output.args[0])
    return flat
