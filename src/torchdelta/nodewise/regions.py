"""A region: the nodes of a graph between values that are known and the node in question, run by itself.

What nodes write: whoever reads a value after a write reads the writer, and what is left in inputs is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch import tensors
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import (
    is_item_assignment,
    may_share,
    may_write,
    op_name,
    returns_what_it_writes,
    writes_to,
    writes_to_first,
)
from torchdelta.compare.leaves import leaves_of

Values = Mapping[Node, Any]

LARGEST = 32
"""Nodes of a region beyond which it is not the work of one node any more."""


@dataclass(frozen=True)
class Region:
    """Nodes in the order of their graph, the last of them the one in question."""

    module: GraphModule
    nodes: tuple[Node, ...]
    reads: tuple[Node, ...]
    """What the region is given: nodes outside of it that it reads, in the order of the graph."""

    @classmethod
    def before(cls, node: Node, module: GraphModule, known: Collection[Node]) -> Region:
        """Return the region from the known nodes to this one."""
        inner: set[Node] = {node}
        reads: dict[Node, None] = {}
        waiting = list(node.all_input_nodes)
        while waiting:
            source = waiting.pop()
            if source in known or source.op == "placeholder":
                reads[source] = None
            elif source not in inner:
                inner.add(source)
                waiting += source.all_input_nodes
        if len(inner) == 1:
            return cls(module, (node,), tuple(reads))
        ordered = [each for each in module.graph.nodes if each in inner or each in reads]
        return cls(
            module, tuple(each for each in ordered if each in inner), tuple(each for each in ordered if each in reads)
        )

    @property
    def result(self) -> Node:
        """The node in question; one that is read itself where there is nothing to run."""
        return self.nodes[-1] if self.nodes else self.reads[-1]

    def run(self, given: Values, instead: Mapping[tuple[Node, Node], Any] | None = None) -> Any:
        """Return the value of the last node, given those that the region reads.

        `instead` has values for single edges, from the node that is read to the one that reads it. What is given is
        not written to.
        """
        return self.run_writing(given, instead)[0]

    def run_writing(
        self, given: Values, instead: Mapping[tuple[Node, Node], Any] | None = None
    ) -> tuple[Any, dict[Node, Any]]:
        """Return the value of the last node, and what it read as it is afterwards, if it may have written to that."""
        interpreter = Interpreter(self.module, garbage_collect_values=False)
        values = dict(given)
        after: dict[Node, Any] = {}
        for node in self.nodes:
            values[node], after = run_writing(interpreter, node, values, instead or {})
        return values[self.result], after


def region_from(fed: Set[Node], node: Node, module: GraphModule, known: Collection[Node]) -> Region:
    """Return the region that ends in the node and starts from what the candidate's is fed, if there is a small one."""
    if node in fed:
        return Region(module, (), (node,))
    region = Region.before(node, module, known)
    if fed <= set(region.reads):
        return region
    ends = {each for each in module.graph.nodes if each.op in ("placeholder", "get_attr")}
    wider = Region.before(node, module, fed | ends)
    return wider if len(wider.nodes) <= LARGEST and set(wider.reads) <= fed | ends else region


def run_node(interpreter: Interpreter, node: Node, values: Values) -> Any:
    """Run one node on copies of whatever it writes to."""
    return run_writing(interpreter, node, values)[0]


def run_writing(
    interpreter: Interpreter, node: Node, values: Values, instead: Mapping[tuple[Node, Node], Any] | None = None
) -> tuple[Any, dict[Node, Any]]:
    """Run one node on copies of whatever it writes to, and return those too, as they are afterwards."""
    edges = instead or {}
    read = {
        source: edges[source, node] if (source, node) in edges else values[source] for source in node.all_input_nodes
    }
    if writes_to(node):
        read = safe_from(node, read, is_detached=False)
    args, kwargs = map_arg((node.args, node.kwargs), read.__getitem__)
    return call_node(interpreter, node, args, kwargs), read if writes_to(node) else {}


def call_node(interpreter: Interpreter, node: Node, args: Any, kwargs: Any) -> Any:
    """Run one node on these arguments as they are."""
    if node.target is torch.ops.higher_order.cond:
        # the operator itself does not run under the modes that truth and noise are made by
        predicate, if_true, if_false, operands = (*args, ())[:4]
        return (if_true if bool(predicate) else if_false)(*operands)
    return getattr(interpreter, node.op)(node.target, args, kwargs)


def safe_from(writer: Node, read: Values, *, is_detached: bool = True) -> dict[Node, Any]:
    """Return what a node reads, with copies of what it may write to."""
    written = may_write(writer)
    storages = storages_of([read[source] for source in written])
    exposed = {
        source: value
        for source, value in read.items()
        if source in written or not storages.isdisjoint(storages_of(value))
    }
    return {**read, **copied(exposed, is_detached=is_detached)}


