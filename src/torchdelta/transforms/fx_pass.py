"""A user's own pass `fn(graph_module, example_inputs) -> callable`, or `fn(graph_module)`.

The option `graph` says which graphs it gets: dynamo's, the ATen graphs after AOTAutograd, the exported one, or the one
that `torch.fx.symbolic_trace` makes, which calls modules. A pass that changes none of them was not tested. Start with
`FxPass.apply`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile.seams import HandedGraph, Seam, graph_behind, hand_on
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.keys import content_key
from torchdelta._torch.graphs.lift_graph import lift_upcasts
from torchdelta._torch.graphs.nodes import every_node
from torchdelta._torch.graphs.pass_through import build, watch_calls
from torchdelta._torch.graphs.user_passes import Pass, run_pass
from torchdelta.errors import UsageError
from torchdelta.program.copies import copy_together, everything_in
from torchdelta.program.programs import load_callable, require_module
from torchdelta.program.sides import Side, State, state_of
from torchdelta.transforms.base import (
    Options,
    Traits,
    Transform,
    TransformedSide,
    accepts_unchanged,
    require_known,
)
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import export_side

GRAPHS = ("dynamo", "aten", "export", "symbolic")


class FxPass(Transform):
    """The pass as a torch.compile backend (`graph=dynamo`, `graph=aten`), or on one graph (`export`, `symbolic`)."""

    def __init__(self, function: Pass | str, options: Options) -> None:
        """Take the pass, or its name, and read the options `graph`, "dynamo" by default, and `unchanged`.

        A named pass is loaded when it is first applied, because its module may change torch, and the yardstick must be
        known by then. The other options are those of torch.compile, and are checked here; a pass on one graph has
        none. UsageError if the pass is not callable, or if an option is unknown or wrong; ProgramError if
        the file or module of a named pass does not exist.
        """
        if isinstance(function, str):
            require_module(function, what="pass")
        elif not callable(function):
            raise UsageError(f"a pass is a function of a graph module and its inputs, not {type(function).__name__}")
        rest = dict(options)
        self.graph = str(rest.pop("graph", "dynamo"))
        if self.graph not in GRAPHS:
            raise UsageError(f"unknown graph {self.graph!r}: a pass works on {', '.join(GRAPHS)}")
        self.must_change = not accepts_unchanged("pass", rest)
        rest.pop("unchanged", None)
        self.named = function
        self.options = rest
        self.has_float64 = False
        """Whether a graph that the pass got natively has values in float64."""
        self.traits = Traits(has_seam=True, is_compiler=self.graph in ("dynamo", "aten"))
        if self.traits.is_compiler:
            compiler = self._compiler(hand_on, [])  # checks the options
            self.traits = replace(self.traits, other_inputs=compiler.traits.other_inputs)
        else:
            require_known(f"a pass on graph={self.graph}", rest, ("graph", "unchanged"))

    @cached_property
    def function(self) -> Pass:
        """The pass itself; UsageError or ProgramError if its name cannot be loaded."""
        return load_callable(self.named, what="pass") if isinstance(self.named, str) else self.named

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side that runs, in place of each captured graph, the callable that the pass makes of it.

        The `seam` gets each graph before the pass. As a backend of torch.compile the pass runs when the side is first
        called, and the keywords are as in `Compiler.apply`. On one graph it runs at once, and `draws_random` and
        `lifted` are not used. UsageError or ProgramError if a named pass cannot be loaded; UsageError if
        `symbolic_trace` cannot trace the side. On one graph, exceptions of export and of the pass pass through. Unless
        `lifted`, `has_float64` is reset first.
        """
        self.has_float64 &= lifted  # a native run finds out anew
        _ = self.function  # loaded here, because inside of a compiler its error would be the compiler's
        changes: list[bool] = []
        if self.traits.is_compiler:
            with self._compiler(seam, changes, lifted=lifted).apply(
                side, draws_random=draws_random, lifted=lifted
            ) as transformed:
                transformed.witness.changes = changes
                yield transformed
            return
        module, traced = self.trace(side)
        inputs = (*traced.args, *traced.kwargs.values())
        call = self._run_pass(seam, module, inputs, self.graph, changes, lifted=lifted)
        owner = _owner(call, traced)
        # a pass may fold one layer into another, and then has weights of its own
        start = replace(traced, call=owner, owner=copy_together(owner, name="the pass's module"))
        side = replace(traced, call=call, owner=owner, start=start)
        yield TransformedSide.counting_calls(side, captured=1, changes=changes)

    def trace(self, side: Side) -> tuple[GraphModule, Side]:
        """Return the one graph that the pass gets, and the side that runs it.

        It is exported if `graph` is `export`, and else traced symbolically; UsageError if `torch.fx.symbolic_trace`
        cannot.
        """
        return export_side(side, strict=False) if self.graph == "export" else _trace_side(side)

    def _compiler(self, seam: Seam, changes: list[bool], *, lifted: bool = False) -> Compiler:
        """Return a compiler whose backend is the pass, with this seam before it; UsageError if an option is wrong.

        With `graph=aten` the pass gets the forward, backward and inference graphs of AOTAutograd, otherwise dynamo's.
        When it runs, it adds to `changes` whether it changed each graph, as `_run_pass` does.
        """

        def backend(graph_module: GraphModule, example_inputs: list[Any], **_: Any) -> Any:
            return self._run_pass(seam, graph_module, example_inputs, "dynamo", changes, lifted=lifted)

        def compiler(graph_module: GraphModule, example_inputs: Sequence[Any], level: str) -> Callable[..., Any]:
            return self._run_pass(seam, graph_module, example_inputs, level, changes, lifted=lifted)

        return Compiler(graphs.after_aot(compiler) if self.graph == "aten" else backend, self.options)

    def _run_pass(
        self, seam: Seam, module: GraphModule, inputs: Sequence[Any], level: str, changes: list[bool], *, lifted: bool
    ) -> Callable[..., Any]:
        """Hand a graph to the seam at this level, and return the seam's callable; `make` there runs the pass.

        `changes` gets an entry for each graph: whether the pass made another graph of it, or something else than a
        graph. The calls of a callable that still reaches the unchanged graph tell whether it only calls that. It
        stays empty if the user accepts that nothing changed. If `lifted`, the program is in float64: casts of
        the pass to float32, with which it widens a narrow program, then widen to float64. Natively, they stay as they
        are, and so they do in float64 if `has_float64` is set. A native call sets it if the graph or its inputs have
        values in float64.
        """
        if not lifted and _has_float64(module, inputs):
            self.has_float64 = True

        def make(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            """Run the pass and return its callable; if it must change graphs, add to `changes` whether it did."""
            before = content_key(graph) if self.must_change else None
            if self.must_change:
                build(graph)
            own = frozenset(node.name for node in every_node(graph))
            call = run_pass(self.function, graph, example_inputs)
            after = graph_behind(call)
            if self.must_change:
                changes.append(after is None or content_key(after) != before)
                # in float64 a callable may leave out what it does natively
                if after is None and not lifted and (unchanged := _graphs_in(call, before)):
                    call = watch_calls(call, unchanged, partial(_note_call, changes, len(changes) - 1))
            if lifted and after is not None and not self.has_float64:
                lift_upcasts(after, keep=own)
            return call

        return seam(HandedGraph(graph=module, example_inputs=inputs, make=make, level=level))


_MOST_REACHED = 10_000
"""A callable that reaches more objects is not searched for the graph: that would take longer than a run."""


def _graphs_in(call: Callable[..., Any], key: str | None) -> list[GraphModule]:
    """Return the graph modules with this `content_key` that a callable reaches: it may only call one of them.

    What cannot be looked into is left out, because the candidate need not do so either: a lazy mapping may raise.
    """
    reached = everything_in(call, most=_MOST_REACHED, skips_errors=True)
    return [each for each in reached if issubclass(type(each), GraphModule) and content_key(each) == key]


def _note_call(changes: list[bool], index: int, is_unchanged: bool) -> None:
    """Put at the index of `changes` what the last call of a pass's callable showed."""
    changes[index] = not is_unchanged


def _has_float64(graph_module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Tell whether an input, a value in a graph by its metadata, or a tensor of its module is in float64."""
    values = [node.meta.get("val", node.meta.get("example_value")) for node in every_node(graph_module)]
    tensors = [*inputs, *values, *graph_module.parameters(), *graph_module.buffers()]
    return any(isinstance(each, torch.Tensor) and each.dtype is torch.float64 for each in tensors)


def _trace_side(side: Side) -> tuple[GraphModule, Side]:
    """Return the graph that `torch.fx.symbolic_trace` makes of a side's module, and the side that runs it.

    UsageError if the side's callable is not a module, or if it cannot be traced.
    """
    other = "use graph=dynamo or graph=export"
    if not isinstance(side.call, torch.nn.Module):
        raise UsageError(f"graph=symbolic traces a module, and the program is {type(side.call).__name__}: {other}")
    try:
        module = torch.fx.symbolic_trace(side.call)
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"torch.fx.symbolic_trace cannot trace the program ({type(error).__name__}: {words}): {other}"
        ) from error
    names = _keep_unused(side.state, module)
    # a module that the graph calls is the program's own, and keeps what its hooks and its forward store in it
    carried = frozenset(str(node.target) for node in module.graph.nodes if node.op == "call_module")
    return module, replace(side, call=module, owner=module, names=names, carried=carried)


def _keep_unused(state: State, module: GraphModule) -> dict[str, str]:
    """Register the state that a traced module lacks, because the program does not use it; return the names of all.

    The names are those in the program by those in the traced module, as `Side.names` wants them. Tensors that tracing
    made buffers, such as plain attributes and constants, have no name, because they are not state of the program.
    """
    traced = state_of(module)
    known = state.parameters.keys() | state.buffers.keys()
    names = {name: name for name in (*traced.parameters, *traced.buffers) if name in known}
    unused = (f"unused_{index}" for index in itertools.count())
    free = (name for name in unused if name not in known and not hasattr(module, name))
    for kind, register in (("parameters", module.register_parameter), ("buffers", module.register_buffer)):
        for name, tensor in getattr(state, kind).items():
            if name not in names.values():
                own = next(free)
                register(own, tensor)
                names[own] = name
    return names


def _owner(call: Callable[..., Any], exported: Side) -> Callable[..., Any]:
    """Return the module whose state a call changes: the graph behind the call, or else the exported or traced module.

    The graph counts only if it has all of that module's parameters and buffers by name.
    """
    graph = graph_behind(call)
    if graph is None:
        return exported.owner
    state, before = state_of(graph), state_of(exported.owner)
    has_all = before.parameters.keys() <= state.parameters.keys() and before.buffers.keys() <= state.buffers.keys()
    return graph if has_all else exported.owner
