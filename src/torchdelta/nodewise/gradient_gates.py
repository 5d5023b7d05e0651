"""Which nodes of a graph are on the way of a gradient: those that something trained leads to.

Gates: a black box is given a graph with a zero added on every edge, so that one backward shows what each edge got.

The gradient of that zero is what one reader sent back to one of the values it read. A node is judged on it as on its
value: its own gradients, computed eagerly from what it was given in the candidate, forward and backward, against what
the candidate sent back. What a parameter or an input got in the end is held against what its readers sent.
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
from torchdelta.nodewise.regions import Region, copied, read_writers
from torchdelta.nodewise.taps import FEW_NAMES, TappedNode, is_tappable, tap, unsteady_nodes, values_between


def trained_nodes(graph_module: GraphModule, inputs: Sequence[Any]) -> set[Node]:
    """Return the nodes whose values depend on a parameter or an input that requires grad."""
    found = {node for node, value in starts_of(graph_module, inputs) if _is_trained(value)}
    is_recording = True
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            is_recording = bool(node.args[0])
        elif is_recording and not found.isdisjoint(node.all_input_nodes) and not _ends_here(node, graph_module):
            found.add(node)
    return found


def trained_leaves(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the leaves that a backward leaves gradients in, by the node that stands for each."""
    starts = starts_of(graph_module, inputs)
    return {node.name: value for node, value in starts if _is_trained(value) and value.is_leaf}


def starts_of(graph_module: GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[Node, Any]]:
    """Yield what a graph starts from, inputs and attributes, with their values."""
    feed = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            yield node, next(feed, None)
        elif node.op == "get_attr":
            yield node, graphs.attribute(graph_module, str(node.target))


def _ends_here(node: Node, graph_module: GraphModule) -> bool:
    """Tell whether no gradient goes through a node: it detaches, or what it returns is no float."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    value = graphs.known_value(node, graph_module)
    is_counted = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return is_counted or name.partition(".")[0].strip("_") == "detach"


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


Edge = tuple[str, str]
"""The names of who is read and of who reads."""
OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class _GatedRun:
    """The first call of one graph, from which the backward has yet to come."""

    graph: GraphModule
    level: str
    inputs: tuple[Any, ...]
    tapped: Mapping[str, Any]
    zeros: Mapping[Edge, torch.Tensor]
    leaves: Mapping[str, torch.Tensor]
    """What is trained, by the node that stands for it."""
    received: _Received


class _Received(dict[str, torch.Tensor]):
    """What each trained leaf gets in its first backward, which its hook fills in."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._hooks = [self._hooked(name, leaf) for name, leaf in leaves.items()]

    def take_hooks_off(self) -> None:
        """Leave the leaves as they were."""
        for hook in self._hooks:
            hook.remove()

    def _hooked(self, name: str, leaf: torch.Tensor) -> Any:
        def keep(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                self.setdefault(name, tensor.grad.detach().clone())

        return leaf.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]


