"""Lockstep: two graphs run side by side, node by node, and each matched pair of nodes is judged on the way.

Each node of the candidate runs twice: on the reference's values, and on the candidate's own. A difference on the
reference's values is the node's own fault (local error). A difference that shows only on the candidate's own values is
inherited from nodes before it, and is not blamed.

The reference runs as far as the partner of the candidate's current node. A value is dropped after its last reader, so
peak memory stays near that of running both graphs. In-place writes make this harder: a value that is about to be
overwritten is copied first if it is still needed as it was.

`Lockstep.run` yields a `NodeJudgement` for each pair; start there. Then come `FinalWrites`, which judges the inputs and
attributes that were written to, `GraphRun`, which runs one side, and functions that tell which nodes correspond.
`lockstep_seam` uses all of it at a seam.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch.graphs.handles import handles_of
from torchdelta._torch.graphs.nodes import is_unset, may_write, returns_what_it_writes, writes_to
from torchdelta._torch.process import runtime
from torchdelta.nodewise.local import LocalJudge, NodeJudgement, inherited_from
from torchdelta.nodewise.matching import Alignment
from torchdelta.nodewise.narrowing import RegionParts, narrow
from torchdelta.nodewise.regions import (
    Region,
    call_node,
    changed_values,
    copy_tensors,
    copy_written_inputs,
    directly_written_nodes,
    has_writers,
    is_discontinuous,
    is_identical,
    region_reading,
    run_with_writes,
    storages_of,
    tensors_of,
)
from torchdelta.nodewise.trials import RegionPair, Trial, is_wrong
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict


@dataclass(kw_only=True)
class Lockstep:
    """One run of two graphs on the same inputs, which judges every matched pair of nodes."""

    reference: GraphModule
    candidate: GraphModule
    alignment: Alignment
    judge: LocalJudge
    trained: Collection[Node] = frozenset()
    """The nodes of the reference that need a gradient; if there are none, gradients are not compared."""
    excluded: frozenset[Node] = frozenset()
    """Nodes of the candidate that count as unmatched, so that they are judged with the nodes behind them."""
    failure: BaseException | None = None
    """The exception of a node that raised; the nodes before it were judged."""
    failed_at: str = ""
    notes: list[str] = field(default_factory=list)
    parts_of_regions: dict[Node, RegionParts] = field(default_factory=dict)
    """The parts of each pair whose value is wrong, by the candidate's node."""
    _lowered: dict[Node, torch.dtype] = field(default_factory=dict)
    _right: set[Node] = field(default_factory=set)
    """The reference's nodes whose own pair was judged and is right."""

    @cached_property
    def partners(self) -> dict[Node, Node]:
        """The reference's node for each matched node of the candidate (`aligned`), without those in `excluded`.

        An excluded node that both graphs return at the same place is matched with the reference's there, because no
        work can be moved behind an output. So are two nodes there that the alignment does not match with any.
        """
        matched = {node: partner for node, partner in self.aligned.items() if node not in self.excluded}
        known = set(self.aligned.values())
        returned = (_returned_values(side.graph.output_node()) for side in (self.candidate, self.reference))
        outputs = {
            node: partner
            for node, partner in zip(*returned, strict=False)
            if isinstance(node, Node) and isinstance(partner, Node)
            if node in self.excluded or (node not in self.aligned and partner not in known)
        }
        return {**matched, **outputs}

    @cached_property
    def aligned(self) -> dict[Node, Node]:
        """The reference's node for each node of the candidate that the alignment matches.

        Inputs and inserted nodes (`inserted_nodes`) are matched too, but not nodes of nested graphs. Two nodes that are
        not the same output of their operators (`is_same_output`) are left out.
        """
        ours = {node.name: node for node in self.reference.graph.nodes}
        theirs = {node.name: node for node in self.candidate.graph.nodes}
        partners = pair_inputs(self.reference, self.candidate) | {
            theirs[match.candidate]: ours[match.reference]
            for match in self.alignment.matches
            if match.reference in ours and match.candidate in theirs
        }
        partners |= inserted_nodes(partners)
        return {node: partner for node, partner in partners.items() if is_same_output(partner, node, partners)}

    @cached_property
    def pairs(self) -> dict[Node, RegionPair]:
        """The pairs of regions to judge, by the candidate's node: one for each matched node that is not an input.

        The candidate's region ends in the matched node, and reads the nearest matched nodes before it. The reference's
        ends in the partner, and reads the partners of those nodes if it can (`region_reading`).
        """
        how = {match.candidate: match.how for match in self.alignment.matches}
        # a region reads constants as inputs, so that its truth has them in float64
        constants = {node for node in self.reference.graph.nodes if node.op == "get_attr"}
        known = set(self.partners.values()) | constants
        pairs = {}
        for theirs, ours in self.partners.items():
            if theirs.op in ("placeholder", "output"):
                continue
            candidate = Region.before(theirs, self.candidate, self.partners)
            sources = {self.partners[node] for node in candidate.reads}
            reference = region_reading(sources, ours, self.reference, known)
            pairs[theirs] = RegionPair(
                reference=reference,
                candidate=candidate,
                how=how.get(theirs.name, "name"),
                is_same_call=is_same_call(ours, theirs, self.partners),
                has_same_inputs=sources <= set(reference.reads),
                needs=frozenset((*reference.nodes, *reference.reads, *sources)),
            )
        return pairs

    def run(self, inputs: Sequence[Any], candidate_inputs: Sequence[Any] | None = None) -> Iterator[NodeJudgement]:
        """Run both graphs and yield a judgement for each pair that has a tensor or writes, in the candidate's order.

        Both sides run on copies of `inputs`, or the candidate on copies of `candidate_inputs` unless they are None.
        After the last node come judgements of outputs that differ and are not partners (`_judge_outputs`), and of
        inputs and attributes that were written to and differ (`FinalWrites.judge_all`). If a node or its judgement
        raises, the run ends there without raising; `failure` is the exception, `failed_at` the candidate's node.
        """
        needed = Counter(node for pair in self.pairs.values() for node in pair.needs)
        read_as_partner = Counter(
            self.partners[source]
            for node in self.candidate.graph.nodes
            for source in node.all_input_nodes
            if source in self.partners
        )
        readers = count_readers(self.reference) + needed + read_as_partner
        ours = GraphRun(self.reference, copy_tensors(tuple(inputs)), readers)
        ours.judgements_due.update(pair.reference.result for pair in self.pairs.values())
        own = inputs if candidate_inputs is None else candidate_inputs
        theirs = GraphRun(self.candidate, copy_tensors(tuple(own)), count_readers(self.candidate))
        identical: set[Node] = set()
        culprits: set[Node] = set()
        with torch.no_grad():
            for node in self.candidate.graph.nodes:
                try:
                    if node.op == "output":
                        yield from self._judge_outputs(node, ours, theirs)
                        ours.advance_to(self.reference.graph.output_node())
                        yield from self._final_writes.judge_all(ours, theirs, culprits)
                    else:
                        for judgement in self._step(node, ours, theirs, identical):
                            culprits |= {judgement.culprit} if judgement.culprit is not None else set()
                            yield judgement
                        for source in node.all_input_nodes:
                            if source in self.partners:
                                ours.release(self.partners[source])
                except Exception as error:
                    self.failure, self.failed_at = error, node.name
                    return

    def _step(self, node: Node, ours: GraphRun, theirs: GraphRun, identical: set[Node]) -> Iterator[NodeJudgement]:
        """Run one node of the candidate; yield its judgement if it has a partner, and a tensor or a write to judge.

        The reference runs up to the partner first. The node runs on the candidate's own values, and again on the
        reference's if its inputs may differ from those. Inputs of the graph are not judged, and of uninitialised memory
        only shape and dtype. `identical` has the candidate's nodes whose own value is the reference's; the node is
        added if it is one of them. The value of a node without a partner, run on the reference's values, is kept in
        `theirs.computed` for its readers.
        """
        partner = self.partners.get(node)
        end = node if partner is not None else self._region_ends.get(node)
        if end is not None:
            ours.advance_to(self.partners[end])
        pair = self.pairs.get(end) if end is not None else None
        draws = self._draws_of(node, pair, ours, theirs) if pair is not None else None
        has_identical_inputs = all(
            source in identical and self._is_unwritten(source, node, ours, theirs) for source in node.all_input_nodes
        )
        inputs = (
            None
            if has_identical_inputs
            else {source: self._reference_value(source, ours, theirs, partner) for source in node.all_input_nodes}
        )
        own = theirs.advance_to(node, draws)
        if partner in ours.computed:  # an input that nothing reads is not kept
            self._record_dtype(node, ours.computed[partner], own)
        if node.op == "placeholder":
            identical |= set() if node in self._lowered else {node}
            return
        local, after = (own, theirs.inputs_after(node)) if inputs is None else self._run_on(inputs, node, theirs, draws)
        theirs.forget_write(node)
        self._final_writes.record_writer(node, after, theirs)
        if partner is None:
            theirs.computed[node] = local
            identical |= {node} if has_identical_inputs else set()
            return
        reference = ours.computed[partner]
        is_same = is_identical(reference, own)
        identical |= {node} if is_same else set()
        assert pair is not None
        if after or any(True for _ in tensors_of((reference, local))):
            is_unset_memory = _is_same_memory(partner, reference, node, local)
            local = reference if is_unset_memory else local
            inherited = () if is_same or is_unset_memory else inherited_from(partner.name, reference, own)
            yield self._judge(pair, reference, local, after, inherited, ours)
        if not after:
            self._final_writes.keep_inputs(partner, ours)
        ours.finish_judging(partner)
        for needed in pair.needs:
            ours.release(needed)

    @cached_property
    def _region_ends(self) -> dict[Node, Node]:
        """For an unmatched node of the candidate in a region: the node at the end of that region."""
        return {node: end for end, pair in self.pairs.items() for node in pair.candidate.nodes[:-1]}

    def _draws_of(
        self, node: Node, pair: RegionPair, ours: GraphRun, theirs: GraphRun
    ) -> runtime.GeneratorStates | None:
        """Return the state of the random generators for a node of the candidate's region; None for the present one.

        The first node of the region that draws gets the state of the first that draws in the reference's, and so on.
        But the last node gets that of the reference's last node, if that draws.
        """
        last = pair.reference.result
        if node is pair.candidate.result and last in ours.draws:
            return ours.draws[last]
        states = [ours.draws[each] for each in pair.reference.nodes if each in ours.draws]
        drawn_count = sum(each in theirs.draws for each in pair.candidate.nodes)
        return states[min(drawn_count, len(states) - 1)] if states else None

    @cached_property
    def _final_writes(self) -> FinalWrites:
        """The comparison of inputs and attributes that nodes wrote to; it adds its notes to those of the run."""
        return FinalWrites(reference=self.reference, partners=self.partners, judge=self.judge, notes=self.notes)

    def _is_unwritten(self, source: Node, reader: Node, ours: GraphRun, theirs: GraphRun) -> bool:
        """Tell whether a value is as it was computed on both sides, apart from a write by the reader's partner.

        `source`, whose value it is, and `reader` are nodes of the candidate. A source without a partner counts on its
        own side alone.
        """
        partner = self.partners.get(source)
        writers = (None, self.partners.get(reader))
        return source not in theirs.first_writer and (partner is None or ours.first_writer.get(partner) in writers)

    def _reference_value(self, source: Node, ours: GraphRun, theirs: GraphRun, reader: Node | None = None) -> Any:
        """Return the reference's value for a node of the candidate, or the candidate's value if it has no partner.

        `reader` is the node of the reference that reads the value; if it writes, the value is that from before its
        write. The value is cast if the candidate has another dtype on purpose.
        """
        partner = self.partners.get(source)
        if partner is None:
            return theirs.computed[source]
        # a reader that writes gets the value from before its write
        value = (
            ours.before_write.get(reader, {}).get(partner, ours.computed[partner]) if reader else ours.computed[partner]
        )
        return value.to(self._lowered[source]) if source in self._lowered else value

    def _record_dtype(self, node: Node, reference: Any, own: Any) -> None:
        """Record the candidate's dtype at a node in `_lowered`, if the transform lowers dtypes and the dtypes differ.

        Nothing is recorded unless both values are float tensors. `own` is the candidate's value.
        """
        if (
            self.judge.lowered_to is None
            or not isinstance(own, torch.Tensor)
            or not isinstance(reference, torch.Tensor)
        ):
            return
        if own.is_floating_point() and reference.is_floating_point() and own.dtype != reference.dtype:
            self._lowered[node] = own.dtype

    def _run_on(
        self, inputs: Mapping[Node, Any], node: Node, theirs: GraphRun, draws: runtime.GeneratorStates | None
    ) -> tuple[Any, dict[Node, Any]]:
        """Return the value of a node of the candidate for these inputs, and its inputs as they are after its writes.

        The second is empty if the node does not write. The inputs themselves are not changed. The random generators
        start from `draws`, or from their present state, and are left as they were.
        """
        with runtime.drawing_from(draws):
            return run_with_writes(theirs.interpreter, node, inputs)

    def _judge(
        self,
        pair: RegionPair,
        reference: Any,
        local: Any,
        after: Mapping[Node, Any],
        inherited: tuple[Comparison, ...],
        ours: GraphRun,
    ) -> NodeJudgement:
        """Return the judgement of a pair: of its value, the inputs that it wrote to, and its gradients, with a culprit.

        `local` is the candidate's value, and `after` its inputs after its writes, both on the reference's values. If
        these are right, a constant in the place of a trained parameter is DIVERGED; otherwise gradients are compared if
        an input is trained, the two calls differ, and the regions have the same inputs. The culprit is None if nothing
        is wrong, and then the reference's node is added to `_right`. For a wrong value or gradient it is the node that
        `Trial.blame` returns, unless that is in `_right`; in all other cases it is the reference's node. If `narrow`
        finds the blamed node right, it is the last node of the wrong part instead. `inherited` is only copied into the
        judgement.
        """
        name = pair.reference.result.name
        values = {node: ours.computed[node] for node in pair.needs if node in ours.computed}
        values |= ours.before_write.get(pair.reference.result, {})
        draws = next((ours.draws[node] for node in pair.reference.nodes if node in ours.draws), None)
        trial = Trial(pair, values, self.partners, draws, self.judge, self.trained, self._lowered, self.aligned)
        is_exact = is_discontinuous(pair.reference)
        comparisons = self.judge.judge(
            name, reference, local, trial.run_reference, trial.inputs, is_exact=is_exact, within=trial
        )
        written = trial.judge_written(ours.after_write.get(pair.reference.result, {}), after)
        gradients: tuple[Comparison, ...] = ()
        culprit = None
        if is_wrong(comparisons):
            parts = self.parts_of_regions[pair.candidate.result] = narrow(trial, reference)
            culprit = trial.blame(lambda edges: not is_wrong(trial.judge_values(reference, edges)))
            if any(culprit in part for part in parts.right):
                culprit = next((node for node in reversed(pair.reference.nodes) if node in parts.wrong), culprit)
            # a node that is right by itself is not to blame: its reader reads something else
            culprit = pair.reference.result if culprit in self._right else culprit
        elif is_wrong(written):
            culprit = pair.reference.result
        elif pair.reference.result in self.trained and _is_parameter(reference) and not _is_parameter(local):
            gradients, culprit = (_untrained_comparison(name),), pair.reference.result
        elif trial.trained_inputs and not pair.is_same_call and pair.has_same_inputs:
            gradients = trial.judge_gradients({})
            if is_wrong(gradients):
                culprit = trial.blame(lambda edges: not is_wrong(trial.judge_gradients(edges)))
                culprit = pair.reference.result if culprit in self._right else culprit
        if culprit is None:
            self._right.add(pair.reference.result)
        replaced = pair.reference.calls_until(culprit) if culprit in pair.reference.nodes else ()
        narrowing = self.parts_of_regions.get(pair.candidate.result)
        wrong_part = narrowing.wrong if narrowing else frozenset(replaced)
        return NodeJudgement(
            reference=pair.reference.result,
            candidate=pair.candidate.result,
            how=pair.how,
            local=(*comparisons, *written),
            local_gradients=gradients,
            inherited=inherited,
            culprit=culprit,
            replaced=tuple(node for node in replaced if culprit not in wrong_part or node in wrong_part),
        )

    def _judge_outputs(self, output: Node, ours: GraphRun, theirs: GraphRun) -> Iterator[NodeJudgement]:
        """Yield a judgement of each output for which the graphs return nodes that are not partners and that differ.

        `output` is the candidate's output node. The nodes differ if `inherited_from` says that their values in the two
        sides' own runs do. The reference's node is the culprit if the candidate's node is wrong on the reference's
        values too, and otherwise there is none. If the graphs return different numbers of values, a note is added, and
        the surplus is not judged. Constants are not judged.
        """
        reference_output = self.reference.graph.output_node()
        expected_values, returned_values = _returned_values(reference_output), _returned_values(output)
        if len(expected_values) != len(returned_values):
            self.notes.append(
                f"the reference returns {len(expected_values)} values and the candidate {len(returned_values)}"
            )
        for expected_node, node in zip(expected_values, returned_values, strict=False):
            if (
                not isinstance(expected_node, Node)
                or not isinstance(node, Node)
                or self.partners.get(node) is expected_node
            ):
                continue
            ours.advance_to(expected_node)
            reference, local = ours.computed[expected_node], self._reference_value(node, ours, theirs)
            if not is_wrong(inherited_from(expected_node.name, reference, theirs.current[node])):
                continue  # the candidate's own output is right, even if its node differs on the reference's values
            comparisons = self.judge.judge(
                expected_node.name, reference, local, itemgetter(expected_node), {expected_node: reference}
            )
            yield NodeJudgement(
                reference=expected_node,
                candidate=node,
                how="name",
                local=comparisons,
                culprit=expected_node if is_wrong(comparisons) else None,
            )


