"""A graph that is being run node by node: values are dropped after their last use, and copied before they change.

Who stands in whose place: two calls are the same but for one node, which was put between a value and its reader.

What a run leaves in its inputs and attributes: the last write to each is part of what its writer does.

Two graphs run side by side, node by node: each node of the candidate is fed the reference's values.

The reference runs as far as its partner goes, the candidate's node runs on the reference's values and on its own, and a
value is dropped when nobody will read it any more. What differs when fed the reference's values is wrong by itself;
what differs only on the candidate's own values inherited that.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch.graphs.handles import handles_of
from torchdelta._torch.graphs.nodes import may_write, returns_what_it_writes, writes_to
from torchdelta._torch.process import runtime
from torchdelta.nodewise.local import LocalJudge, NodeJudgement, inherited_from
from torchdelta.nodewise.matching import Alignment
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


class GraphRun:
    """One side of a lockstep."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any], readers: Counter[Node]) -> None:
        self.interpreter = Interpreter(module, garbage_collect_values=False)
        self.waiting = iter(module.graph.nodes)
        self.inputs = iter(inputs)
        self.live: dict[Node, Any] = {}
        """Values as the graph itself goes on with them."""
        self.kept: dict[Node, Any] = {}
        """Values as they were when they were computed, for those who read them from outside."""
        self.drawn_from: dict[Node, runtime.Drawn] = {}
        """Where the generators stood before a node that drew from them."""
        self.done: set[Node] = set()
        self.before_write: dict[Node, dict[Node, Any]] = {}
        """What a node that writes read, as it was before."""
        self.after_write: dict[Node, dict[Node, Any]] = {}
        """What it changed of that, as it was left."""
        self.touched: dict[Node, Node] = {}
        """Nodes whose values are not any more what they were when they were computed, and who wrote to them first."""
        self.state: dict[Node, Any] | None = {} if has_writers(module) else None
        """Inputs and attributes, kept to the end where somebody may write to them."""
        self.initial: dict[Node, Any] = {}
        """Those that were written to, as they were before."""
        self.last_writer: dict[Node, Node] = {}
        self._as_computed = directly_written_nodes(module)
        self.awaited: Counter[Node] = Counter()
        """How often somebody has yet to judge a node's own value."""
        self.readers = readers
        """How many will still read a value."""

    def advance_to(self, node: Node, drawing_from: runtime.Drawn | None = None) -> Any:
        """Run up to and with the node, unless it has run already, and return its value."""
        while node not in self.done:
            current = next(self.waiting)
            self.done.add(current)
            value = self._run(current, drawing_from if current is node else None)
            if current is node:
                return value
        return self.kept.get(node)

    def _run(self, node: Node, drawing_from: runtime.Drawn | None) -> Any:
        if node.op == "output":
            return None
        if node.op == "placeholder":
            value = next(self.inputs, None)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), self.live.__getitem__)
            if writes_to(node):
                self._prepare_write(node)
            before = runtime.drawn()
            if drawing_from is None:
                value = call_node(self.interpreter, node, args, kwargs)
            else:
                with runtime.drawing_from(drawing_from):
                    value = call_node(self.interpreter, node, args, kwargs)
            if runtime.has_drawn_since(before):
                self.drawn_from[node] = before
            if node in self.before_write:
                self._note_write(node)
        if self.state is not None and node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            self.state[node] = value
        self.live[node] = self.kept[node] = value
        for source in node.all_input_nodes:
            self.done_with(source)
        if not self.readers[node]:
            self.done_with(node)
        return value

    def has_judged(self, node: Node) -> None:
        """Let who reads the value from now on read what has become of it."""
        self.awaited[node] -= 1
        if self.awaited[node] > 0:
            return
        self.forget_write(node)
        if node in self.live and node in self.kept and node not in self._as_computed:
            self.kept[node] = self.live[node]

    def left_by(self, node: Node) -> dict[Node, Any]:
        """Return what a node that may write read, as it is since then."""
        return {**self.before_write.get(node, {}), **self.after_write.get(node, {})}

    def forget_write(self, node: Node) -> None:
        """Drop what a node read and left."""
        self.before_write.pop(node, None)
        self.after_write.pop(node, None)

    def done_with(self, node: Node) -> None:
        """Count one reader less, and drop the value after the last."""
        self.readers[node] -= 1
        if self.readers[node] <= 0:
            self.live.pop(node, None)
            self.kept.pop(node, None)

    def _prepare_write(self, node: Node) -> None:
        """Keep copies of what is about to be written to, for who needs it as it was."""
        read = {source: self.live[source] for source in node.all_input_nodes}
        storages = storages_of([read[source] for source in may_write(node)])
        for held in self.before_write.values():
            exposed = {each: value for each, value in held.items() if not storages.isdisjoint(storages_of(value))}
            held |= copy_tensors(exposed)
        self.before_write[node] = before = copy_written_inputs(node, read)
        for other, value in self.kept.items():
            is_wanted = self.awaited[other] > 0 or (other in self._as_computed and other not in self.touched)
            if is_wanted and not storages.isdisjoint(storages_of(value)):
                self.kept[other] = before[other] if other in before else copy_tensors(value)
        for given, value in (self.state or {}).items():
            if given not in self.initial and not storages.isdisjoint(storages_of(value)):
                self.initial[given] = before[given] if given in before else copy_tensors(value)

    def _note_write(self, node: Node) -> None:
        before = self.before_write[node]
        now = changed_values(before, {source: self.live[source] for source in before})
        storages = storages_of(tuple(now.values()))
        self.after_write[node] = copy_tensors(now)
        for other, value in self.live.items():
            if not storages.isdisjoint(storages_of(value)):
                self.touched.setdefault(other, node)
        for given in list(self.initial):
            if not storages.isdisjoint(storages_of((self.state or {})[given])):
                self.last_writer[given] = node
            elif given not in self.last_writer:
                del self.initial[given]


