"""PT2E quantization: the exported program with its values rounded to a few levels, by any quantizer.

The quantized graph runs eagerly as it is: its quantize and dequantize nodes decide the values, and not the kernels that
a backend would put in their place. It has no backward.

Start with `Quantize.apply` and `quantize`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta import errors
from torchdelta._torch.compile.dynamo import Witness, counted
from torchdelta._torch.compile.seams import HandedGraph, Seam, hand_on
from torchdelta._torch.graphs import handles
from torchdelta._torch.graphs.nodes import module_path
from torchdelta.errors import EnvironmentUnfit, ProgramError, UsageError
from torchdelta.program.copies import copy_together
from torchdelta.program.programs import load_callable
from torchdelta.program.sides import Side
from torchdelta.registry import nearest
from torchdelta.transforms.base import Options, Traits, Transform, TransformedSide, require_known
from torchdelta.transforms.export import export_side

_PT2E = "torchao.quantization.pt2e"
_X86 = f"{_PT2E}.quantizer.x86_inductor_quantizer"
_ANNOTATION = "quantization_annotation"

OWN_WEIGHTS = "a quantized graph has weights of its own, which were not compared by themselves"

IsInside = Callable[[Node, str], bool]
"""Tells whether a node belongs to the module of that path."""

Quantizer = Any
"""A quantizer of torchao: it annotates the nodes of a graph with how to quantize their values."""


class Quantize(Transform):
    """`quantize:x86`, or any quantizer by `file.py:factory`; `only=MODULE` quantizes one module."""

    traits = Traits(
        has_seam=True,
        has_backward=False,
        rounds_to_levels=True,
        # without a backward no output requires grad, and rounding makes a copy
        excused_clauses=frozenset({"requires_grad", "aliasing"}),
        # weights are folded into others and become integers, so the same name need not mean the same values
        keeps_names=False,
    )

    def __init__(self, quantizer: str, options: Options) -> None:
        """Read the quantizer's name, which is loaded at once, and the option `only`.

        UsageError if an option or the name is unknown, UsageError or ProgramError if a factory cannot be loaded;
        EnvironmentUnfit if torchao is not installed.
        """
        require_known("quantize", options, ("only",))
        self.quantizer_factory = quantizer_factory(quantizer)
        self.only = str(options["only"]) if "only" in options else None

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with its call exported and quantized, after a calibration on the side's own inputs.

        It runs under `no_grad`. Of the program's state only buffers are kept, and a note says that weights are not
        compared. The `seam` gets the exported graph with its handles. Calls count as transformed only if the quantized
        graph has quantizing nodes. Raises what `quantize` raises; the other keywords are not used.
        """
        graph, names = export_with_handles(side)
        witness = Witness(captured=1)
        quantized: GraphModule = graph

        def make(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            nonlocal quantized
            quantized = quantize(graph, side, self.quantizer_factory, only=self.only)
            witness.captured = int(has_levels(quantized))
            return quantized

        call = for_inference(seam(HandedGraph(graph=graph, example_inputs=side.args, make=make, level="export")))
        if witness.captured:
            call = counted(call, witness)
        yield TransformedSide(side=_with_buffers(side, call, quantized, names), witness=witness, notes=[OWN_WEIGHTS])


def quantize_side(
    side: Side, quantizer: str | Callable[[], Quantizer], only: str | None = None
) -> tuple[GraphModule, GraphModule, Side]:
    """Return the exported graph of a side, its quantized copy, and the side that runs the copy under `no_grad`.

    `quantizer` is a name as in `quantize:NAME`, or a function that builds one; `only` is the path of the one module to
    quantize, or None for all. Nodes of both graphs carry the handles that match them. Raises what `quantizer_factory`
    and `quantize` raise.
    """
    factory = quantizer_factory(quantizer) if isinstance(quantizer, str) else quantizer
    reference, names = export_with_handles(side)
    candidate = quantize(reference, side, factory, only=only)
    return reference, candidate, _with_buffers(side, for_inference(candidate), candidate, names)


def export_with_handles(side: Side) -> tuple[GraphModule, Mapping[str, str]]:
    """Return the exported graph of a side with a handle on every node, and a mapping of the names of its state.

    It has the program's name of each tensor by its name in the graph.
    """
    graph, exported = export_side(side, strict=False)
    handles.assign_handles(graph)
    return graph, exported.names or {}


def has_levels(graph: GraphModule) -> bool:
    """Tell whether any node of a graph quantizes or dequantizes a value."""
    return any(handles.is_quantizing(node) for node in handles.handled_nodes(graph))


def quantizer_factory(name: str) -> Callable[[], Quantizer]:
    """Return a function without arguments that builds the quantizer of that name, which is `x86` or `file.py:factory`.

    EnvironmentUnfit if torchao is not installed; UsageError if the name is unknown, UsageError or ProgramError if the
    factory cannot be loaded.
    """
    _import_torchao(f"{_PT2E}.quantize_pt2e")
    if name == "x86":
        return _default_x86
    if ":" not in name:
        raise UsageError(f"unknown quantizer {name!r}: {nearest(name, ('x86',))} One of your own is file.py:factory.")
    return load_callable(name, what="quantizer")


def is_within(node: Node, path: str) -> bool:
    """Tell whether a node was traced in the module of that path, or in one of its parts.

    For the empty path, only nodes that belong to no module count.
    """
    return f"{module_path(node)}.".startswith(f"{path}.")


def quantize(
    graph: GraphModule,
    side: Side,
    factory: Callable[[], Quantizer],
    *,
    only: str | None = None,
    is_inside: IsInside = is_within,
) -> GraphModule:
    """Return a quantized copy of a graph, calibrated by one run on a copy of the side's inputs.

    `only` is the path of the one module to quantize, None for all, and `is_inside` tells which nodes belong to it. The
    copy's buffers are as before the calibration, and its nodes carry the handles of the nodes that they come from.
    UsageError if no node was traced in that module or `factory` does not return a quantizer; ProgramError if `factory`
    raises or the inputs cannot be copied; EnvironmentUnfit if torchao is not installed.
    """
    pt2e = _import_torchao(f"{_PT2E}.quantize_pt2e")
    quantizer = _build_quantizer(factory)
    if only is not None:
        _require_module(graph, only)
        quantizer = QuantizedSubset(quantizer, only, is_inside)
    prepared = pt2e.prepare_pt2e(copy.deepcopy(graph), quantizer)
    handles.share_handles_of_folded(graph, prepared)
    args, kwargs = copy_together((side.args, side.kwargs), name="the inputs to calibrate on")
    with torch.no_grad():
        prepared(*args, **kwargs)
    _forget_calibration(prepared, graph)
    observed = handles.observed_handles(prepared)
    converted: GraphModule = pt2e.convert_pt2e(prepared)
    handles.restore_handles(converted, observed)
    _share_handles_with_new_nodes(converted)
    return converted


class QuantizedSubset:
    """A quantizer that quantizes the nodes of one module, and leaves the others as they are."""

    def __init__(self, quantizer: Quantizer, path: str, is_inside: IsInside) -> None:
        self.quantizer = quantizer
        self.path = path
        self.is_inside = is_inside

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the quantizer inside, for every name that this object does not have."""
        return getattr(self.quantizer, name)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Let the quantizer annotate a graph in place, remove annotations outside of the module, and return the graph.

        Specs that take scale and zero point from a place that is not quantized any more are removed too.
        """
        annotated: GraphModule = self.quantizer.annotate(model) or model
        nodes = [node for node in annotated.graph.nodes if _ANNOTATION in node.meta]
        for node in nodes:
            if not self.is_inside(node, self.path):
                del node.meta[_ANNOTATION]
        inside = [node for node in nodes if _ANNOTATION in node.meta]
        while _drop_dangling(inside):
            pass
        return annotated


def _drop_dangling(nodes: list[Node]) -> bool:
    """Remove the specs that take scale and zero point from a node or edge that is not quantized.

    The annotations of `nodes` are changed in place. Return whether a spec was removed: others may dangle then.
    """
    places: set[Any] = set()
    for node in nodes:
        annotation = node.meta[_ANNOTATION]
        places |= {node} if annotation.output_qspec is not None else set()
        places |= {(source, node) for source, spec in annotation.input_qspec_map.items() if spec is not None}
    has_dropped = False
    for node in nodes:
        annotation = node.meta[_ANNOTATION]
        if not _sources(annotation.output_qspec) <= places:
            annotation.output_qspec, has_dropped = None, True
        for source, spec in annotation.input_qspec_map.items():
            if not _sources(spec) <= places:
                annotation.input_qspec_map[source], has_dropped = None, True
    return has_dropped


def _sources(spec: Any) -> set[Any]:
    """Return the nodes and edges that a quantizer's spec takes scale and zero point from; empty if it has its own."""
    shared = getattr(spec, "edge_or_node", None)
    return set(getattr(spec, "derived_from", None) or ()) | ({shared} if shared is not None else set())


def _default_x86() -> Quantizer:
    """Return torchao's quantizer for x86 with its default config; EnvironmentUnfit if torchao is not installed."""
    x86 = _import_torchao(_X86)
    return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())


