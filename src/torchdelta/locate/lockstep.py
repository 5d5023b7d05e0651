"""Two graphs run side by side, node by node: each node of the candidate is fed the reference's values.

The reference runs as far as its partner goes, the candidate's node runs on the reference's values and on its own, and a
value is dropped when nobody will read it any more. What differs when fed the reference's values is wrong by itself;
what differs only on the candidate's own values inherited that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch import runtime
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policy import Tolerance
from torchdelta.locate.align import Alignment
from torchdelta.locate.blame import Edges, blame
from torchdelta.locate.local import LocalJudge, gradients
from torchdelta.locate.regions import Region, copied, is_discontinuous, is_identical, run_node, tensors_of
from torchdelta.locate.running import Running, placeholders, readers_within
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict

LARGEST = 32
"""Nodes of a region beyond which it is not the work of one node any more."""


@dataclass(frozen=True, kw_only=True)
class Pair:
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


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of one pair."""

    reference: Node
    candidate: Node
    how: str
    local: tuple[Comparison, ...] = ()
    local_gradients: tuple[Comparison, ...] = ()
    inherited: tuple[Comparison, ...] = ()
    culprit: Node | None = None
    """The reference's node whose work is not done, where the pair is wrong by itself."""


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

    @cached_property
    def partners(self) -> dict[Node, Node]:
        """The reference's node for each matched one of the candidate."""
        ours = {node.name: node for node in self.reference.graph.nodes}
        theirs = {node.name: node for node in self.candidate.graph.nodes}
        inputs = zip(placeholders(self.candidate), placeholders(self.reference), strict=False)
        return dict(inputs) | {
            theirs[match.candidate]: ours[match.reference]
            for match in self.alignment.matches
            if match.reference in ours and match.candidate in theirs
        }

    @cached_property
    def pairs(self) -> dict[Node, Pair]:
        """Every pair to be judged, by the candidate's node."""
        how = {match.candidate: match.how for match in self.alignment.matches}
        known = set(self.partners.values())
        found = {}
        for theirs, ours in self.partners.items():
            if theirs.op in ("placeholder", "output"):
                continue
            candidate = Region.before(theirs, self.candidate, self.partners)
            fed = {self.partners[node] for node in candidate.reads}
            reference = _region_from(fed, ours, self.reference, known)
            found[theirs] = Pair(
                reference=reference,
                candidate=candidate,
                how=how.get(theirs.name, "name"),
                is_same_call=self._is_same_call(ours, theirs),
                has_same_inputs=fed <= set(reference.reads),
                needs=frozenset((*reference.nodes, *reference.reads, *fed)),
            )
        return found

    def run(self, inputs: Sequence[Any]) -> Iterator[Judged]:
        """Judge pair by pair, in the candidate's order; each side gets copies of the inputs."""
        needed = Counter(node for pair in self.pairs.values() for node in pair.needs)
        ours = Running(self.reference, copied(tuple(inputs)), readers_within(self.reference) + needed)
        theirs = Running(self.candidate, copied(tuple(inputs)), readers_within(self.candidate))
        same: set[Node] = set()
        with torch.no_grad():
            for node in self.candidate.graph.nodes:
                try:
                    if node.op == "output":
                        yield from self._judge_outputs(node, ours, theirs)
                    else:
                        yield from self._step(node, ours, theirs, same)
                except Exception as error:
                    self.failure, self.failed_at = error, node.name
                    return

    def _step(self, node: Node, ours: Running, theirs: Running, same: set[Node]) -> Iterator[Judged]:
        partner = self.partners.get(node)
        if partner is not None:
            ours.advance_to(partner)
        drawn = ours.drawn_from.get(partner) if partner is not None else None
        is_fed_alike = all(source in same for source in node.all_input_nodes)
        given = None if is_fed_alike else {source: self._fed(source, ours, theirs) for source in node.all_input_nodes}
        own = theirs.advance_to(node, drawn)
        if node.op == "placeholder":
            same.add(node)
            return
        local = own if given is None else self._run_on(given, node, theirs, drawn)
        if partner is None:
            theirs.kept[node] = local
            same |= {node} if is_fed_alike else set()
            return
        reference = ours.kept[partner]
        is_same = is_identical(reference, own)
        same |= {node} if is_same else set()
        pair = self.pairs[node]
        if any(True for _ in tensors_of((reference, local))):
            yield self._judge(pair, reference, local, () if is_same else _inherited(partner.name, reference, own), ours)
        for needed in pair.needs:
            ours.done_with(needed)

    def _fed(self, source: Node, ours: Running, theirs: Running) -> Any:
        partner = self.partners.get(source)
        return theirs.kept[source] if partner is None else ours.kept[partner]

    def _run_on(self, given: Mapping[Node, Any], node: Node, theirs: Running, drawn: runtime.Drawn | None) -> Any:
        with runtime.drawing_from(drawn):
            return run_node(theirs.interpreter, node, given)

    def _judge(
        self, pair: Pair, reference: Any, local: Any, inherited: tuple[Comparison, ...], ours: Running
    ) -> Judged:
        name = pair.reference.result.name
        values = {node: ours.kept[node] for node in pair.needs if node in ours.kept}
        drawn = next((ours.drawn_from[node] for node in pair.reference.nodes if node in ours.drawn_from), None)
        trial = _Trial(pair, values, self.partners, drawn, self.judge, self.trained)
        is_exact = is_discontinuous(pair.reference)
        found = self.judge.judge(name, reference, local, trial.again, trial.given, is_exact=is_exact)
        slopes: tuple[Comparison, ...] = ()
        culprit = None
        if is_wrong(found):
            culprit = trial.blame(lambda edges: not is_wrong(trial.judge_values(reference, edges)))
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
            local=found,
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
            found = self.judge.judge(wanted.name, reference, local, itemgetter(wanted), {wanted: reference})
            yield Judged(
                reference=wanted,
                candidate=node,
                how="name",
                local=found,
                culprit=wanted if is_wrong(found) else None,
            )

    def _is_same_call(self, ours: Node, theirs: Node) -> bool:
        if ours.op != theirs.op or ours.target != theirs.target or ours.op == "call_module":
            return False

        def line(value: Any, partners: Mapping[Node, Node]) -> Any:
            if isinstance(value, Node):
                return partners.get(value, value)
            if isinstance(value, (list, tuple)):
                return [line(item, partners) for item in value]
            if isinstance(value, dict):
                return {key: line(item, partners) for key, item in value.items()}
            return repr(value)

        return bool(line([ours.args, ours.kwargs], {}) == line([theirs.args, theirs.kwargs], self.partners))