def _is_same_memory(ours: Node, reference: Any, theirs: Node, candidate: Any) -> bool:
    """Tell whether both nodes return uninitialised memory of one shape and dtype, so that the elements mean nothing."""
    if not (is_unset(ours) and is_unset(theirs)):
        return False
    if not isinstance(reference, torch.Tensor) or not isinstance(candidate, torch.Tensor):
        return False
    return (reference.shape, reference.dtype) == (candidate.shape, candidate.dtype)


def _is_parameter(value: Any) -> bool:
    """Tell whether a value is a leaf tensor that requires grad."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _untrained_comparison(name: str) -> Comparison:
    """Return the DIVERGED comparison `NAME.grad` of a parameter in whose place the candidate has a constant."""
    return Comparison(path=f"{name}.grad", verdict=Verdict.DIVERGED, reason="a constant takes the place of a parameter")


def _returned_values(output: Node) -> list[Any]:
    """Return the nodes and constants that a graph returns, in order; lists, tuples and dicts are taken apart."""
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


@dataclass(kw_only=True)
class FinalWrites:
    """Compares the inputs and attributes of both sides once both have run, because nodes may have written to them."""

    reference: GraphModule
    partners: Mapping[Node, Node]
    judge: LocalJudge
    notes: list[str]
    _candidate_state: dict[Node, Any] = field(default_factory=dict)
    """Inputs and attributes of the candidate after their last writer, which ran on the reference's values."""
    _writer_inputs: dict[Node, dict[Node, Any]] = field(default_factory=dict)
    """The inputs of a writer of the reference whose partner does not write itself."""

    def record_writer(self, writer: Node, after: Mapping[Node, Any], theirs: GraphRun) -> None:
        """Record the values of the graph's inputs and attributes whose last writer so far is this candidate's node.

        `after` has the node's inputs after its write, when it ran on the reference's values. Values that an earlier
        writer left are forgotten.
        """
        for start in (start for start, last in theirs.last_writer.items() if last is writer):
            self._candidate_state.pop(start, None)
            for source, value in after.items():
                if _memory_owner(source) is start:
                    self._candidate_state[start] = value

    def keep_inputs(self, writer: Node, ours: GraphRun) -> None:
        """Keep copies of the inputs of a node of the reference from before its write, if it wrote to the graph's state.

        It did if it is the last writer so far of one of the graph's inputs or attributes.
        """
        if writer in ours.last_writer.values():
            self._writer_inputs[writer] = copy_tensors(ours.before_write[writer])

    def judge_all(self, ours: GraphRun, theirs: GraphRun, culprits: Collection[Node]) -> Iterator[NodeJudgement]:
        """Yield a judgement of each input and attribute of the graphs that a side wrote to and that ends up different.

        It is left out if its last writers are partners, which were judged when they ran, or if the last writer of the
        reference or the partner of the candidate's is in `culprits`. One of the candidate's without a partner is left
        out too.
        """
        candidate_starts = {self.partners[node]: node for node in (theirs.state or {}) if node in self.partners}
        starts = dict.fromkeys(
            (*ours.last_writer, *(start for start, node in candidate_starts.items() if node in theirs.initial_state))
        )
        for start in starts:
            our_writer = ours.last_writer.get(start)
            their_writer = theirs.last_writer.get(candidate_starts.get(start, start))
            partner = self.partners.get(their_writer) if their_writer is not None else None
            if (partner is not None and partner is our_writer) or our_writer in culprits or partner in culprits:
                continue  # a matched pair of writers was judged when it ran, and a culprit explains its own writes
            yield from self._judge_state(start, candidate_starts.get(start), ours, theirs)

    def _judge_state(
        self, start: Node, candidate_start: Node | None, ours: GraphRun, theirs: GraphRun
    ) -> Iterator[NodeJudgement]:
        """Yield the judgement of one input or attribute of the graphs, or nothing if both sides leave it close enough.

        `start` is its node in the reference, and `candidate_start` that in the candidate. A candidate that does not
        write to it has the value from before the reference's writes. The culprit is the reference's writer; without
        one, the partner of the candidate's writer, or `start` if that has no partner. It is None if the candidate's
        writer is right on the reference's values. If the candidate's value on these is not known, a note is added and
        nothing is yielded.
        """
        writer = ours.last_writer.get(start)
        other = theirs.last_writer.get(candidate_start) if candidate_start is not None else None
        if candidate_start is not None and other is not None:
            reference = (ours.state or {}).get(start, theirs.initial_state[candidate_start])
            own, local = (theirs.state or {})[candidate_start], self._candidate_state.get(candidate_start)
        else:
            reference = (ours.state or {})[start]
            own = local = ours.initial_state[start]
        inherited = inherited_from(start.name, reference, own)
        if not is_wrong(inherited):
            return
        if local is None:
            self.notes.append(f"{start.name} differs at the end, and whether {other} is wrong by itself is not known")
            return
        again, values = itemgetter(start), {start: reference}
        inputs = (self._writer_inputs.get(writer) or ours.before_write.get(writer)) if writer is not None else None
        if writer is not None and inputs and start in inputs:
            region = Region(self.reference, (writer,), tuple(inputs))
            again, values = (lambda values: region.run_with_writes(values)[1][start]), inputs  # type: ignore[assignment]
        path = f"{writer.name if writer else other} → {start.name}"
        comparisons = self.judge.judge(path, reference, local, again, values)
        culprit = writer or self.partners.get(other, start) if other is not None else writer
        assert culprit is not None
        yield NodeJudgement(
            reference=culprit,
            candidate=other or candidate_start or culprit,
            how="name",
            local=comparisons,
            inherited=inherited,
            culprit=culprit if is_wrong(comparisons) else None,
        )