def _import_torchao(module: str) -> Any:
    """Import a module of torchao by its full name and return it; EnvironmentUnfit if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"quantization needs torchao, which does not import ({error}): pip install 'torchdelta[quantize]'"
        ) from error


def _build_quantizer(factory: Callable[[], Quantizer]) -> Quantizer:
    """Call the factory and return its quantizer.

    Raise ProgramError if the factory raises, and UsageError if its result has no method `annotate`.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    try:
        quantizer = factory()
    except errors.caught_from_user_code() as error:
        raise ProgramError(f"the quantizer {name} could not be built: {type(error).__name__}: {error}") from error
    if not callable(getattr(quantizer, "annotate", None)):
        raise UsageError(
            f"{name} returns {type(quantizer).__name__}, which is not a quantizer: name a class or function without "
            "arguments that returns a PT2E quantizer"
        )
    return quantizer


def _require_module(graph: GraphModule, path: str) -> None:
    """Raise UsageError, with the nearest paths, if no node of the graph was traced in the module of that path.

    An empty path is always accepted.
    """
    if path and not any(is_within(node, path) for node in graph.graph.nodes):
        paths = dict.fromkeys(module_path(node) for node in graph.graph.nodes)
        raise UsageError(f"no node is in the module {path!r}: {nearest(path, filter(None, paths))}")


