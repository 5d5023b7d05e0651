"""A user's own pass `fn(graph_module, example_inputs) -> callable`, on the graph it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch import graphs
from torchdelta.errors import UsageError
from torchdelta.execute.sides import Side
from torchdelta.transforms.base import Options, Transform, Transformed
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import exported

GRAPHS = ("dynamo", "aten", "export")


class FxPass(Transform):
    """The pass as a torch.compile backend (`graph=dynamo`, `graph=aten`) or on the exported graph (`graph=export`)."""

    def __init__(self, function: graphs.Pass, options: Options) -> None:
        if not callable(function):
            raise UsageError(f"a pass is a function of a graph module and its inputs, not {type(function).__name__}")
        rest = dict(options)
        self.graph = str(rest.pop("graph", "dynamo"))
        if self.graph not in GRAPHS:
            raise UsageError(f"unknown graph {self.graph!r}: a pass works on {', '.join(GRAPHS)}")
        self.function = function
        self.compiler: Compiler | None = None
        if self.graph != "export":
            self.is_compiler = True
            self.compiler = Compiler(graphs.aten_backend(function) if self.graph == "aten" else self._backend, rest)

    @contextmanager
    def applied(self, side: Side, *, draws_random: bool, lifted: bool = False) -> Iterator[Transformed]:
        """Run the pass on each captured graph."""
        if self.compiler is not None:
            with self.compiler.applied(side, draws_random=draws_random, lifted=lifted) as transformed:
                yield transformed
            return
        module, made = exported(side, strict=False)
        inputs = (*made.args, *made.kwargs.values())
        call = graphs.runnable(self.function(module, inputs), module)
        yield Transformed.whole(replace(made, call=call), captured=1)

    def _backend(self, graph_module: GraphModule, example_inputs: list[Any], **_: Any) -> Any:
        return graphs.runnable(self.function(graph_module, example_inputs), graph_module)
