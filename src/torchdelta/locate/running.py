"""A graph that is being run node by node: values are dropped after their last use, and copied before they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch import runtime, tensors
from torchdelta._torch.nodes import writes_to
from torchdelta.locate.regions import call_node, copied, tensors_of


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
                self.before_write[node] = copied({source: self.live[source] for source in node.all_input_nodes})
                self._protect(args, kwargs)
            before = runtime.drawn()
            if drawing_from is None:
                value = call_node(self.interpreter, node, args, kwargs)
            else:
                with runtime.drawing_from(drawing_from):
                    value = call_node(self.interpreter, node, args, kwargs)
            if runtime.has_drawn_since(before):
                self.drawn_from[node] = before
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
        self.before_write.pop(node, None)
        if node in self.live and node in self.kept:
            self.kept[node] = self.live[node]

    def done_with(self, node: Node) -> None:
        """Count one reader less, and drop the value after the last."""
        self.readers[node] -= 1
        if self.readers[node] <= 0:
            self.live.pop(node, None)
            self.kept.pop(node, None)

    def _protect(self, *written: Any) -> None:
        """Keep copies of what was not judged yet and shares memory with something that is about to be written to."""
        storages = {tensors.storage_key(tensor) for tensor in tensors_of(written)} - {None}
        for node, value in self.kept.items():
            if self.awaited[node] > 0 and any(tensors.storage_key(tensor) in storages for tensor in tensors_of(value)):
                self.kept[node] = copied(value)


def readers_within(module: GraphModule) -> Counter[Node]:
    """Return how many nodes of the graph itself read each of its values."""
    return Counter(source for node in module.graph.nodes for source in node.all_input_nodes)


def placeholders(module: GraphModule) -> list[Node]:
    """Return the inputs of a graph, in order."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]