def storages_of(value: Any) -> set[int]:
    """Return which memory a value lies in."""
    held = (value,) if isinstance(value, torch.Tensor) else tensors_of(value)
    return {key for tensor in held if (key := tensors.storage_key(tensor)) is not None}


def copied(value: Any, *, is_detached: bool = True) -> Any:
    """Return the value with a copy of every tensor, one for those that are the same."""
    made: dict[int, torch.Tensor] = {}

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return made.setdefault(id(leaf), (leaf.detach() if is_detached else leaf).clone())

    return mapped(value, copy_leaf)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return tuples, lists, dicts and slices with every leaf changed."""
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(item, change) for item in (value.start, value.stop, value.step)))
    return change(value)


# where a rounding is a step: a value that is exactly there must come out exactly
_STEPS = frozenset(
    {
        "argmax", "argmin", "argsort", "ceil", "eq", "floor", "floor_divide", "floordiv", "fmod", "frac", "ge", "gt",
        "heaviside", "isclose", "le", "lt", "mod", "ne", "nonzero", "remainder", "round", "searchsorted", "sgn",
        "sign", "sort", "topk", "trunc",
    }
)  # fmt: skip


def is_discontinuous(region: Region) -> bool:
    """Tell whether a region is one operation that jumps: it has no rounding of its own, only that of its inputs."""
    if len(region.nodes) != 1:
        return False
    node = region.result
    name = op_name(node).removeprefix("aten.").partition(".")[0].strip("_")
    return name in _STEPS or node.kwargs.get("rounding_mode") is not None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a value."""
    return (leaf for leaf in leaves_of(value).values() if isinstance(leaf, torch.Tensor))


def is_identical(reference: Any, candidate: Any) -> bool:
    """Tell whether two values are the same to the bit, without measuring anything."""
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        return reference is candidate or (
            reference.dtype == candidate.dtype
            and reference.shape == candidate.shape
            and reference.layout == candidate.layout == torch.strided
            and reference.device == candidate.device
            and tensors.has_values(reference)
            and not reference.is_quantized
            and torch.equal(reference, candidate)
        )
    if isinstance(reference, (list, tuple)) and isinstance(candidate, (list, tuple)):
        return len(reference) == len(candidate) and all(
            is_identical(one, other) for one, other in zip(reference, candidate, strict=True)
        )
    if isinstance(reference, (torch.Tensor, dict)) or isinstance(candidate, (torch.Tensor, dict)):
        return False
    return type(reference) is type(candidate) and bool(reference == candidate)


def has_writers(module: GraphModule) -> bool:
    """Tell whether a node of the graph may write to what it reads."""
    return any(writes_to(node) for node in module.graph.nodes)


def reading_writers(module: GraphModule) -> GraphModule:
    """Return a copy in which who reads a value after a write to it reads what the writer returns, which is the same.

    Then a write that is left out is an edge to another node, as everything else is that a candidate loses.
    """
    if not any(returns_what_it_writes(node) for node in module.graph.nodes):
        return module
    made = graphs.copy_sharing_parameters(module)
    read_writers(made)
    return made


def read_writers(module: GraphModule) -> None:
    """Let who reads a value after a write to it read what the writer returns."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for writer in list(module.graph.nodes):
        if returns_what_it_writes(writer):
            written = writer.args[0]
            assert isinstance(written, Node)
            for user in [user for user in written.users if order[user] > order[writer]]:
                user.replace_input_with(written, writer)
    module.recompile()


def stale_edges(module: GraphModule) -> set[tuple[Node, Node]]:
    """Return from whom to whom something is read that was written to since it was computed, through another node."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    found: set[tuple[Node, Node]] = set()
    shares: dict[Node, set[Node]] = {}
    for node in module.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        group = shares[source] if source is not None and may_share(node) else set()
        if is_item_assignment(node) or writes_to_first(node):
            # a norm and a called module write to what they hold, which nobody else reads in between
            found |= {(other, user) for other in group for user in other.users if order[user] > order[node]}
        group.add(node)
        shares[node] = group
    return found


def written_directly(module: GraphModule) -> frozenset[Node]:
    """Return the nodes that nobody reads any more once they are written to."""
    return frozenset(
        node.args[0] for node in module.graph.nodes if returns_what_it_writes(node) and isinstance(node.args[0], Node)
    )


def changed(before: Mapping[Node, Any], after: Mapping[Node, Any]) -> dict[Node, Any]:
    """Return what is not the same any more, as it is now."""
    return {node: after[node] for node, value in before.items() if not is_identical(value, after[node])}