def _memory_owner(node: Node) -> Node:
    """Return the node that computed the memory which a chain of writers wrote to and passed on.

    A node that does not return what it writes to is returned itself.
    """
    while returns_what_it_writes(node):
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    return node


class GraphRun:
    """One side of a lockstep: runs a graph node by node, and keeps values only as long as they are needed."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any], readers: Counter[Node]) -> None:
        """Prepare a run on these inputs; `readers` counts the readers of each value, outside readers included.

        Nothing runs yet. The run may write to the inputs, and counts `readers` down.
        """
        self.interpreter = Interpreter(module, garbage_collect_values=False)
        self.pending = iter(module.graph.nodes)
        self.inputs = iter(inputs)
        self.current: dict[Node, Any] = {}
        """Values as the graph itself reads them, with every write so far."""
        self.computed: dict[Node, Any] = {}
        """Values as they were when they were computed, for readers outside of this graph."""
        self.draws: dict[Node, runtime.GeneratorStates] = {}
        """The state of the random generators before each node that drew from them."""
        self.executed: set[Node] = set()
        self.before_write: dict[Node, dict[Node, Any]] = {}
        """The inputs of each node that writes, as they were before the write."""
        self.after_write: dict[Node, dict[Node, Any]] = {}
        """The inputs that the node changed, as they were after the write."""
        self.first_writer: dict[Node, Node] = {}
        """The first node that wrote to a value after it was computed, by the node whose value it is."""
        self.state: dict[Node, Any] | None = {} if has_writers(module) else None
        """Inputs and attributes, kept to the end; None if no node of the graph may write."""
        self.initial_state: dict[Node, Any] = {}
        """The inputs and attributes that were written to, as they were before."""
        self.last_writer: dict[Node, Node] = {}
        self._directly_written = directly_written_nodes(module)
        self.judgements_due: Counter[Node] = Counter()
        """How many judgements of a node's own value are still to come."""
        self.readers_due = readers
        """How many readers of a value are still to come."""

    def advance_to(self, node: Node, drawing_from: runtime.GeneratorStates | None = None) -> Any:
        """Run the graph up to and including the node, unless it has run already, and return the node's value.

        Of a node that has run already, return the value that outside readers get, or None if it was dropped.
        `drawing_from` is the state of the random generators for the node itself; after it they are put back.
        """
        while node not in self.executed:
            upcoming = next(self.pending)
            self.executed.add(upcoming)
            value = self._run(upcoming, drawing_from if upcoming is node else None)
            if upcoming is node:
                return value
        return self.computed.get(node)

    def _run(self, node: Node, drawing_from: runtime.GeneratorStates | None) -> Any:
        """Run one node, record its value, draws and writes, release its inputs, and return its value.

        A placeholder takes the next input, or None if there is none left. The output node does nothing, and returns
        None. `drawing_from` is the state of the random generators for this node, or None for the present one.
        """
        if node.op == "output":
            return None
        if node.op == "placeholder":
            value = next(self.inputs, None)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), self.current.__getitem__)
            if writes_to(node):
                self._copy_before_write(node)
            before = drawing_from or runtime.generator_states()
            with runtime.drawing_from(drawing_from) if drawing_from is not None else nullcontext():
                value = call_node(self.interpreter, node, args, kwargs)
                if runtime.has_drawn_since(before):
                    self.draws[node] = before
            if node in self.before_write:
                self._record_write(node)
        if self.state is not None and node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            self.state[node] = value
        self.current[node] = self.computed[node] = value
        for source in node.all_input_nodes:
            self.release(source)
        if not self.readers_due[node]:
            self.release(node)
        return value

    def finish_judging(self, node: Node) -> None:
        """Count one judgement of the node's value less; after the last one, release what was kept for it.

        The copies of its inputs around its write are dropped, and outside readers get the value with its later writes,
        unless another node writes to it directly and returns it.
        """
        self.judgements_due[node] -= 1
        if self.judgements_due[node] > 0:
            return
        self.forget_write(node)
        if node in self.current and node in self.computed and node not in self._directly_written:
            self.computed[node] = self.current[node]

    def inputs_after(self, node: Node) -> dict[Node, Any]:
        """Return the inputs of a node that may write, as they are after it ran, by node.

        The dict is empty if the node does not write, and after `forget_write`.
        """
        return {**self.before_write.get(node, {}), **self.after_write.get(node, {})}

    def forget_write(self, node: Node) -> None:
        """Drop the copies of a node's inputs from before and after its write."""
        self.before_write.pop(node, None)
        self.after_write.pop(node, None)

    def release(self, node: Node) -> None:
        """Count one reader of the node's value less, and drop the value after the last reader."""
        self.readers_due[node] -= 1
        if self.readers_due[node] <= 0:
            self.current.pop(node, None)
            self.computed.pop(node, None)

    def _copy_before_write(self, node: Node) -> None:
        """Copy the values that the node is about to write to and that are still needed as they are.

        These are its own inputs (`before_write`), inputs kept for other writers, values in `computed` that are still to
        be judged or were not written directly yet but will be, and inputs and attributes of the graph at their first
        write (`initial_state`).
        """
        inputs = {source: self.current[source] for source in node.all_input_nodes}
        storages = storages_of([inputs[source] for source in may_write(node)])
        for copies in self.before_write.values():
            shared = {each: value for each, value in copies.items() if not storages.isdisjoint(storages_of(value))}
            copies |= copy_tensors(shared)
        self.before_write[node] = before = copy_written_inputs(node, inputs)
        for other, value in self.computed.items():
            is_wanted = self.judgements_due[other] > 0 or (
                other in self._directly_written and other not in self.first_writer
            )
            if is_wanted and not storages.isdisjoint(storages_of(value)):
                self.computed[other] = before[other] if other in before else copy_tensors(value)
        for start, value in (self.state or {}).items():
            if start not in self.initial_state and not storages.isdisjoint(storages_of(value)):
                self.initial_state[start] = before[start] if start in before else copy_tensors(value)

    def _record_write(self, node: Node) -> None:
        """Record what the node changed, after it ran: its inputs, values that share their memory, and state.

        The changed inputs are copied to `after_write`. The node becomes the `first_writer` of changed values that have
        none, and the `last_writer` of the graph's changed inputs and attributes. `_copy_before_write` has put those
        that might change into `initial_state`; the ones that no node has changed so far are removed from it again.
        """
        before = self.before_write[node]
        changes = changed_values(before, {source: self.current[source] for source in before})
        storages = storages_of(tuple(changes.values()))
        self.after_write[node] = copy_tensors(changes)
        for other, value in self.current.items():
            if not storages.isdisjoint(storages_of(value)):
                self.first_writer.setdefault(other, node)
        for start in list(self.initial_state):
            if not storages.isdisjoint(storages_of((self.state or {})[start])):
                self.last_writer[start] = node
            elif start not in self.last_writer:
                del self.initial_state[start]


