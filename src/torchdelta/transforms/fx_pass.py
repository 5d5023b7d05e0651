"""A user's own pass `fn(graph_module, example_inputs) -> callable`.

The option `graph` says which graphs it gets: dynamo's, the ATen graphs after AOTAutograd, or the exported one. Start
with `FxPass.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch.compile.seams import HandedGraph, Seam, graph_behind, hand_on
from torchdelta._torch.graphs import graphs
from torchdelta.errors import UsageError
from torchdelta.program.programs import load_callable, require_module
from torchdelta.program.sides import Side, state_of
from torchdelta.transforms.base import Options, Traits, Transform, TransformedSide
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import export_side

GRAPHS = ("dynamo", "aten", "export")


class FxPass(Transform):
    """The pass as a torch.compile backend (`graph=dynamo`, `graph=aten`) or on the exported graph (`graph=export`)."""

    def __init__(self, function: graphs.Pass | str, options: Options) -> None:
        """Take the pass, or its name, and read the option `graph`: "dynamo" by default, "aten" or "export".

        A named pass is loaded when it is first applied, because its module may change torch, and the yardstick must be
        known by then. The other options are those of torch.compile; they are checked here, except with `graph=export`,
        which ignores them. UsageError if the pass is not callable, or if an option is unknown or wrong.
        """
        if isinstance(function, str):
            require_module(function, what="pass")
        elif not callable(function):
            raise UsageError(f"a pass is a function of a graph module and its inputs, not {type(function).__name__}")
        rest = dict(options)
        self.graph = str(rest.pop("graph", "dynamo"))
        if self.graph not in GRAPHS:
            raise UsageError(f"unknown graph {self.graph!r}: a pass works on {', '.join(GRAPHS)}")
        self.named = function
        self.options = rest
        self.traits = Traits(has_seam=True, is_compiler=self.graph != "export")
        if self.traits.is_compiler:
            self._compiler(hand_on)  # checks the options

    @cached_property
    def function(self) -> graphs.Pass:
        """The pass itself; UsageError or ProgramError if its name cannot be loaded."""
        return load_callable(self.named, what="pass") if isinstance(self.named, str) else self.named

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side that runs, in place of each captured graph, the callable that the pass makes of it.

        The `seam` gets each graph before the pass. With `graph=export` the pass runs at once on the one exported graph;
        otherwise it runs as a backend of torch.compile, when the side is first called.
        """
        _ = self.function  # loaded here, because inside of a compiler its error would be the compiler's
        if self.traits.is_compiler:
            with self._compiler(seam).apply(side, draws_random=draws_random, lifted=lifted) as transformed:
                yield transformed
            return
        module, exported = export_side(side, strict=False)
        call = self._run_pass(seam, module, (*exported.args, *exported.kwargs.values()), "export")
        yield TransformedSide.counting_calls(replace(exported, call=call, owner=_owner(call, exported)), captured=1)

    def _compiler(self, seam: Seam) -> Compiler:
        """Return a compiler whose backend is the pass, with this seam before it; UsageError if an option is wrong.

        With `graph=aten` the pass gets the forward, backward and inference graphs of AOTAutograd, otherwise dynamo's.
        """

        def backend(graph_module: GraphModule, example_inputs: list[Any], **_: Any) -> Any:
            return self._run_pass(seam, graph_module, example_inputs, "dynamo")

        def compiler(graph_module: GraphModule, example_inputs: Sequence[Any], level: str) -> Callable[..., Any]:
            return self._run_pass(seam, graph_module, example_inputs, level)

        return Compiler(graphs.after_aot(compiler) if self.graph == "aten" else backend, self.options)

    def _run_pass(self, seam: Seam, module: GraphModule, inputs: Sequence[Any], level: str) -> Callable[..., Any]:
        """Hand a graph to the seam at this level, and return the seam's callable; `make` there runs the pass.

        It returns what the pass returns, or if that is None the graph, changed in place; TypeError if it is not
        callable.
        """

        def make(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return graphs.as_callable(self.function(graph, example_inputs), graph)

        return seam(HandedGraph(graph=module, example_inputs=inputs, make=make, level=level))


def _owner(call: Callable[..., Any], exported: Side) -> Callable[..., Any]:
    """Return the module whose state a call changes: the graph behind the call, or else the exported module.

    The graph counts only if it has all of the exported module's parameters and buffers by name.
    """
    graph = graph_behind(call)
    if graph is None:
        return exported.owner
    state, before = state_of(graph), state_of(exported.owner)
    has_all = before.parameters.keys() <= state.parameters.keys() and before.buffers.keys() <= state.buffers.keys()
    return graph if has_all else exported.owner