def readers_within(module: GraphModule) -> Counter[Node]:
    """Return how many nodes of the graph itself read each of its values."""
    return Counter(source for node in module.graph.nodes for source in node.all_input_nodes)


def placeholders(module: GraphModule) -> list[Node]:
    """Return the inputs of a graph, in order."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def paired_inputs(reference: GraphModule, candidate: GraphModule) -> dict[Node, Node]:
    """Return the reference's input for each of the candidate's: by place, or by name where one side has more."""
    ours, theirs = placeholders(reference), placeholders(candidate)
    if len(ours) == len(theirs):
        return dict(zip(theirs, ours, strict=True))
    names = {node.name: node for node in ours}
    return {node: names[node.name] for node in theirs if node.name in names}


def is_same_call(ours: Node, theirs: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether both call the same with the same: then neither their values nor their gradients can differ."""
    if ours.op != theirs.op or ours.target != theirs.target or ours.op == "call_module":
        return False
    return bool(_line([ours.args, ours.kwargs], {}) == _line([theirs.args, theirs.kwargs], partners))


def is_same_output(ours: Node, theirs: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell a match from a guess: which of several nodes is one of an operator's outputs, handles do not say."""
    if ours.target is not operator.getitem:
        return True
    source, index = theirs.args[:2] if theirs.target is operator.getitem else (None, None)
    return isinstance(source, Node) and partners.get(source) is ours.args[0] and index == ours.args[1]


def inserted(partners: Mapping[Node, Node]) -> dict[Node, Node]:
    """Return the candidate's unmatched nodes that were put behind a matched one, and the reference's node for that.

    A reader that is the same call but for them says so: it reads there what the reference reads from that node. What
    was put there must be that value again, whatever its reader makes of it.
    """
    found: dict[Node, Node] = {}
    for theirs, ours in partners.items():
        mine, other = ours.all_input_nodes, theirs.all_input_nodes
        if len(mine) != len(other):
            continue
        between = {
            node: place
            for place, node in zip(mine, other, strict=True)
            if node not in partners
            and _is_behind(node, place, partners)
            and not handles_of(node) & handles_of(ours)  # that is its reader's own work
        }
        if between and is_same_call(ours, theirs, {**partners, **between}):
            found.update(between)
    return found


def _is_behind(node: Node, place: Node, partners: Mapping[Node, Node]) -> bool:
    """Tell whether an unmatched node is computed from the place's own partner, through unmatched ones only."""
    waiting, met = [node], {node}
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if partners.get(source) is place:
                return True
            if source not in partners and source not in met:
                met.add(source)
                waiting.append(source)
    return False


def _line(value: Any, partners: Mapping[Node, Node]) -> Any:
    if isinstance(value, Node):
        return partners.get(value, value)
    if isinstance(value, (list, tuple)):
        return [_line(item, partners) for item in value]
    if isinstance(value, dict):
        return {key: _line(item, partners) for key, item in value.items()}
    return repr(value)


@dataclass(kw_only=True)
class FinalWrites:
    """Holds what both sides leave behind against each other, once both have run."""

    reference: GraphModule
    partners: Mapping[Node, Node]
    judge: LocalJudge
    notes: list[str]
    _local: dict[Node, Any] = field(default_factory=dict)
    """What the candidate leaves where its last writer was fed the reference's values."""
    _read: dict[Node, dict[Node, Any]] = field(default_factory=dict)
    """What a writer of the reference read whose partner leaves the writing to somebody else."""

    def note(self, writer: Node, after: Mapping[Node, Any], theirs: GraphRun) -> None:
        """Remember what a writer of the candidate left, fed the reference's values."""
        for given in (given for given, last in theirs.last_writer.items() if last is writer):
            self._local.pop(given, None)
            for source, value in after.items():
                if _start_of(source) is given:
                    self._local[given] = value

    def hold(self, writer: Node, ours: GraphRun) -> None:
        """Keep what a writer of the reference read until the candidate has written, too."""
        if writer in ours.last_writer.values():
            self._read[writer] = copy_tensors(ours.before_write[writer])

    def judged(self, ours: GraphRun, theirs: GraphRun, culprits: Collection[Node]) -> Iterator[NodeJudgement]:
        """Judge every input and attribute that one side wrote to; whoever is a culprit already explains his own."""
        places = {self.partners[node]: node for node in (theirs.state or {}) if node in self.partners}
        written = dict.fromkeys(
            (*ours.last_writer, *(place for place, node in places.items() if node in theirs.initial))
        )
        for given in written:
            ours_last, theirs_last = ours.last_writer.get(given), theirs.last_writer.get(places.get(given, given))
            partner = self.partners.get(theirs_last) if theirs_last is not None else None
            if (partner is not None and partner is ours_last) or ours_last in culprits or partner in culprits:
                continue  # what they write was judged where they did
            yield from self._judged_one(given, places.get(given), ours, theirs)

    def _judged_one(self, given: Node, place: Node | None, ours: GraphRun, theirs: GraphRun) -> Iterator[NodeJudgement]:
        writer = ours.last_writer.get(given)
        other = theirs.last_writer.get(place) if place is not None else None
        if place is not None and other is not None:
            reference = (ours.state or {}).get(given, theirs.initial[place])
            own, local = (theirs.state or {})[place], self._local.get(place)
        else:
            reference = (ours.state or {})[given]
            own = local = ours.initial[given]
        inherited = inherited_from(given.name, reference, own)
        if not is_wrong(inherited):
            return
        if local is None:
            self.notes.append(f"{given.name} is left different, and whether {other} is wrong by itself is not known")
            return
        again, values = itemgetter(given), {given: reference}
        if writer is not None and (read := self._read.get(writer) or ours.before_write.get(writer)) and given in read:
            region = Region(self.reference, (writer,), tuple(read))
            again, values = (lambda values: region.run_with_writes(values)[1][given]), read  # type: ignore[assignment]
        path = f"{writer.name if writer else other} → {given.name}"
        found = self.judge.judge(path, reference, local, again, values)
        blamed = writer or self.partners.get(other, given) if other is not None else writer
        assert blamed is not None
        yield NodeJudgement(
            reference=blamed,
            candidate=other or place or blamed,
            how="name",
            local=found,
            inherited=inherited,
            culprit=blamed if is_wrong(found) else None,
        )


def _start_of(node: Node) -> Node:
    """Return whose memory it is that a node passes on after it wrote to it."""
    while returns_what_it_writes(node):
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    return node


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
    def pairs(self) -> dict[Node, RegionPair]:
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
            reference = region_reading(fed, ours, self.reference, known)
            found[theirs] = RegionPair(
                reference=reference,
                candidate=candidate,
                how=how.get(theirs.name, "name"),
                is_same_call=is_same_call(ours, theirs, self.partners),
                has_same_inputs=fed <= set(reference.reads),
                needs=frozenset((*reference.nodes, *reference.reads, *fed)),
            )
        return found

    def run(self, inputs: Sequence[Any], candidate_inputs: Sequence[Any] | None = None) -> Iterator[NodeJudgement]:
        """Judge pair by pair, in the candidate's order; each side gets copies of the inputs, or has its own."""
        needed = Counter(node for pair in self.pairs.values() for node in pair.needs)
        fed = Counter(
            self.partners[source]
            for node in self.candidate.graph.nodes
            for source in node.all_input_nodes
            if source in self.partners
        )
        ours = GraphRun(self.reference, copy_tensors(tuple(inputs)), readers_within(self.reference) + needed + fed)
        ours.awaited.update(pair.reference.result for pair in self.pairs.values())
        own = inputs if candidate_inputs is None else candidate_inputs
        theirs = GraphRun(self.candidate, copy_tensors(tuple(own)), readers_within(self.candidate))
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

    def _step(self, node: Node, ours: GraphRun, theirs: GraphRun, same: set[Node]) -> Iterator[NodeJudgement]:
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
    def _left(self) -> FinalWrites:
        return FinalWrites(reference=self.reference, partners=self.partners, judge=self.judge, notes=self.notes)

    def _is_untouched(self, source: Node, reader: Node, ours: GraphRun, theirs: GraphRun) -> bool:
        """Tell whether nobody wrote to a value since it was computed, but for who is looked at now."""
        partner = self.partners.get(source)
        writers = (None, self.partners.get(reader))
        return source not in theirs.touched and (partner is None or ours.touched.get(partner) in writers)

    def _fed(self, source: Node, ours: GraphRun, theirs: GraphRun, reader: Node | None = None) -> Any:
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
        self, given: Mapping[Node, Any], node: Node, theirs: GraphRun, drawn: runtime.Drawn | None
    ) -> tuple[Any, dict[Node, Any]]:
        with runtime.drawing_from(drawn):
            return run_with_writes(theirs.interpreter, node, given)

    def _judge(
        self,
        pair: RegionPair,
        reference: Any,
        local: Any,
        after: Mapping[Node, Any],
        inherited: tuple[Comparison, ...],
        ours: GraphRun,
    ) -> NodeJudgement:
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
        return NodeJudgement(
            reference=pair.reference.result,
            candidate=pair.candidate.result,
            how=pair.how,
            local=(*found, *written),
            local_gradients=slopes,
            inherited=inherited,
            culprit=culprit,
        )

    def _judge_outputs(self, output: Node, ours: GraphRun, theirs: GraphRun) -> Iterator[NodeJudgement]:
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
            yield NodeJudgement(
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