def count_readers(module: GraphModule) -> Counter[Node]:
    """Return the number of nodes in the graph that read each node."""
    return Counter(source for node in module.graph.nodes for source in node.all_input_nodes)


def placeholders(module: GraphModule) -> list[Node]:
    """Return the inputs of a graph, in order."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def pair_inputs(reference: GraphModule, candidate: GraphModule) -> dict[Node, Node]:
    """Return the reference's input for each of the candidate's: by position, or by name if one side has more inputs.

    An input of the candidate whose name the reference does not have is left out.
    """
    ours, theirs = placeholders(reference), placeholders(candidate)
    if len(ours) == len(theirs):
        return dict(zip(theirs, ours, strict=True))
    names = {node.name: node for node in ours}
    return {node: names[node.name] for node in theirs if node.name in names}


def is_same_call(ours: Node, theirs: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether both nodes have the same operation and the same arguments, where a node is the same as its partner.

    False for calls of modules. `partners` has the reference's node for each matched node of the candidate.
    """
    if ours.op != theirs.op or ours.target != theirs.target or ours.op == "call_module":
        return False
    return bool(_with_partners([ours.args, ours.kwargs], {}) == _with_partners([theirs.args, theirs.kwargs], partners))


def _with_partners(value: Any, partners: Mapping[Node, Node]) -> Any:
    """Return arguments in a form that can be compared: partners in place of nodes, and the repr of other leaves.

    A node without a partner stays itself. Tuples become lists, and dicts keep their keys.
    """
    if isinstance(value, Node):
        return partners.get(value, value)
    if isinstance(value, (list, tuple)):
        return [_with_partners(item, partners) for item in value]
    if isinstance(value, dict):
        return {key: _with_partners(item, partners) for key, item in value.items()}
    return repr(value)


