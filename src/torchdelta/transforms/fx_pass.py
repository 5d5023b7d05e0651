"""A user's own pass `fn(graph_module, example_inputs) -> callable`, on the graph it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch.compile.seams import HandedGraph, Seam, graph_behind, hand_on
from torchdelta._torch.graphs import graphs
from torchdelta.errors import UsageError
from torchdelta.program.sides import Side, state_of
from torchdelta.transforms.base import Options, Transform, Transformed
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import exported

GRAPHS = ("dynamo", "aten", "export")


class FxPass(Transform):
    """The pass as a torch.compile backend (`graph=dynamo`, `graph=aten`) or on the exported graph (`graph=export`)."""

    has_seam = True

    def __init__(self, function: graphs.Pass, options: Options) -> None:
        if not callable(function):
            raise UsageError(f"a pass is a function of a graph module and its inputs, not {type(function).__name__}")
        rest = dict(options)
        self.graph = str(rest.pop("graph", "dynamo"))
        if self.graph not in GRAPHS:
            raise UsageError(f"unknown graph {self.graph!r}: a pass works on {', '.join(GRAPHS)}")
        self.function = function
        self.options = rest
        self.is_compiler = self.graph != "export"
        if self.is_compiler:
            self._compiler(hand_on)  # checks the options

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Run the pass on each captured graph."""
        if self.is_compiler:
            with self._compiler(seam).applied(side, draws_random=draws_random, lifted=lifted) as transformed:
                yield transformed
            return
        module, made = exported(side, strict=False)
        call = self._at(seam, module, (*made.args, *made.kwargs.values()), "export")
        yield Transformed.whole(replace(made, call=call, owner=_owner(call, made)), captured=1)

    def _compiler(self, seam: Seam) -> Compiler:
        def backend(graph_module: GraphModule, example_inputs: list[Any], **_: Any) -> Any:
            return self._at(seam, graph_module, example_inputs, "dynamo")

        def compiler(graph_module: GraphModule, example_inputs: Sequence[Any], level: str) -> Callable[..., Any]:
            return self._at(seam, graph_module, example_inputs, level)

        return Compiler(graphs.after_aot(compiler) if self.graph == "aten" else backend, self.options)

    def _at(self, seam: Seam, module: GraphModule, inputs: Sequence[Any], level: str) -> Callable[..., Any]:
        def make(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return graphs.as_callable(self.function(graph, example_inputs), graph)

        return seam(HandedGraph(graph=module, example_inputs=inputs, make=make, level=level))


def _owner(call: Callable[..., Any], given: Side) -> Callable[..., Any]:
    """Return whose state a call changes: many passes begin with a copy of their graph, and return that."""
    made = graph_behind(call)
    if made is None:
        return given.owner
    state, before = state_of(made), state_of(given.owner)
    has_all = before.parameters.keys() <= state.parameters.keys() and before.buffers.keys() <= state.buffers.keys()
    return made if has_all else given.owner
