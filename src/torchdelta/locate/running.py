"""A graph that is being run node by node: values are dropped after their last use, and copied before they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch import runtime
from torchdelta._torch.nodes import may_write, writes_to
from torchdelta.locate.regions import call_node, copied, safe_from, storages_of
from torchdelta.locate.writes import changed, has_writers, written_directly


class Running:
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
        self._as_computed = written_directly(module)
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
            held |= copied(exposed)
        self.before_write[node] = before = safe_from(node, read)
        for other, value in self.kept.items():
            is_wanted = self.awaited[other] > 0 or (other in self._as_computed and other not in self.touched)
            if is_wanted and not storages.isdisjoint(storages_of(value)):
                self.kept[other] = before[other] if other in before else copied(value)
        for given, value in (self.state or {}).items():
            if given not in self.initial and not storages.isdisjoint(storages_of(value)):
                self.initial[given] = before[given] if given in before else copied(value)

    def _note_write(self, node: Node) -> None:
        before = self.before_write[node]
        now = changed(before, {source: self.live[source] for source in before})
        storages = storages_of(tuple(now.values()))
        self.after_write[node] = copied(now)
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
