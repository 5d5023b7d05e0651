"""Taps: a black box is given a graph with extra outputs at many nodes, so that one compile shows what each computes.

A node is judged on what the candidate itself fed it: the graph's own operation, run eagerly on the tapped inputs,
against the tapped output. What a tap returns is detached and copied, so that nothing but the node's value leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torchdelta._torch.compile.seams import HandedGraph
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import is_bounded, is_unset, is_wide_float, may_share, reads_memory, widens
from torchdelta._torch.process import runtime
from torchdelta.nodewise.local import LocalJudge
from torchdelta.nodewise.regions import Region, copied, is_discontinuous, read_writers, run_node, stale_edges
from torchdelta.records.comparison import Comparison

FEW_NAMES = 5
aten = torch.ops.aten
APPROXIMATE = 8
"""By so many units of float32 correct approximations of a function that is at most one differ: a vectorised error
function is off by more than four."""


@dataclass(frozen=True, kw_only=True)
class TappedNode:
    """What was seen of one node behind a tap."""

    node: Node
    level: str
    local: tuple[Comparison, ...]
    region: tuple[Node, ...]
    """The nodes that it may come from: this one, and those before it that had no tap."""
    is_judged: bool = True
    """False of what could not be: it draws, or cannot be run by itself."""


@dataclass(kw_only=True)
class Taps:
    """Stands at a seam, taps every graph that passes, and judges what comes out on its first call."""

    judge: LocalJudge
    chosen: Callable[[Node], bool] = lambda _: True
    """Which of the nodes that can be tapped are."""
    limit_bytes: int | None = None
    seen: list[TappedNode] = field(default_factory=list)
    total: int = 0
    """Nodes that could be tapped."""
    tapped: int = 0
    notes: list[str] = field(default_factory=list)

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Hand the graph on with taps in it."""
        original = graphs.copy_graph(handed.graph)
        read_writers(original)
        tappable = [node for node in original.graph.nodes if is_tappable(node)]
        chosen = self._within_limit([node for node in tappable if self.chosen(node)])
        self.total += len(tappable)
        self.tapped += len(chosen)
        tapped, plain = tap(handed.graph, {node.name for node in chosen})
        made = handed.make(tapped, graphs.flat_inputs(handed.graph, handed.example_inputs))
        restore = graphs.output_builder(handed.graph)
        has_run = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            inputs = graphs.flat_inputs(handed.graph, args, kwargs)
            before = None if has_run else copied(tuple(inputs))
            returned = made(*inputs)
            if before is not None:
                has_run = True
                returns = _named_outputs(original, returned[:plain])
                values = returns | dict(zip((node.name for node in chosen), returned[plain:], strict=True))
                with torch.no_grad(), runtime.drawing_from():
                    self.seen += self._judged(original, before, values, handed.level)
            return restore(returned[:plain])

        return call

    def _within_limit(self, nodes: list[Node]) -> list[Node]:
        if self.limit_bytes is None:
            return nodes
        kept, used = [], 0
        for node in nodes:
            size = graphs.bytes_of(node)
            if used + size > self.limit_bytes:
                continue
            kept.append(node)
            used += size
        if len(kept) < len(nodes):
            self.notes.append(
                f"{len(nodes) - len(kept)} of {len(nodes)} nodes have no tap: their values do not fit into "
                f"{self.limit_bytes} bytes"
            )
        return kept

    def _judged(
        self, graph: GraphModule, inputs: Sequence[Any], tapped: Mapping[str, Any], level: str
    ) -> Iterator[TappedNode]:
        widened, unsteady = _widened_nodes(graph), unsteady_nodes(graph)
        left_out = [node.name for node in unsteady if node.op != "output"]
        if left_out:
            self.notes.append(
                f"{len(left_out)} nodes read memory that was written to under another name, or that nobody set, and "
                f"were not judged: {', '.join(left_out[:FEW_NAMES])}{', …' if len(left_out) > FEW_NAMES else ''}"
            )
        known = {node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")}
        values: dict[Node, Any] = {}
        for node in fill_values(values, graph, inputs, tapped):
            region = Region.before(node, graph, known)
            if node.name in tapped and not any(inner in unsteady for inner in region.nodes):
                yield self._judged_node(region, values, level)
            known |= {node} if node.name in tapped and node not in widened else set()

    def _judged_node(self, region: Region, values: Mapping[Node, Any], level: str) -> TappedNode:
        given = {node: values[node] for node in region.reads}
        node = region.result
        before = runtime.drawn()
        if moved := [source for source in _read_as_memory(region) if not _lies_as_traced(source, given)]:
            self.notes.append(f"{node.name} reads memory of {moved[0].name}, which a tap does not show: not judged")
            return TappedNode(node=node, level=level, local=(), region=region.nodes, is_judged=False)
        reference = region.run(given)
        if runtime.has_drawn_since(before):  # what it draws is anybody's, and its readers are judged on it
            self.notes.append(f"{node.name} draws random numbers: its readers were judged on them, it was not")
            return TappedNode(node=node, level=level, local=(), region=region.nodes, is_judged=False)
        is_exact = all(source.op == "placeholder" for source in region.reads)
        found = self.judge.judge(
            node.name,
            reference,
            values[node],
            region.run,
            given,
            is_exact=is_exact and is_discontinuous(region),
            floor=APPROXIMATE * torch.finfo(torch.float32).eps if is_bounded(node) else 0.0,
        )
        return TappedNode(node=node, level=level, local=found, region=region.nodes)


def tap(graph_module: GraphModule, names: Collection[str]) -> tuple[GraphModule, int]:
    """Return a copy that returns these nodes' values too, and how many values it returned before."""
    # the parameters stay those of the module: what trains them trains these
    tapped = graphs.flatten_signature(GraphModule(graph_module, copy.deepcopy(graph_module.graph)))
    output = tapped.graph.output_node()
    plain = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    taps = []
    for node in list(tapped.graph.nodes):
        if node.name in names:
            with tapped.graph.inserting_after(node):
                detached = tapped.graph.call_function(aten.detach.default, (node,))
            with tapped.graph.inserting_after(detached):
                taken = tapped.graph.call_function(aten.clone.default, (detached,))
            for made in (detached, taken):
                made.meta = {key: value for key, value in node.meta.items() if key in ("val", "example_value")}
            taps.append(taken)
    output.args = ((*plain, *taps),)
    tapped.graph.lint()
    tapped.recompile()
    return tapped, len(plain)


def values_between(graph: GraphModule, inputs: Sequence[Any], tapped: Mapping[str, Any]) -> dict[Node, Any]:
    """Return every node's value: the candidate's own where there was a tap, and what eager makes of those elsewhere."""
    values: dict[Node, Any] = {}
    for _ in fill_values(values, graph, inputs, tapped):
        pass
    return values


def fill_values(
    values: dict[Node, Any], graph: GraphModule, inputs: Sequence[Any], tapped: Mapping[str, Any]
) -> Iterator[Node]:
    """Fill in value after value, and yield each node when its value and those before it are there."""
    interpreter = Interpreter(graph, garbage_collect_values=False)
    feed = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            values[node] = next(feed)
        else:
            values[node] = tapped[node.name] if node.name in tapped else run_node(interpreter, node, values)
        yield node


def _named_outputs(graph_module: GraphModule, returned: Sequence[Any]) -> dict[str, Any]:
    """Return what the graph returns anyway, which takes no tap; a value that may be an input's memory is left out."""
    output = graph_module.graph.output_node()
    nodes = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    stale = stale_edges(graph_module)
    return {
        node.name: copied(value)
        for node, value in zip(nodes, returned, strict=True)
        if isinstance(node, Node) and is_tappable(node) and (node, output) not in stale
    }


def _widened_nodes(graph_module: GraphModule) -> set[Node]:
    """Return what was computed in a wider dtype from a narrower value.

    A tap returns that value rounded, and whoever read it in the candidate may have read it before it was: what is known
    of all that follows is what the narrow value tells, until something is narrow again.
    """
    found: set[Node] = set()
    for node in graph_module.graph.nodes:
        if widens(node) or (not found.isdisjoint(node.all_input_nodes) and is_wide_float(node)):
            found.add(node)
    return found


def unsteady_nodes(graph_module: GraphModule) -> dict[Node, None]:
    """Return the nodes that read something else than was computed for it: memory that others wrote to, or nobody set.

    What is written through one node shows in every other that shares its memory, and a tap shows only its own.
    """
    found = {reader for _, reader in stale_edges(graph_module)}
    unset: set[Node] = set()
    for node in graph_module.graph.nodes:
        if is_unset(node) or (may_share(node) and node.args and node.args[0] in unset):
            unset.add(node)
        elif not unset.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {node: None for node in graph_module.graph.nodes if node in found or node in unset}


def _read_as_memory(region: Region) -> list[Node]:
    """Return what is read by an operation to which it matters how its argument lies in memory."""
    return [node.args[0] for node in region.nodes if reads_memory(node) and isinstance(node.args[0], Node)]


def _lies_as_traced(node: Node, given: Mapping[Node, Any]) -> bool:
    """Tell whether a value that was copied has the memory that the graph was traced with."""
    traced, value = node.meta.get("val", node.meta.get("example_value")), given.get(node)
    if not isinstance(traced, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    ways = [(each.stride(), each.storage_offset(), each.untyped_storage().nbytes()) for each in (traced, value)]
    return ways[0] == ways[1]


def is_tappable(node: Node) -> bool:
    """Tell whether a node has a value that a tap can return: a tensor that somebody reads."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, torch.Tensor) and bool(node.users)
