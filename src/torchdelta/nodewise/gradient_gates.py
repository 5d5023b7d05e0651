"""Gates: a zero is added on every edge of a graph, so that one backward shows the gradient that each edge got.

A compiler's backward cannot be run node by node. But the gradient of a zero that is added between a node and its reader
is the gradient that the reader sent back to the node:

    graph       relu → mul → …              gated       relu → (+ zero) → mul → …
                                            zero.grad is the gradient that mul sent to relu

A node is judged on its gradients as on its value: they are computed eagerly from the candidate's own inputs and
cotangents, and compared with the gradients that the candidate sent. The gradient of a parameter or input is compared
with the sum of the gradients that its readers sent.

Start with `Gates`, which is called at a seam where the compiled graph is differentiated from outside. `trained_nodes`
tells which nodes of a graph need a gradient, and serves lockstep too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch.compile.seams import HandedGraph
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import reads_memory, writes_to_first
from torchdelta._torch.process import runtime
from torchdelta.nodewise.local import LocalJudge
from torchdelta.nodewise.regions import Region, copy_tensors, redirect_reads
from torchdelta.nodewise.taps import (
    FEW_NAMES,
    TappedNode,
    cannot_run,
    is_tappable,
    tap,
    unsteady_nodes,
    values_between,
)

Edge = tuple[str, str]
"""The name of a node, and that of the node that reads it."""
OUTPUT = "output"
"""The name of the reader in an edge to the graph's output."""


