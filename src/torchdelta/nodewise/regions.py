"""Regions: small parts of a graph that can be run by themselves, on any values.

To judge one node, the nodes between it and the nearest known values run again: on the reference's values, in float64,
or with noise. Those nodes are a `Region`. A region never changes the values that it is run on, because a node that
writes to its inputs runs on copies of them.

    region = Region.before(add, module, known={x, conv})
    region.nodes                            # (relu, add): relu is not known, so it runs again
    region.run({x: …, conv: …})             # the value of add

Writes are made visible as edges: after `redirect_reads`, a node that reads a value after a write reads the writer.

Start with `Region.before` and `Region.run`. Below them: how one node runs, how a graph is prepared for in-place writes,
and small helpers for values that contain tensors.
"""

from __future__ import annotations

import operator
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
    setitem,
    writes_to,
    writes_to_first,
)
from torchdelta.compare.leaves import leaves_of

Values = Mapping[Node, Any]
"""The value of each node."""
EdgeValues = Mapping[tuple[Node, Node], Any]
"""Values for single edges; the key is the node that is read and the node that reads it."""
LARGEST_REGION = 32
"""A region with more nodes than this is not the work of one node any more."""
# operators at whose thresholds a rounding error becomes a jump
_DISCONTINUOUS_OPS = frozenset(
    {
        "argmax", "argmin", "argsort", "ceil", "eq", "floor", "floor_divide", "floordiv", "fmod", "frac", "ge", "gt",
        "heaviside", "isclose", "le", "lt", "mod", "ne", "nonzero", "remainder", "round", "searchsorted", "sgn",
        "sign", "sort", "topk", "trunc",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Region:
    """Nodes that run together, in the order of their graph. The last one is the node to judge."""

    module: GraphModule
    nodes: tuple[Node, ...]
    reads: tuple[Node, ...]
    """The nodes outside of the region that it reads."""

    @classmethod
    def before(cls, node: Node, module: GraphModule, known: Collection[Node]) -> Region:
        """Return the region that ends in this node and reads nothing but known nodes and placeholders.

        All other nodes that it depends on are in the region, attribute nodes included, and so is the node itself.
        """
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

    def calls_until(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes of the region that a node of it depends on, and the node itself, without attributes."""
        inner, waiting = {node}, [node]
        while waiting:
            sources = [source for source in waiting.pop().all_input_nodes if source in self.nodes]
            waiting += [source for source in sources if source not in inner]
            inner.update(sources)
        return tuple(each for each in self.nodes if each in inner and each.op != "get_attr")

    @property
    def result(self) -> Node:
        """The node to judge; if the region has no nodes to run, the node that it reads."""
        return self.nodes[-1] if self.nodes else self.reads[-1]

    def run(self, inputs: Values, overrides: EdgeValues | None = None) -> Any:
        """Return the value of the last node, computed from the values of the nodes that the region reads.

        An edge in `overrides` passes that value to its reader instead. The inputs are not written to.
        """
        return self.run_with_writes(inputs, overrides)[0]

    def run_all(self, inputs: Values, replacements: Values | None = None) -> dict[Node, Any]:
        """Return the values of all nodes of the region and of its inputs, computed from the values in `inputs`.

        A node in `replacements` does not run, and has the value there. The inputs are not written to.
        """
        interpreter = Interpreter(self.module, garbage_collect_values=False)
        known = replacements or {}
        values = {**inputs, **known}
        for node in self.nodes:
            if node not in known:
                values[node] = run_node(interpreter, node, values)
        return values

    def run_with_writes(self, inputs: Values, overrides: EdgeValues | None = None) -> tuple[Any, dict[Node, Any]]:
        """Return the value of the last node, and its inputs as they are after it ran (empty if it does not write).

        `inputs` has the values of the nodes that the region reads, and they are not written to. A region without nodes
        returns the value that it reads. `run` explains `overrides`.
        """
        interpreter = Interpreter(self.module, garbage_collect_values=False)
        values = dict(inputs)
        after: dict[Node, Any] = {}
        for node in self.nodes:
            values[node], after = run_with_writes(interpreter, node, values, overrides or {})
        return values[self.result], after


def region_reading(sources: Set[Node], node: Node, module: GraphModule, known: Collection[Node]) -> Region:
    """Return the region that ends in the node and reads the nearest known nodes, with all `sources` if possible.

    `sources` are the partners of the nodes that the candidate's region reads. If the node is a source itself, the
    region reads it and has no nodes. If the nearest known nodes do not include all sources, return instead the region
    that reads just sources, placeholders and attributes, if that has at most `LARGEST_REGION` nodes.
    """
    if node in sources:
        return Region(module, (), (node,))
    region = Region.before(node, module, known)
    if sources <= set(region.reads):
        return region
    starts = {each for each in module.graph.nodes if each.op in ("placeholder", "get_attr")}
    wider = Region.before(node, module, sources | starts)
    return wider if len(wider.nodes) <= LARGEST_REGION and set(wider.reads) <= sources | starts else region


def is_discontinuous(region: Region) -> bool:
    """Tell whether a region is a single discontinuous operation.

    Such operations are comparisons, `argmax`, `sort`, `round` and the like, and divisions with a rounding mode.
    """
    if len(region.nodes) != 1:
        return False
    node = region.result
    name = op_name(node).removeprefix("aten.").partition(".")[0].strip("_")
    return name in _DISCONTINUOUS_OPS or node.kwargs.get("rounding_mode") is not None


def run_node(interpreter: Interpreter, node: Node, values: Values) -> Any:
    """Return the value of one node; it runs on copies of the inputs that it writes to."""
    return run_with_writes(interpreter, node, values)[0]


def run_with_writes(
    interpreter: Interpreter, node: Node, values: Values, overrides: EdgeValues | None = None
) -> tuple[Any, dict[Node, Any]]:
    """Run one node on copies of the inputs that it may write to; return its value, and its inputs afterwards.

    The second is empty if the node does not write. `overrides` has other values for some of its edges.
    """
    edges = overrides or {}
    inputs = {
        source: edges[source, node] if (source, node) in edges else values[source] for source in node.all_input_nodes
    }
    if writes_to(node):
        inputs = copy_written_inputs(node, inputs, is_detached=False)
    args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)
    return call_node(interpreter, node, args, kwargs), inputs if writes_to(node) else {}


def call_node(interpreter: Interpreter, node: Node, args: Any, kwargs: Any) -> Any:
    """Return the value of one node for these arguments, which are not copied.

    A `cond` runs the branch that its predicate chooses, as a plain call. A module with narrower parameters than its
    float64 inputs runs with copies of them in float64, because a truth is computed in that.
    """
    if node.target is torch.ops.higher_order.cond:
        # the operator itself does not run under the dispatch modes that compute truth and noise
        predicate, if_true, if_false, operands = (*args, ())[:4]
        return (if_true if bool(predicate) else if_false)(*operands)
    if node.op == "call_module" and (widened := _widened_state(interpreter.fetch_attr(str(node.target)), args)):
        return torch.func.functional_call(interpreter.fetch_attr(str(node.target)), widened, args, kwargs)
    return getattr(interpreter, node.op)(node.target, args, kwargs)


def _widened_state(module: torch.nn.Module, args: Any) -> dict[str, torch.Tensor]:
    """Return float64 copies of a module's parameters and buffers by name, if `args` need them, or else an empty dict.

    They do if a tensor in the positional arguments `args` is float64 and no parameter or buffer is. Parameters and
    buffers that are not floating-point are left out.
    """
    state = dict((*module.named_parameters(), *module.named_buffers()))
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    is_wide = any(tensor.dtype is torch.float64 for tensor in tensors_of(args))
    if not is_wide or any(tensor.dtype is torch.float64 for tensor in floats.values()):
        return {}
    return {name: tensor.detach().double() for name, tensor in floats.items()}


def has_writers(module: GraphModule) -> bool:
    """Tell whether any node of the graph may write to one of its inputs."""
    return any(writes_to(node) for node in module.graph.nodes)


def copy_with_redirected_reads(module: GraphModule) -> GraphModule:
    """Return a copy of the graph after `redirect_reads`, or the graph itself if it has nothing to redirect.

    The copy has the same parameters, and buffers of its own. Its item assignments return what they write to
    (`nodes.setitem`), so that they are redirected too.
    """
    if not any(returns_what_it_writes(node) or node.target is operator.setitem for node in module.graph.nodes):
        return module
    redirected = graphs.copy_sharing_parameters(module)
    for node in redirected.graph.find_nodes(op="call_function", target=operator.setitem):
        node.target = setitem
    redirect_reads(redirected)
    return redirected


def redirect_reads(module: GraphModule) -> None:
    """Change the graph in place: a node that reads a value after a write reads the writer, which returns that value.

    The module is recompiled. Writers that do not return the tensor that they write to are left as they are.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for writer in list(module.graph.nodes):
        if returns_what_it_writes(writer):
            written = writer.args[0]
            assert isinstance(written, Node)
            for user in [user for user in written.users if order[user] > order[writer]]:
                user.replace_input_with(written, writer)
    module.recompile()


def directly_written_nodes(module: GraphModule) -> frozenset[Node]:
    """Return the nodes that another node writes to and returns, as its first argument (`returns_what_it_writes`).

    After `redirect_reads` no node reads them after the write.
    """
    return frozenset(
        node.args[0] for node in module.graph.nodes if returns_what_it_writes(node) and isinstance(node.args[0], Node)
    )


def stale_edges(module: GraphModule) -> set[tuple[Node, Node]]:
    """Return the (producer, reader) edges whose value another node may have overwritten before the reader reads it.

    The writer writes to the producer or to a node that may share its memory. Norms and called modules do not count as
    writers.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    stale: set[tuple[Node, Node]] = set()
    shares: dict[Node, set[Node]] = {}
    for node in module.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        group = shares[source] if source is not None and may_share(node) else set()
        if is_item_assignment(node) or writes_to_first(node):
            # a norm or a called module writes to its own buffers, which no node reads in between
            stale |= {(other, user) for other in group for user in other.users if order[user] > order[node]}
        group.add(node)
        shares[node] = group
    return stale


def copy_written_inputs(writer: Node, inputs: Values, *, is_detached: bool = True) -> dict[Node, Any]:
    """Return the inputs of a node, with copies of those whose memory it may write to; the others are the same objects.

    With `is_detached` the copies are detached; otherwise gradients go through them.
    """
    written = may_write(writer)
    storages = storages_of([inputs[source] for source in written])
    exposed = {
        source: value
        for source, value in inputs.items()
        if source in written or not storages.isdisjoint(storages_of(value))
    }
    return {**inputs, **copy_tensors(exposed, is_detached=is_detached)}


def changed_values(before: Mapping[Node, Any], after: Mapping[Node, Any]) -> dict[Node, Any]:
    """Return those values of `after` that are not `is_identical` to the node's value in `before`, by node."""
    return {node: after[node] for node, value in before.items() if not is_identical(value, after[node])}


def storages_of(value: Any) -> set[int]:
    """Return the keys of the storages that the tensors of a value lie in."""
    members = (value,) if isinstance(value, torch.Tensor) else tensors_of(value)
    return {key for tensor in members if (key := tensors.storage_key(tensor)) is not None}


def copy_tensors(value: Any, *, is_detached: bool = True) -> Any:
    """Return the value with a copy of every tensor; a tensor that occurs twice is copied once.

    With `is_detached` the copies are detached; otherwise gradients go through them. Other leaves are not copied.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copies.setdefault(id(leaf), (leaf.detach() if is_detached else leaf).clone())

    return map_leaves(value, copy_leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with `change` applied to every leaf in its tuples, lists, dicts and slices.

    The containers are new; the keys of dicts stay. Any other value is a leaf.
    """
    if isinstance(value, tuple):
        items = [map_leaves(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_leaves(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(item, change) for item in (value.start, value.stop, value.step)))
    return change(value)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over every tensor in a value."""
    return (leaf for leaf in leaves_of(value).values() if isinstance(leaf, torch.Tensor))


def is_identical(reference: Any, candidate: Any) -> bool:
    """Tell whether two values are equal: tensors in dtype, shape, device and elements, others in type and by `==`.

    Lists and tuples are compared item by item, and a list may equal a tuple. A tensor object equals itself. Otherwise
    NaN, and tensors that are fake, quantized or not strided, are not equal to anything, and neither are dicts.
    """
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
