"""PT2E quantization: the exported program with its values rounded to a few levels, by any quantizer.

The quantized graph is run as it is, eagerly: what it computes is decided by its quantize and dequantize nodes, and not
by the kernels that a backend makes of them. It has no backward.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch import provenance
from torchdelta._torch.dynamo import Witness, counted
from torchdelta._torch.nodes import module_path
from torchdelta._torch.seams import Handed, Seam, hand_on
from torchdelta.compare.leaves import leaves_of
from torchdelta.errors import EnvironmentUnfit, ProgramError, UsageError
from torchdelta.execute.copies import copy_together
from torchdelta.execute.programs import load_callable
from torchdelta.execute.sides import Side
from torchdelta.registry import nearest
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.export import exported

_PT2E = "torchao.quantization.pt2e"
_X86 = f"{_PT2E}.quantizer.x86_inductor_quantizer"
_ANNOTATION = "quantization_annotation"

NO_BACKWARD = "a quantized graph has no backward and weights of its own: what it returns was compared, and nothing else"

Quantizer = Any
"""What torchao calls one: it annotates the nodes of a graph with how their values are to be quantized."""


class Quantize(Transform):
    """`quantize:x86`, or any quantizer by `file.py:factory`; `only=MODULE` quantizes what is in one module."""

    lowered_to = torch.float8_e8m0fnu
    """No float is as coarse as a step of a quantizer, and the noise policy knows floats only: by one whose unit is 1 it
    finds its own resolution too poor, and says so. An SQNR floor does not ask."""
    has_seam = True
    keeps_names = False
    """Weights are folded into others and become integers: there is nothing of the same name to compare."""

    def __init__(self, quantizer: str, options: Options) -> None:
        require_known("quantize", options, ("only",))
        self.quantizer = quantizer_named(quantizer)
        self.only = str(options["only"]) if "only" in options else None

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Export the side, prepare it, calibrate it on its own inputs, and convert it."""
        graph = exported_with_handles(side)
        witness = Witness(captured=1)
        trained: set[str] = set()

        def make(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            made, outputs = quantize(graph, side, self.quantizer, only=self.only)
            trained.update(outputs)
            witness.captured = int(any(provenance.is_quantizing(node) for node in provenance.handled_nodes(made)))
            return made

        call = seam(Handed(graph=graph, example_inputs=side.args, make=make, level="export"))
        made = _without_backward(call, trained)
        if witness.captured:
            made = counted(made, witness)
        yield Transformed(side=_stateless(side, made), witness=witness, notes=[NO_BACKWARD])


def quantized(
    side: Side, quantizer: str | Callable[[], Quantizer], only: str | None = None
) -> tuple[GraphModule, GraphModule, Side]:
    """Return the exported graph of a side, the quantized one with its handles, and a side that runs the latter."""
    factory = quantizer_named(quantizer) if isinstance(quantizer, str) else quantizer
    reference = exported_with_handles(side)
    candidate, trained = quantize(reference, side, factory, only=only)
    return reference, candidate, _stateless(side, _without_backward(candidate, trained))


def exported_with_handles(side: Side) -> GraphModule:
    """Export a side, and give every node a handle."""
    graph, _ = exported(side, strict=False)
    provenance.assign_handles(graph)
    return graph


def quantizer_named(name: str) -> Callable[[], Quantizer]:
    """Return what builds the quantizer of that name; EnvironmentUnfit where torchao is not installed."""
    _torchao(f"{_PT2E}.quantize_pt2e")
    if name == "x86":
        return _default_x86
    if ":" not in name:
        raise UsageError(f"unknown quantizer {name!r}: {nearest(name, ('x86',))} One of your own is file.py:factory.")
    return load_callable(name, what="quantizer")


def quantize(
    graph: GraphModule, side: Side, factory: Callable[[], Quantizer], *, only: str | None = None
) -> tuple[GraphModule, set[str]]:
    """Return a quantized copy of a graph, calibrated on the side's inputs, and which outputs had a backward before."""
    pt2e = _torchao(f"{_PT2E}.quantize_pt2e")
    quantizer = _built(factory)
    if only is not None:
        _require_module(graph, only)
        quantizer = Within(quantizer, only)
    prepared = pt2e.prepare_pt2e(copy.deepcopy(graph), quantizer)
    provenance.share_folded(graph, prepared)
    args, kwargs = copy_together((side.args, side.kwargs), name="the inputs to calibrate on")
    outputs = leaves_of(prepared(*args, **kwargs))
    _forget_calibration(prepared, graph)
    observed = provenance.observed_handles(prepared)
    converted = pt2e.convert_pt2e(prepared)
    provenance.restore_handles(converted, observed)
    return converted, {path for path, leaf in outputs.items() if getattr(leaf, "requires_grad", False)}


class Within:
    """A quantizer that quantizes the nodes of one module, and leaves the others as they are."""

    def __init__(self, quantizer: Quantizer, path: str) -> None:
        self.quantizer = quantizer
        self.path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.quantizer, name)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Let the quantizer annotate the graph, and take away what is outside."""
        annotated: GraphModule = self.quantizer.annotate(model) or model
        nodes = [node for node in annotated.graph.nodes if _ANNOTATION in node.meta]
        for node in nodes:
            if not is_within(node, self.path):
                del node.meta[_ANNOTATION]
        kept = [node for node in nodes if _ANNOTATION in node.meta]
        while _drop_dangling(kept):
            pass
        return annotated


def is_within(node: Node, path: str) -> bool:
    """Tell whether a node was traced in the module of that path, or in one of its parts."""
    return f"{module_path(node)}.".startswith(f"{path}.")


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
    except (Exception, SystemExit) as error:
        raise ProgramError(f"the quantizer {name} could not be built: {type(error).__name__}: {error}") from error
    if not callable(getattr(quantizer, "annotate", None)):
        raise UsageError(
            f"{name} gives no quantizer but {type(quantizer).__name__}: name a class or function without arguments "
            "that gives a PT2E quantizer"
        )
    return quantizer


def _require_module(graph: GraphModule, path: str) -> None:
    if not any(is_within(node, path) for node in graph.graph.nodes):
        paths = dict.fromkeys(module_path(node) for node in graph.graph.nodes)
        raise UsageError(f"no node is in the module {path!r}: {nearest(path, filter(None, paths))}")


def _forget_calibration(prepared: GraphModule, graph: GraphModule) -> None:
    """Put buffers back: calibrating is no call of the program, and batch norm may have counted it as one."""
    before = dict(graph.named_buffers())
    with torch.no_grad():
        for name, buffer in prepared.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


def _without_backward(call: Callable[..., Any], trained: set[str]) -> Callable[..., Any]:
    """Return the call for inference: what it returns is marked as before, for only its values are to be judged."""

    def infer(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            outputs = call(*args, **kwargs)
        for path, leaf in leaves_of(outputs).items():
            if path in trained and isinstance(leaf, torch.Tensor):
                leaf.requires_grad_(True)
        return outputs

    return infer


def _stateless(side: Side, call: Callable[..., Any]) -> Side:
    return replace(side, call=call, owner=call, names={})
