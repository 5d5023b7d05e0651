"""PT2E quantization: the exported program with its values rounded to a few levels, by any quantizer.

The quantized graph is run as it is, eagerly: what it computes is decided by its quantize and dequantize nodes, and not
by the kernels that a backend makes of them. It has no backward.
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
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.export import exported

_PT2E = "torchao.quantization.pt2e"
_X86 = f"{_PT2E}.quantizer.x86_inductor_quantizer"
_ANNOTATION = "quantization_annotation"

OWN_WEIGHTS = "a quantized graph has weights of its own, which were not compared by themselves"

IsInside = Callable[[Node, str], bool]
"""Tells whether a node belongs to the module of that path."""

Quantizer = Any
"""What torchao calls one: it annotates the nodes of a graph with how their values are to be quantized."""


class Quantize(Transform):
    """`quantize:x86`, or any quantizer by `file.py:factory`; `only=MODULE` quantizes what is in one module."""

    has_seam = True
    has_backward = False
    rounds_to_levels = True
    changes = frozenset({"requires_grad", "aliasing"})
    """What has no backward requires no grad, and what is rounded is a copy."""
    keeps_names = False
    """Weights are folded into others and become integers: what has the same name need not be the same."""

    def __init__(self, quantizer: str, options: Options) -> None:
        require_known("quantize", options, ("only",))
        self.quantizer = quantizer_named(quantizer)
        self.only = str(options["only"]) if "only" in options else None

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Export the side, prepare it, calibrate it on its own inputs, and convert it."""
        graph, names = exported_with_handles(side)
        witness = Witness(captured=1)
        last: GraphModule = graph

        def make(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            nonlocal last
            last = quantize(graph, side, self.quantizer, only=self.only)
            witness.captured = int(has_levels(last))
            return last

        call = for_inference(seam(HandedGraph(graph=graph, example_inputs=side.args, make=make, level="export")))
        if witness.captured:
            call = counted(call, witness)
        yield Transformed(side=_with_buffers(side, call, last, names), witness=witness, notes=[OWN_WEIGHTS])


def quantized(
    side: Side, quantizer: str | Callable[[], Quantizer], only: str | None = None
) -> tuple[GraphModule, GraphModule, Side]:
    """Return the exported graph of a side, the quantized one with its handles, and a side that runs the latter."""
    factory = quantizer_named(quantizer) if isinstance(quantizer, str) else quantizer
    reference, names = exported_with_handles(side)
    candidate = quantize(reference, side, factory, only=only)
    return reference, candidate, _with_buffers(side, for_inference(candidate), candidate, names)


def exported_with_handles(side: Side) -> tuple[GraphModule, Mapping[str, str]]:
    """Export a side, and give every node a handle; return the names of its state in the program too."""
    graph, made = exported(side, strict=False)
    handles.assign_handles(graph)
    return graph, made.names or {}


def has_levels(graph: GraphModule) -> bool:
    """Tell whether anything in a graph is quantized."""
    return any(handles.is_quantizing(node) for node in handles.handled_nodes(graph))


def quantizer_named(name: str) -> Callable[[], Quantizer]:
    """Return what builds the quantizer of that name; EnvironmentUnfit where torchao is not installed."""
    _torchao(f"{_PT2E}.quantize_pt2e")
    if name == "x86":
        return _default_x86
    if ":" not in name:
        raise UsageError(f"unknown quantizer {name!r}: {nearest(name, ('x86',))} One of your own is file.py:factory.")
    return load_callable(name, what="quantizer")


def is_within(node: Node, path: str) -> bool:
    """Tell whether a node was traced in the module of that path, or in one of its parts."""
    return f"{module_path(node)}.".startswith(f"{path}.")


def quantize(
    graph: GraphModule,
    side: Side,
    factory: Callable[[], Quantizer],
    *,
    only: str | None = None,
    is_inside: IsInside = is_within,
) -> GraphModule:
    """Return a quantized copy of a graph, calibrated on the side's inputs; of `only` one module, if that is named."""
    pt2e = _torchao(f"{_PT2E}.quantize_pt2e")
    quantizer = _built(factory)
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
    _share_with_what_is_new(converted)
    return converted


class QuantizedSubset:
    """A quantizer that quantizes the nodes of one module, and leaves the others as they are."""

    def __init__(self, quantizer: Quantizer, path: str, is_inside: IsInside) -> None:
        self.quantizer = quantizer
        self.path = path
        self.is_inside = is_inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self.quantizer, name)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Let the quantizer annotate the graph, and take away what is outside."""
        annotated: GraphModule = self.quantizer.annotate(model) or model
        nodes = [node for node in annotated.graph.nodes if _ANNOTATION in node.meta]
        for node in nodes:
            if not self.is_inside(node, self.path):
                del node.meta[_ANNOTATION]
        kept = [node for node in nodes if _ANNOTATION in node.meta]
        while _drop_dangling(kept):
            pass
        return annotated


def _drop_dangling(nodes: list[Node]) -> bool:
    """Take away what shares or derives its parameters with a place that is not quantized; tell whether any did."""
    places: set[Any] = set()
    for node in nodes:
        annotation = node.meta[_ANNOTATION]
        places |= {node} if annotation.output_qspec is not None else set()
        places |= {(source, node) for source, spec in annotation.input_qspec_map.items() if spec is not None}
    found = False
    for node in nodes:
        annotation = node.meta[_ANNOTATION]
        if not _sources(annotation.output_qspec) <= places:
            annotation.output_qspec, found = None, True
        for source, spec in annotation.input_qspec_map.items():
            if not _sources(spec) <= places:
                annotation.input_qspec_map[source], found = None, True
    return found


def _sources(spec: Any) -> set[Any]:
    shared = getattr(spec, "edge_or_node", None)
    return set(getattr(spec, "derived_from", None) or ()) | ({shared} if shared is not None else set())


def _default_x86() -> Quantizer:
    x86 = _torchao(_X86)
    return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())


def _torchao(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"quantization needs torchao, which does not import ({error}): pip install 'torchdelta[quantize]'"
        ) from error


def _built(factory: Callable[[], Quantizer]) -> Quantizer:
    name = getattr(factory, "__qualname__", repr(factory))
    try:
        quantizer = factory()
    except errors.caught_from_user_code() as error:
        raise ProgramError(f"the quantizer {name} could not be built: {type(error).__name__}: {error}") from error
    if not callable(getattr(quantizer, "annotate", None)):
        raise UsageError(
            f"{name} gives no quantizer but {type(quantizer).__name__}: name a class or function without arguments "
            "that gives a PT2E quantizer"
        )
    return quantizer


def _require_module(graph: GraphModule, path: str) -> None:
    if path and not any(is_within(node, path) for node in graph.graph.nodes):
        paths = dict.fromkeys(module_path(node) for node in graph.graph.nodes)
        raise UsageError(f"no node is in the module {path!r}: {nearest(path, filter(None, paths))}")


def _forget_calibration(prepared: GraphModule, graph: GraphModule) -> None:
    """Put buffers back: calibrating is no call of the program, and batch norm may have counted it as one."""
    before = dict(graph.named_buffers())
    with torch.no_grad():
        for name, buffer in prepared.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


def for_inference(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call without autograd: through a rounding there is no gradient."""

    def infer(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return call(*args, **kwargs)

    return infer


def _share_with_what_is_new(converted: GraphModule) -> None:
    """Let what quantizing added carry the handles of what it was added for, lest it is taken for something else.

    Scales and zero points belong to what they quantize, and an input that is quantized for one reader alone to that.
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
    """Return the side that runs the graph; what it has of the program's state are buffers of the same name."""
    kept = {name: names[name] for name, _ in graph.named_buffers() if name in names}
    return replace(side, call=call, owner=graph, names=kept)