@dataclass(kw_only=True)
class Gates:
    """Is called at a seam, and puts gates and taps into every graph there; `judge_nodes` judges them afterwards."""

    judge: LocalJudge
    total: int = 0
    runs: list[_GatedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Let the transform compile the graph with taps and gates; return a callable with its old inputs and outputs.

        Its first call is recorded in `runs`, and hooks on the leaves keep copies of their gradients; `judge_nodes`
        judges it after the backward. The number of nodes with a gated input and of leaves that get a gradient is added
        to `total`.
        """
        original = graphs.copy_graph(handed.graph)
        redirect_reads(original)
        inputs = graphs.flat_inputs(handed.graph, handed.example_inputs)
        edges = _gated_edges(original, trained_nodes(original, inputs))
        names = [node.name for node in original.graph.nodes if is_tappable(node)]
        gated, output_count = tap(handed.graph, names)
        redirect_reads(gated)
        _add_gates(gated, edges)
        compiled = handed.make(gated, [*inputs, *_zeros(original, edges).values()])
        restore = graphs.output_builder(handed.graph)
        self.total += len({reader for _, reader in edges} - {OUTPUT}) + len(trained_leaves(handed.graph, inputs))

        def call(*args: Any, **kwargs: Any) -> Any:
            inputs_of_call = graphs.flat_inputs(handed.graph, args, kwargs)
            before = copy_tensors(tuple(inputs_of_call))
            zeros = _zeros(original, edges)
            returned = compiled(*inputs_of_call, *zeros.values())
            if not any(run.graph is original for run in self.runs):
                leaves = trained_leaves(handed.graph, inputs_of_call)
                self.runs.append(
                    _GatedRun(
                        graph=original,
                        level=handed.level,
                        inputs=before,
                        tapped=dict(zip(names, returned[output_count:], strict=True)),
                        zeros=zeros,
                        leaves=leaves,
                        gradients=_LeafGradients(leaves),
                    )
                )
            return restore(returned[:output_count])

        return call

    def judge_nodes(self) -> list[TappedNode]:
        """Judge the recorded graphs by the gradients that nodes and leaves got, and return the judgements of all.

        Call it once, after the backward. The hooks on the leaves are removed. For each graph, a note counts the nodes
        that `_judge_run` leaves out with a note, if there are any, and names up to `FEW_NAMES` of them.
        """
        for run in self.runs:
            run.gradients.remove_hooks()
        with runtime.drawing_from():
            return [node for run in self.runs for node in self._judge_run(run)]

    def _judge_run(self, run: _GatedRun) -> Iterator[TappedNode]:
        """Yield judgements of the leaves of one graph, and of its nodes that got a gradient and have a gated input.

        The last node comes first. Nodes and leaves with a reader that writes to its first argument, and nodes that read
        a memory layout, are left out with a note. Nodes that write themselves, called modules, `unsteady_nodes`, and
        nodes that read a node without a value (`values_between`) are left out without one.
        """
        with torch.no_grad():
            values = values_between(run.graph, run.inputs, run.tapped)
        edge_gradients = {edge: zero.grad for edge, zero in run.zeros.items() if zero.grad is not None}
        unsteady = unsteady_nodes(run.graph)
        skipped = [
            node.name
            for node in run.graph.graph.nodes
            if reads_memory(node) or any(writes_to_first(user) for user in node.users)
        ]
        if skipped:
            self.notes.append(
                f"the gradients of {len(skipped)} nodes that are overwritten or get other strides were not compared: "
                f"{', '.join(skipped[:FEW_NAMES])}{', …' if len(skipped) > FEW_NAMES else ''}"
            )
        for node in reversed(run.graph.graph.nodes):
            if node.name in skipped or node in unsteady:
                continue
            if node.name in run.leaves:
                yield self._judge_leaf(node, run, edge_gradients)
            elif node.op in ("call_function", "call_method") and not writes_to_first(node):
                cotangents = {out: _cotangent_of(out, edge_gradients) for out in _output_nodes(node)}
                sources = [source for source in node.all_input_nodes if (source.name, node.name) in run.zeros]
                has_values = all(source in values for source in node.all_input_nodes)
                if sources and has_values and any(cotangent is not None for cotangent in cotangents.values()):
                    yield self._judge_node(node, sources, cotangents, values, edge_gradients, run)

    def _judge_node(
        self,
        node: Node,
        sources: Sequence[Node],
        cotangents: Mapping[Node, torch.Tensor | None],
        values: Mapping[Node, Any],
        edge_gradients: Mapping[Edge, torch.Tensor],
        run: _GatedRun,
    ) -> TappedNode:
        """Return the judgement of one node: the gradients that it sent to `sources`, against those that eager computes.

        `sources` are its inputs that have a gate, and `cotangents` has the gradient that each of its outputs got, or
        None. `values` has the candidate's value of each node, and `edge_gradients` the gradient that it sent over each
        edge. A missing gradient counts as zeros. The judgement of a node that draws random numbers, or that raises on
        these values, has no comparisons and `is_judged=False`; the latter is noted.
        """
        inputs = {source: values[source] for source in node.all_input_nodes}
        inputs |= {out: cotangent for out, cotangent in cotangents.items() if cotangent is not None and out is not node}
        if (own_cotangent := cotangents.get(node)) is not None:
            inputs[node] = own_cotangent
        region = Region(run.graph, (node,), tuple(node.all_input_nodes))

        def eager_gradients(values: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
            leaves = {source: values[source].detach().requires_grad_() for source in sources}
            with torch.enable_grad():
                result = region.run({**values, **leaves})
                outputs = {out: result if out is node else result[out.args[1]] for out in cotangents if out in values}
                roots = [(result, values[out]) for out, result in outputs.items() if result.requires_grad]
                gradients = (
                    torch.autograd.grad(
                        [root for root, _ in roots],
                        list(leaves.values()),
                        [cotangent for _, cotangent in roots],
                        allow_unused=True,
                    )
                    if roots
                    else [None] * len(leaves)
                )
            return {
                source.name: torch.zeros_like(leaf) if slope is None else slope
                for (source, leaf), slope in zip(leaves.items(), gradients, strict=True)
            }

        candidate = {
            source.name: edge_gradients.get((source.name, node.name), torch.zeros_like(values[source]))
            for source in sources
        }
        before = runtime.generator_states()
        try:
            reference = eager_gradients(inputs)
        except Exception as error:  # a candidate may have values of another dtype or shape than eager takes
            self.notes.append(cannot_run(node.name, error))
            return TappedNode(node=node, level="backward", local=(), region=(node,), is_judged=False)
        has_drawn = runtime.has_drawn_since(before)
        local = (
            () if has_drawn else self.judge.judge(f"{node.name}.grad", reference, candidate, eager_gradients, inputs)
        )
        return TappedNode(node=node, level="backward", local=local, region=(node,), is_judged=not has_drawn)

    def _judge_leaf(self, node: Node, run: _GatedRun, edge_gradients: Mapping[Edge, torch.Tensor]) -> TappedNode:
        """Return the judgement of a leaf: the gradient that it got, against the sum of those that its readers sent.

        The gradient that it got is the leaf's `grad` after the first backward. If several nodes of the graph have the
        same tensor, the readers of all count. A missing gradient counts as zeros.
        """
        names = [name for name, leaf in run.leaves.items() if leaf is run.leaves[node.name]]
        parts = {edge: slope for edge, slope in edge_gradients.items() if edge[0] in names}
        gradient = run.gradients.get(node.name)
        zero = torch.zeros_like(run.leaves[node.name])

        def total(parts: Mapping[Any, torch.Tensor]) -> torch.Tensor:
            return sum(parts.values(), zero.to(next(iter(parts.values())).dtype)) if parts else zero

        local = self.judge.judge(
            f"{node.name}.grad", total(parts), zero if gradient is None else gradient, total, parts
        )
        return TappedNode(node=node, level="backward", local=local, region=(node,))


@dataclass(frozen=True, kw_only=True)
class _GatedRun:
    """The first call of one gated graph, whose backward is still to come."""

    graph: GraphModule
    level: str
    inputs: tuple[Any, ...]
    tapped: Mapping[str, Any]
    """The values of the tapped nodes, by name."""
    zeros: Mapping[Edge, torch.Tensor]
    leaves: Mapping[str, torch.Tensor]
    """The leaf tensors that get a gradient, by the name of their node."""
    gradients: _LeafGradients


class _LeafGradients(dict[str, torch.Tensor]):
    """The gradient of each leaf after its first backward, by name; hooks on the leaves fill it in."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Start empty, and put a hook on each leaf that fills in its gradient after the first backward."""
        super().__init__()
        self._hooks = [self._hook(name, leaf) for name, leaf in leaves.items()]

    def remove_hooks(self) -> None:
        """Remove the hooks from the leaves."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str, leaf: torch.Tensor) -> Any:
        """Put a hook on a leaf that keeps a copy of its `grad` after the first backward, by `name`; return a handle."""

        def keep(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                self.setdefault(name, tensor.grad.detach().clone())

        return leaf.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]


def _add_gates(graph_module: GraphModule, edges: Sequence[Edge]) -> None:
    """Change the graph in place: each edge gets a placeholder, and its reader reads the node plus that placeholder.

    The new placeholders come after the graph's own, in the order of the edges.
    """
    nodes = {node.name: node for node in graph_module.graph.nodes}
    last = [node for node in graph_module.graph.nodes if node.op == "placeholder"][-1:]
    graph = graph_module.graph
    for index, (source, reader) in enumerate(edges):
        with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
            zero = graph.placeholder(f"gate_{index}")
        last = [zero]
        user = nodes[reader] if reader in nodes else graph.output_node()
        with graph.inserting_before(user):
            gated = graph.call_function(torch.ops.aten.add.Tensor, (nodes[source], zero))
        for new_node in (zero, gated):
            new_node.meta = {
                key: nodes[source].meta[key] for key in ("val", "example_value") if key in nodes[source].meta
            }
        if user.op == "output":
            returned = cast(Sequence[Any], user.args[0])
            outputs = [gated if value is nodes[source] else value for value in returned]
            user.args = (tuple(outputs),)
        else:
            user.replace_input_with(nodes[source], gated)
    graph.lint()
    graph_module.recompile()


def _gated_edges(graph_module: GraphModule, trained: set[Node]) -> list[Edge]:
    """Return the edges that can have a gate, as pairs of the name of a node and the name of its reader.

    The node is trained and has a float tensor of fixed size. The reader is the graph's output, under the name `OUTPUT`,
    or calls a function or method that does not write to its first argument.
    """
    return [
        (source.name, node.name if node.op != "output" else OUTPUT)
        for node in graph_module.graph.nodes
        for source in node.all_input_nodes
        if source in trained
        and node.op in ("call_function", "call_method", "output")
        and not writes_to_first(node)
        and graphs.has_fixed_float(source, graph_module)
    ]


def _zeros(graph_module: GraphModule, edges: Sequence[Edge]) -> dict[Edge, torch.Tensor]:
    """Return a new tensor of zeros that requires grad for each edge, by edge, to be added to the node that is read.

    It has the shape, dtype and device of that node's value.
    """
    nodes = {node.name: node for node in graph_module.graph.nodes}
    zeros = {}
    for edge in edges:
        value = graphs.known_value(nodes[edge[0]], graph_module)
        zeros[edge] = torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device, requires_grad=True)
    return zeros


def _output_nodes(node: Node) -> list[Node]:
    """Return the nodes that have the outputs of a node: itself, or the `getitem` nodes that read it if it has a tuple.

    The node's metadata tells whether it has a tuple or list. Without readers of its items the result is empty.
    """
    items = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem" and user.args[0] is node]
    is_tuple = isinstance(node.meta.get("val", node.meta.get("example_value")), (tuple, list))
    return items if is_tuple else [node]


def _cotangent_of(node: Node, edge_gradients: Mapping[Edge, torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the gradients that a node's readers sent to it, or None if none did."""
    parts = [
        slope
        for user in node.users
        if (slope := edge_gradients.get((node.name, OUTPUT if user.op == "output" else user.name))) is not None
    ]
    return sum(parts[1:], parts[0]) if parts else None


def trained_nodes(graph_module: GraphModule, inputs: Sequence[Any]) -> set[Node]:
    """Return the nodes that need a gradient: parameters and inputs that require grad, and nodes that depend on them.

    `inputs` are the values of the placeholders. A node does not need one, and passes none on, if it detaches, has a
    tensor of integers or booleans, or runs while gradients are switched off.
    """
    trained = {node for node, value in graph_starts(graph_module, inputs) if _is_trained(value)}
    is_recording = True
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            is_recording = bool(node.args[0])
        elif is_recording and not trained.isdisjoint(node.all_input_nodes) and not _stops_gradient(node, graph_module):
            trained.add(node)
    return trained


def trained_leaves(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the leaf tensors that get a gradient in a backward, by the name of their placeholder or attribute node."""
    starts = graph_starts(graph_module, inputs)
    return {node.name: value for node, value in starts if _is_trained(value) and value.is_leaf}


def graph_starts(graph_module: GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[Node, Any]]:
    """Yield the placeholder and attribute nodes of a graph in order, each with its value.

    `inputs` are the values of the placeholders; a placeholder beyond their number has None.
    """
    feed = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            yield node, next(feed, None)
        elif node.op == "get_attr":
            yield node, graphs.attribute(graph_module, str(node.target))


def _stops_gradient(node: Node, graph_module: GraphModule) -> bool:
    """Tell whether no gradient goes through a node: it detaches, or has a tensor of integers or booleans.

    A value that the graph does not know counts as differentiable.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    value = graphs.known_value(node, graph_module)
    is_exact = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return is_exact or name.partition(".")[0].strip("_") == "detach"


def _is_trained(value: Any) -> bool:
    """Tell whether a value is a tensor that requires grad."""
    return isinstance(value, torch.Tensor) and value.requires_grad
