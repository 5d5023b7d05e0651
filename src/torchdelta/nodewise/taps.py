"""Taps: extra outputs at many nodes of a graph, so that one compile shows the values inside of a black box.

A compiler's result cannot be run node by node. But its graph can be compiled with more outputs. A tapped node is judged
on the candidate's own values: its operation runs eagerly on the tapped inputs, and the result is compared with the
tapped output.

    graph       x → linear → gelu → sum         tapped at linear and gelu
    compiled    returns (sum, linear, gelu)     gelu is judged as gelu(linear), eagerly, against gelu

A tap returns a detached copy, so that gradients and in-place writes do not depend on it. Start with `Taps`, which is
called at a seam.
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
from torchdelta.nodewise.regions import Region, copy_tensors, is_discontinuous, redirect_reads, run_node, stale_edges
from torchdelta.records.comparison import Comparison

FEW_NAMES = 5
"""At most so many nodes are named in a note."""
aten = torch.ops.aten
APPROXIMATE = 8
"""Correct approximations of a function whose values are at most one may differ by this many units of float32.
Measured: a vectorised error function is off by more than four."""


@dataclass(frozen=True, kw_only=True)
class TappedNode:
    """The judgement of one node with a tap."""

    node: Node
    level: str
    local: tuple[Comparison, ...]
    region: tuple[Node, ...]
    """The nodes that may have caused a difference: this one, and those before it that had no tap."""
    is_judged: bool = True
    """False if the node could not be judged: it draws random numbers, or cannot run by itself."""


@dataclass(kw_only=True)
class Taps:
    """Is called at a seam, puts taps into every graph there, and judges the tapped nodes at the graph's first call."""

    judge: LocalJudge
    is_chosen: Callable[[Node], bool] = lambda _: True
    """Tells which of the tappable nodes get a tap."""
    limit_bytes: int | None = None
    """The memory that the taps of one graph may take."""
    nodes: list[TappedNode] = field(default_factory=list)
    total: int = 0
    """The number of nodes that could have a tap."""
    tap_count: int = 0
    notes: list[str] = field(default_factory=list)

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Let the transform compile the graph with taps; return a callable with the graph's own inputs and outputs.

        Its first call judges the tapped nodes and adds them to `nodes`. The numbers of nodes that can have a tap and of
        those that got one are added to `total` and `tap_count`.
        """
        original = graphs.copy_graph(handed.graph)
        redirect_reads(original)
        tappable = [node for node in original.graph.nodes if is_tappable(node)]
        chosen = self._fit_into_limit([node for node in tappable if self.is_chosen(node)])
        self.total += len(tappable)
        self.tap_count += len(chosen)
        tapped, output_count = tap(handed.graph, {node.name for node in chosen})
        compiled = handed.make(tapped, graphs.flat_inputs(handed.graph, handed.example_inputs))
        restore = graphs.output_builder(handed.graph)
        has_run = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            inputs = graphs.flat_inputs(handed.graph, args, kwargs)
            before = None if has_run else copy_tensors(tuple(inputs))
            returned = compiled(*inputs)
            if before is not None:
                has_run = True
                outputs = _named_outputs(original, returned[:output_count])
                values = outputs | dict(zip((node.name for node in chosen), returned[output_count:], strict=True))
                with torch.no_grad(), runtime.drawing_from():
                    self.nodes += self._judge_graph(original, before, values, handed.level)
            return restore(returned[:output_count])

        return call

    def _fit_into_limit(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes whose values fit into `limit_bytes` together, and add a note about the others.

        A node that does not fit is passed over, and smaller ones after it may still fit. Without a limit, return all.
        """
        if self.limit_bytes is None:
            return nodes
        chosen, used = [], 0
        for node in nodes:
            size = graphs.bytes_of(node)
            if used + size > self.limit_bytes:
                continue
            chosen.append(node)
            used += size
        if len(chosen) < len(nodes):
            self.notes.append(
                f"{len(nodes) - len(chosen)} of {len(nodes)} nodes have no tap: their values do not fit into "
                f"{self.limit_bytes} bytes"
            )
        return chosen

    def _judge_graph(
        self, graph: GraphModule, inputs: Sequence[Any], tapped: Mapping[str, Any], level: str
    ) -> Iterator[TappedNode]:
        """Yield a judgement for each node that has a value in `tapped`, unless its region has an unsteady node.

        `tapped` has the candidate's values by name. A region reads inputs, attributes and tapped nodes, except for
        those that `_widened_nodes` returns. A note counts the `unsteady_nodes` besides the output, and names up to
        `FEW_NAMES`; without any there is no note. `level` is only copied into the judgements.
        """
        widened, unsteady = _widened_nodes(graph), unsteady_nodes(graph)
        skipped = [node.name for node in unsteady if node.op != "output"]
        if skipped:
            self.notes.append(
                f"{len(skipped)} nodes read memory that was written to under another name, or that was never set, and "
                f"were not judged: {', '.join(skipped[:FEW_NAMES])}{', …' if len(skipped) > FEW_NAMES else ''}"
            )
        known = {node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")}
        values: dict[Node, Any] = {}
        for node in fill_values(values, graph, inputs, tapped):
            region = Region.before(node, graph, known)
            if node.name in tapped and not any(inner in unsteady for inner in region.nodes):
                yield self._judge_node(region, values, level)
            known |= {node} if node.name in tapped and node not in widened else set()

    def _judge_node(self, region: Region, values: Mapping[Node, Any], level: str) -> TappedNode:
        """Run a region eagerly on the candidate's values; return the judgement of its last node against the result.

        If the region draws random numbers, reads memory that is not laid out as it was traced, or raises on these
        values, a note is added and the judgement has no comparisons and `is_judged=False`. `level` is only copied into
        the judgement.
        """
        inputs = {node: values[node] for node in region.reads}
        node = region.result
        before = runtime.generator_states()
        if moved := [source for source in _sources_read_as_memory(region) if not _has_traced_layout(source, inputs)]:
            self.notes.append(f"{node.name} reads memory of {moved[0].name}, which a tap does not show: not judged")
            return TappedNode(node=node, level=level, local=(), region=region.nodes, is_judged=False)
        try:
            reference = region.run(inputs)
        except Exception as error:  # a candidate may have values of another dtype or shape than eager takes
            self.notes.append(cannot_run(node.name, error))
            return TappedNode(node=node, level=level, local=(), region=region.nodes, is_judged=False)
        if runtime.has_drawn_since(before):  # eager draws other numbers than the candidate does
            self.notes.append(f"{node.name} draws random numbers: its readers were judged on them, it was not")
            return TappedNode(node=node, level=level, local=(), region=region.nodes, is_judged=False)
        is_exact = all(source.op == "placeholder" for source in region.reads)
        comparisons = self.judge.judge(
            node.name,
            reference,
            values[node],
            region.run,
            inputs,
            is_exact=is_exact and is_discontinuous(region),
            floor=APPROXIMATE * torch.finfo(torch.float32).eps if is_bounded(node) else 0.0,
        )
        return TappedNode(node=node, level=level, local=comparisons, region=region.nodes)


def cannot_run(name: str, error: Exception) -> str:
    """Return the note about a node that raised `error` when it ran eagerly on the candidate's own values."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{name} cannot run on the values that the candidate fed it, and was not judged: {first}"


def tap(graph_module: GraphModule, names: Collection[str]) -> tuple[GraphModule, int]:
    """Return a copy of the graph that returns these nodes' values too, and the number of its original outputs.

    The copy takes and returns flat values, and shares the parameters. The tapped values are detached clones, and come
    after the outputs, in the order of the graph.
    """
    # the copy shares the parameters, so that gradients reach those of the original
    tapped = graphs.flatten_signature(GraphModule(graph_module, copy.deepcopy(graph_module.graph)))
    output = tapped.graph.output_node()
    outputs = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    taps = []
    for node in list(tapped.graph.nodes):
        if node.name in names:
            with tapped.graph.inserting_after(node):
                detached = tapped.graph.call_function(aten.detach.default, (node,))
            with tapped.graph.inserting_after(detached):
                clone = tapped.graph.call_function(aten.clone.default, (detached,))
            for copy_node in (detached, clone):
                copy_node.meta = {key: value for key, value in node.meta.items() if key in ("val", "example_value")}
            taps.append(clone)
    output.args = ((*outputs, *taps),)
    tapped.graph.lint()
    tapped.recompile()
    return tapped, len(outputs)


def is_tappable(node: Node) -> bool:
    """Tell whether a node can have a tap: it calls something, its metadata has a tensor, and another node reads it."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, torch.Tensor) and bool(node.users)


def _named_outputs(graph_module: GraphModule, returned: Sequence[Any]) -> dict[str, Any]:
    """Return detached copies of the values that a graph returned, by the names of their nodes; they serve as taps.

    Outputs that cannot have a tap, such as inputs, and outputs that may have been overwritten are left out.
    """
    output = graph_module.graph.output_node()
    nodes = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    stale = stale_edges(graph_module)
    return {
        node.name: copy_tensors(value)
        for node, value in zip(nodes, returned, strict=True)
        if isinstance(node, Node) and is_tappable(node) and (node, output) not in stale
    }


def values_between(graph: GraphModule, inputs: Sequence[Any], tapped: Mapping[str, Any]) -> dict[Node, Any]:
    """Return the value of every node but the output, by node: that in `tapped`, by name, or one computed eagerly.

    `inputs` are the values of the placeholders. `fill_values` says which nodes are left out.
    """
    values: dict[Node, Any] = {}
    for _ in fill_values(values, graph, inputs, tapped):
        pass
    return values


def fill_values(
    values: dict[Node, Any], graph: GraphModule, inputs: Sequence[Any], tapped: Mapping[str, Any]
) -> Iterator[Node]:
    """Add the value of each node to `values`, in the order of the graph, and yield each node after its value is there.

    A placeholder has the next of `inputs`, and a node whose name is in `tapped` the candidate's own value from there;
    other values are computed eagerly from those before. The output node is left out. A node that raises on the
    candidate's values, or that reads such a node, is left out too.
    """
    interpreter = Interpreter(graph, garbage_collect_values=False)
    feed = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.name in tapped:
            values[node] = tapped[node.name]
        elif all(source in values for source in node.all_input_nodes):
            try:
                values[node] = run_node(interpreter, node, values)
            except Exception:  # a candidate may have values of another dtype or shape than eager takes
                continue
        else:
            continue
        yield node


def _widened_nodes(graph_module: GraphModule) -> set[Node]:
    """Return the nodes that convert floats to a wider dtype, and those computed from them in at least 32 bits.

    A tap shows the narrower value after its rounding, but a compiler may have fused the nodes and read it before. So
    the region of a later node starts before the widening.
    """
    widened: set[Node] = set()
    for node in graph_module.graph.nodes:
        if widens(node) or (not widened.isdisjoint(node.all_input_nodes) and is_wide_float(node)):
            widened.add(node)
    return widened


def unsteady_nodes(graph_module: GraphModule) -> dict[Node, None]:
    """Return the nodes that read memory which another node wrote to meanwhile, or that have or read memory never set.

    They are the keys, in the order of the graph; the output may be among them.
    """
    readers = {reader for _, reader in stale_edges(graph_module)}
    unset: set[Node] = set()
    for node in graph_module.graph.nodes:
        if is_unset(node) or (may_share(node) and node.args and node.args[0] in unset):
            unset.add(node)
        elif not unset.isdisjoint(node.all_input_nodes):
            readers.add(node)
    return {node: None for node in graph_module.graph.nodes if node in readers or node in unset}


def _sources_read_as_memory(region: Region) -> list[Node]:
    """Return the nodes of which an operation in the region reads the memory layout, and not only the values."""
    return [node.args[0] for node in region.nodes if reads_memory(node) and isinstance(node.args[0], Node)]


def _has_traced_layout(node: Node, values: Mapping[Node, Any]) -> bool:
    """Tell whether a value has the strides, offset and storage size that the graph was traced with.

    Return False if the graph has no traced tensor for the node, or `values` has no tensor for it.
    """
    traced, value = node.meta.get("val", node.meta.get("example_value")), values.get(node)
    if not isinstance(traced, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    layouts = [(each.stride(), each.storage_offset(), each.untyped_storage().nbytes()) for each in (traced, value)]
    return layouts[0] == layouts[1]
