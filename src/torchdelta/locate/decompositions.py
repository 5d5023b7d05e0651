"""Which decomposition is wrong? Each operator that a backend decomposes runs whole and decomposed, on the same inputs.

`Decompositions` is a seam after AOTAutograd, with nothing decomposed yet. It runs the graph itself node by node, and
judges the decomposition of each node by the whole operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch.compile.seams import HandedGraph
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import is_unset
from torchdelta._torch.process import runtime
from torchdelta.nodewise.local import LocalJudge
from torchdelta.nodewise.regions import Region, copy_tensors, run_node
from torchdelta.nodewise.taps import TappedNode


@dataclass(kw_only=True)
class Decompositions:
    """A seam that judges decompositions on the first call of each graph."""

    judge: LocalJudge
    table: Callable[[], Mapping[Any, Callable[..., Any]]]
    """Returns the decompositions that the backend asked for, by operator."""
    nodes: list[TappedNode] = field(default_factory=list)
    total: int = 0
    notes: list[str] = field(default_factory=list)

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Hand the graph on; return a callable that runs the result, and in its first call judges decompositions first.

        The nodes that `table` can decompose are judged, except those that draw random numbers, in a run of a copy of
        the graph on copies of that call's arguments. The results are added to `nodes`, `total` and `notes`; torch's
        random generators are restored.
        """
        graph = graphs.copy_graph(handed.graph)
        compiled = handed.on()
        has_run = False

        def call(*args: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                with torch.no_grad(), runtime.drawing_from():
                    self.nodes += self._judged(graph, copy_tensors(args), handed.level)
            return compiled(*args)

        return call

    def _judged(self, graph: GraphModule, inputs: Sequence[Any], level: str) -> Iterator[TappedNode]:
        """Run the graph node by node on `inputs`, and yield the judgement of each node that `table` can decompose.

        Nodes that draw random numbers or return uninitialised memory are run, but not yielded. `total` grows by one for
        each node that is yielded, also if it could not be judged. `level` is only copied into the judgements.
        """
        interpreter = Interpreter(graph, garbage_collect_values=False)
        feed = iter(inputs)
        values: dict[Node, Any] = {}
        for node in graph.graph.nodes:
            if node.op == "output":
                continue
            before = runtime.generator_states()
            values[node] = next(feed) if node.op == "placeholder" else run_node(interpreter, node, values)
            decomposition = self.table().get(node.target)
            if decomposition is not None and not is_unset(node) and not runtime.has_drawn_since(before):
                self.total += 1
                yield self._judged_node(
                    Region(graph, (node,), tuple(node.all_input_nodes)), decomposition, values, level
                )

    def _judged_node(
        self, region: Region, decomposition: Callable[..., Any], values: Mapping[Node, Any], level: str
    ) -> TappedNode:
        """Run a node's decomposition on copies of its inputs; return the node, with the result judged by its own value.

        `region` is the node alone, and `values` has the value of each node so far. If the decomposition raises or
        returns NotImplemented, the node is returned as not judged; an exception is not raised, but noted. `level` is
        only copied into the result.
        """
        node = region.result
        args, kwargs = copy_tensors(map_arg((node.args, node.kwargs), values.__getitem__))
        inputs = {source: values[source] for source in region.reads}
        try:
            decomposed = decomposition(*args, **kwargs)
        except Exception as error:  # the node stays unjudged, and a note says so
            self.notes.append(
                f"{node.name} cannot be decomposed by itself: {type(error).__name__}: {error}".splitlines()[0]
            )
            return TappedNode(node=node, level=level, local=(), region=(node,), is_judged=False)
        if decomposed is NotImplemented:
            return TappedNode(node=node, level=level, local=(), region=(node,), is_judged=False)
        comparisons = self.judge.judge(node.name, values[node], decomposed, region.run, inputs)
        return TappedNode(node=node, level=level, local=comparisons, region=(node,))