@dataclass(frozen=True)
class _Trial:
    """Both regions of a pair on the reference's values, once more and with other things read in single places."""

    pair: Pair
    values: Mapping[Node, Any]
    """Of the reference's nodes."""
    partners: Mapping[Node, Node]
    drawn: runtime.Drawn | None
    by: LocalJudge
    trained: Collection[Node]

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
        return self.by.judge(self.pair.reference.result.name, reference, value, self.again, self.given)

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
        fed = {node: values[self.partners[node]] for node in self.pair.candidate.reads}
        with runtime.drawing_from(self.drawn):
            return self.pair.candidate.run(fed, {edge: values[instead] for edge, instead in edges.items()})


def _region_from(fed: set[Node], node: Node, module: GraphModule, known: set[Node]) -> Region:
    """Return the region that ends in the node and starts from what the candidate's is fed, if there is a small one."""
    if node in fed:
        return Region(module, (), (node,))
    region = Region.before(node, module, known)
    if fed <= set(region.reads):
        return region
    ends = {each for each in module.graph.nodes if each.op in ("placeholder", "get_attr")}
    wider = Region.before(node, module, fed | ends)
    return wider if len(wider.nodes) <= LARGEST and set(wider.reads) <= fed | ends else region


def is_wrong(comparisons: Sequence[Comparison]) -> bool:
    """Tell whether one of them says that both sides do not compute the same."""
    return any(seen.verdict is Verdict.DIVERGED for seen in comparisons)


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _untrained(name: str) -> Comparison:
    return Comparison(path=f"{name}.grad", verdict=Verdict.DIVERGED, reason="a constant stands where a parameter was")


def _inherited(name: str, reference: Any, own: Any) -> tuple[Comparison, ...]:
    return tuple(Judge(policy=Tolerance()).compare(leaves_of(reference, name), leaves_of(own, name))[0])


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


def _unfit(name: str, error: BaseException) -> Comparison:
    reason = f"the candidate's node raised {type(error).__name__}: {error}".splitlines()[0]
    return Comparison(path=name, verdict=Verdict.DIVERGED, reason=reason)