def is_same_output(ours: Node, theirs: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether a node of the reference (`ours`) and its match in the candidate (`theirs`) can be the same output.

    True if `ours` is not a `getitem`. Otherwise `theirs` must be one too, with the same index, and the nodes that both
    read must be partners; `partners` maps candidate nodes to the reference's. Handles do not tell the outputs of one
    operator apart, so that a match by handles may pair two different outputs.
    """
    if ours.target is not operator.getitem:
        return True
    source, index = theirs.args[:2] if theirs.target is operator.getitem else (None, None)
    return isinstance(source, Node) and partners.get(source) is ours.args[0] and index == ours.args[1]


def inserted_nodes(partners: Mapping[Node, Node]) -> dict[Node, Node]:
    """Return the unmatched nodes of the candidate that were inserted between a matched node and its reader.

    The values of the dict are the reference's nodes whose values the inserted ones must have. The reader shows it: it
    is the same call as its partner, except that it reads the inserted node where its partner reads that node directly.
    A node that shares a handle with the reader's partner is a part of the reader, and is left out.
    """
    inserted: dict[Node, Node] = {}
    for theirs, ours in partners.items():
        our_inputs, their_inputs = ours.all_input_nodes, theirs.all_input_nodes
        if len(our_inputs) != len(their_inputs):
            continue
        between = {
            node: source
            for source, node in zip(our_inputs, their_inputs, strict=True)
            if node not in partners
            and _is_computed_from(node, source, partners)
            and not handles_of(node) & handles_of(ours)  # a shared handle makes it a part of the reader
        }
        if between and is_same_call(ours, theirs, {**partners, **between}):
            inserted.update(between)
    return inserted


def _is_computed_from(node: Node, source_partner: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether a node of the candidate depends on the partner of `source_partner` through unmatched nodes only.

    `source_partner` is a node of the reference, and `partners` has the reference's node for each matched node.
    """
    pending, visited = [node], {node}
    while pending:
        for source in pending.pop().all_input_nodes:
            if partners.get(source) is source_partner:
                return True
            if source not in partners and source not in visited:
                visited.add(source)
                pending.append(source)
    return False