def _forget_calibration(prepared: GraphModule, graph: GraphModule) -> None:
    """Copy the buffers of `graph` into those of `prepared`, because batch norm counts the calibration as a call.

    Buffers of `prepared` without one of the same name and shape in `graph` stay as they are.
    """
    before = dict(graph.named_buffers())
    with torch.no_grad():
        for name, buffer in prepared.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


def for_inference(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the arguments of the call and runs it under `no_grad`: rounding has no gradient."""

    def infer(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return call(*args, **kwargs)

    return infer


def _share_handles_with_new_nodes(converted: GraphModule) -> None:
    """Give nodes that quantizing added the handles of the nodes that they were added for, so that they are matched.

    A quantizing node without handles gets those of its reader, if it has only one and that is not the output. Then its
    sources without handles, such as scales and zero points but not placeholders, get those of the quantizing node.
    Nodes with handles keep theirs.
    """
    quantizing = [node for node in handles.handled_nodes(converted) if handles.is_quantizing(node)]
    for node in reversed(quantizing):
        readers = [user for user in node.users if user.op != "output"]
        if not handles.handles_of(node) and len(readers) == len(node.users) == 1:
            handles.write_handles(node, handles.handles_of(readers[0]))
        for source in node.all_input_nodes:
            if source.op != "placeholder" and not handles.handles_of(source):
                handles.write_handles(source, handles.handles_of(node))


def _with_buffers(side: Side, call: Callable[..., Any], graph: GraphModule, names: Mapping[str, str]) -> Side:
    """Return the side with this call, and with the graph as the owner of its state, of which only buffers are named.

    `names` has the program's name of each tensor by its name in the graph; buffers that are not in it are left out.
    """
    buffers = {name: names[name] for name, _ in graph.named_buffers() if name in names}
    return replace(side, call=call, owner=graph, names=buffers)