@dataclass(kw_only=True)
class Gates:
    """Stands at a seam where what is made of a graph is differentiated from outside."""

    judge: LocalJudge
    total: int = 0
    runs: list[_GatedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Hand the graph on with taps and gates in it."""
        original = graphs.copy_graph(handed.graph)
        read_writers(original)
        inputs = graphs.flat_inputs(handed.graph, handed.example_inputs)
        edges = _edges(original, trained_nodes(original, inputs))
        names = [node.name for node in original.graph.nodes if is_tappable(node)]
        gated, plain = tap(handed.graph, names)
        read_writers(gated)
        _gate(gated, edges)
        made = handed.make(gated, [*inputs, *_zeros(original, edges).values()])
        restore = graphs.output_builder(handed.graph)
        self.total += len({reader for _, reader in edges} - {OUTPUT}) + len(trained_leaves(handed.graph, inputs))

        def call(*args: Any, **kwargs: Any) -> Any:
            given = graphs.flat_inputs(handed.graph, args, kwargs)
            before = copied(tuple(given))
            zeros = _zeros(original, edges)
            returned = made(*given, *zeros.values())
            if not any(run.graph is original for run in self.runs):
                leaves = trained_leaves(handed.graph, given)
                self.runs.append(
                    _GatedRun(
                        graph=original,
                        level=handed.level,
                        inputs=before,
                        tapped=dict(zip(names, returned[plain:], strict=True)),
                        zeros=zeros,
                        leaves=leaves,
                        received=_Received(leaves),
                    )
                )
            return restore(returned[:plain])

        return call

    def judged(self) -> list[TappedNode]:
        """Judge what came back; to be asked once, when the backward is done."""
        for run in self.runs:
            run.received.take_hooks_off()
        with runtime.drawing_from():
            return [seen for run in self.runs for seen in self._judged(run)]

    def _judged(self, run: _GatedRun) -> Iterator[TappedNode]:
        with torch.no_grad():
            values = values_between(run.graph, run.inputs, run.tapped)
        sent = {edge: zero.grad for edge, zero in run.zeros.items() if zero.grad is not None}
        unsteady = unsteady_nodes(run.graph)
        left_out = [
            node.name
            for node in run.graph.graph.nodes
            if reads_memory(node) or any(writes_to_first(user) for user in node.users)
        ]
        if left_out:
            self.notes.append(
                f"the gradients of {len(left_out)} nodes that are overwritten or strided anew were not looked at: "
                f"{', '.join(left_out[:FEW_NAMES])}{', …' if len(left_out) > FEW_NAMES else ''}"
            )
        for node in reversed(run.graph.graph.nodes):
            if node.name in left_out or node in unsteady:
                continue
            if node.name in run.leaves:
                yield self._judged_leaf(node, run, sent)
            elif node.op in ("call_function", "call_method") and not writes_to_first(node):
                cotangents = {out: _arriving(out, sent) for out in _outputs(node)}
                read = [source for source in node.all_input_nodes if (source.name, node.name) in run.zeros]
                if read and any(cotangent is not None for cotangent in cotangents.values()):
                    yield self._judged_node(node, read, cotangents, values, sent, run)

    def _judged_node(
        self,
        node: Node,
        read: Sequence[Node],
        cotangents: Mapping[Node, torch.Tensor | None],
        values: Mapping[Node, Any],
        sent: Mapping[Edge, torch.Tensor],
        run: _GatedRun,
    ) -> TappedNode:
        given = {source: values[source] for source in node.all_input_nodes}
        given |= {out: cotangent for out, cotangent in cotangents.items() if cotangent is not None and out is not node}
        if (own := cotangents.get(node)) is not None:
            given[node] = own
        region = Region(run.graph, (node,), tuple(node.all_input_nodes))

        def slopes(values: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
            leaves = {source: values[source].detach().requires_grad_() for source in read}
            with torch.enable_grad():
                result = region.run({**values, **leaves})
                outputs = {out: result if out is node else result[out.args[1]] for out in cotangents if out in values}
                roots = [(result, values[out]) for out, result in outputs.items() if result.requires_grad]
                found = (
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
                for (source, leaf), slope in zip(leaves.items(), found, strict=True)
            }

        candidate = {
            source.name: sent.get((source.name, node.name), torch.zeros_like(values[source])) for source in read
        }
        before = runtime.drawn()
        reference = slopes(given)
        is_drawn = runtime.has_drawn_since(before)
        local = () if is_drawn else self.judge.judge(f"{node.name}.grad", reference, candidate, slopes, given)
        return TappedNode(node=node, level="backward", local=local, region=(node,))

    def _judged_leaf(self, node: Node, run: _GatedRun, sent: Mapping[Edge, torch.Tensor]) -> TappedNode:
        same = [name for name, leaf in run.leaves.items() if leaf is run.leaves[node.name]]
        parts = {edge: slope for edge, slope in sent.items() if edge[0] in same}
        received = run.received.get(node.name)
        zero = torch.zeros_like(run.leaves[node.name])

        def total(given: Mapping[Any, torch.Tensor]) -> torch.Tensor:
            return sum(given.values(), zero.to(next(iter(given.values())).dtype)) if given else zero

        local = self.judge.judge(
            f"{node.name}.grad", total(parts), zero if received is None else received, total, parts
        )
        return TappedNode(node=node, level="backward", local=local, region=(node,))


def _gate(graph_module: GraphModule, edges: Sequence[Edge]) -> None:
    nodes = {node.name: node for node in graph_module.graph.nodes}
    last = [node for node in graph_module.graph.nodes if node.op == "placeholder"][-1:]
    graph = graph_module.graph
    for index, (source, reader) in enumerate(edges):
        with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
            zero = graph.placeholder(f"gate_{index}")
        last = [zero]
        user = nodes[reader] if reader in nodes else graph.output_node()
        with graph.inserting_before(user):
            passed = graph.call_function(torch.ops.aten.add.Tensor, (nodes[source], zero))
        for made in (zero, passed):
            made.meta = {key: nodes[source].meta[key] for key in ("val", "example_value") if key in nodes[source].meta}
        if user.op == "output":
            returned = cast(Sequence[Any], user.args[0])
            plain = [passed if value is nodes[source] else value for value in returned]
            user.args = (tuple(plain),)
        else:
            user.replace_input_with(nodes[source], passed)
    graph.lint()
    graph_module.recompile()


def _edges(graph_module: GraphModule, trained: set[Node]) -> list[Edge]:
    """Return the edges that a gate can be put on: floats of a fixed size on the way of a gradient."""
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
    nodes = {node.name: node for node in graph_module.graph.nodes}
    made = {}
    for edge in edges:
        value = graphs.known_value(nodes[edge[0]], graph_module)
        made[edge] = torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device, requires_grad=True)
    return made


def _outputs(node: Node) -> list[Node]:
    """Return the nodes that stand for what a node returns: itself, or what is taken out of its tuple."""
    taken = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem" and user.args[0] is node]
    is_tuple = isinstance(node.meta.get("val", node.meta.get("example_value")), (tuple, list))
    return taken if is_tuple else [node]


def _arriving(node: Node, sent: Mapping[Edge, torch.Tensor]) -> torch.Tensor | None:
    parts = [
        slope
        for user in node.users
        if (slope := sent.get((node.name, OUTPUT if user.op == "output" else user.name))) is not None
    ]
    return sum(parts[1:], parts[0]) if parts else None
