"""Which layer should not be quantized? Each is quantized alone, and the effect on the outputs is measured."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.graphs.handles import handled_nodes, is_dequantizing
from torchdelta._torch.graphs.nodes import module_path, op_name
from torchdelta._torch.process import runtime, versions
from torchdelta.check.baseline import Progress
from torchdelta.check.check import Check
from torchdelta.check.prepare import prepare
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.kernels import measure
from torchdelta.errors import ProgramError, TorchDeltaError, UsageError
from torchdelta.program.sides import Side
from torchdelta.program.stages import SideFailed, observe
from torchdelta.records.case import CheckOptions
from torchdelta.records.sensitivity import Effect, LayerEffect, Sensitivity
from torchdelta.transforms.quantize import Quantize, export_with_handles, for_inference, has_levels, quantize

_RETURNED = re.compile(r"(?:iterations\[\d+\]\.)?outputs")
NOTHING_ALONE = "nothing in it is quantized by itself: its scales belong to nodes outside of it"


def measure_sensitivity(
    program: Callable[..., Any] | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: CheckOptions,
    progress: Progress = lambda _: None,
) -> Sensitivity:
    """Quantize each module alone that the quantizer would quantize, and all at once; return the effects on the outputs.

    The stage `forward` alone runs; stages and policy of `options` mean nothing. The module that loses most is first.
    UsageError if the transform is not a quantizer; ProgramError if the program fails eagerly, or if the quantizer fails
    on the whole program; ProgramError too if the quantized whole fails when run.
    """
    with runtime.preserved():
        check = prepare(program, args, kwargs, options=replace(options, stages=("forward",)), progress=progress)
        if not isinstance(check.transform, Quantize):
            raise UsageError(
                f"{check.case.transform} quantizes nothing, so there is no layer to be sensitive to it: name a "
                "quantizer, such as quantize:x86"
            )
        versions.require_supported()
        return _OneByOne(check=check, transform=check.transform).run()


@dataclass(kw_only=True)
class _OneByOne:
    """Quantizes one module after the other; `run` returns the result."""

    check: Check
    transform: Quantize
    notes: dict[str, None] = field(default_factory=dict)

    def run(self) -> Sensitivity:
        """Quantize the whole program and then each module alone; return the effects, the largest loss first.

        Modules whose effect is not known come last. A note says if nothing is quantized. `measure_sensitivity` names
        the exceptions.
        """
        start = time.perf_counter()
        baseline = self.check.baseline
        _ = baseline.reference  # a program that fails eagerly is reported before the quantizer is blamed
        side = Side.copied_from(baseline.program)
        graph, _ = export_with_handles(side)
        baseline.progress("everything quantized")
        whole = self._quantize_all(graph, side)
        readers = _readers(whole)
        if not readers:
            self.notes["the quantizer quantizes nothing in this program"] = None
        layers = []
        for number, (path, ops) in enumerate(readers.items(), 1):
            baseline.progress(f"{path or 'the outermost module'} alone ({number} of {len(readers)})")
            layers.append(self._quantize_one(graph, side, path, ops))
        try:
            together = self._effects(whole)
        except SideFailed as failed:
            words = f"{self.check.case.transform} on {self.check.case.program} as a whole fails when it runs"
            raise ProgramError(f"{words}: {_words(failed.error)}") from failed
        return Sensitivity(
            case=self.check.case,
            environment=versions.environment(),
            modules=tuple(sorted(layers, key=_by_loss)),
            together=together,
            notes=tuple(self.notes),
            seconds=time.perf_counter() - start,
        )

    def _quantize_all(self, graph: GraphModule, side: Side) -> GraphModule:
        """Return a copy of the graph with everything quantized that the transform's `only` allows.

        `side` has the inputs to calibrate on. A TorchDeltaError passes through; any other exception becomes a
        ProgramError.
        """
        try:
            return quantize(graph, side, self.transform.quantizer_factory, only=self.transform.only)
        except TorchDeltaError:
            raise
        except Exception as error:
            name = self.check.case.transform
            raise ProgramError(f"{name} fails on {self.check.case.program} as a whole: {_words(error)}") from error

    def _quantize_one(self, graph: GraphModule, side: Side, path: str, ops: tuple[str, ...]) -> LayerEffect:
        """Quantize the module at `path` alone, without its submodules; return its effects, or why they are not known.

        The reason is the exception of the quantizer or of the run, which is not raised, or that nothing was quantized.
        `graph` is not changed, and `side` has the inputs to calibrate on. `ops` is only copied into the result.
        """
        try:
            quantized = quantize(graph, side, self.transform.quantizer_factory, only=path, is_inside=_is_directly_in)
            if not has_levels(quantized):
                return LayerEffect(module_path=path, ops=ops, reason=NOTHING_ALONE)
            return LayerEffect(module_path=path, ops=ops, effects=self._effects(quantized))
        except SideFailed as failed:
            return LayerEffect(module_path=path, ops=ops, reason=_words(failed.error))
        except Exception as error:  # the quantizer is not ours, and may raise anything
            return LayerEffect(module_path=path, ops=ops, reason=_words(error))

    def _effects(self, graph: GraphModule) -> tuple[Effect, ...]:
        """Run a quantized graph on copies of the inputs, and return how far each output tensor is from the reference's.

        An output tensor of the reference that is neither floating-point nor complex, or for which the graph returns
        another shape or no tensor, is left out with a note. SideFailed if the graph raises.
        """
        baseline = self.check.baseline
        fresh = Side.copied_from(baseline.program, with_callable=False)
        side = replace(fresh, call=for_inference(graph), owner=graph, names={})
        reference = baseline.reference.stages["forward"]
        candidate = observe(side, baseline.plan, baseline.original, baseline.scope).stages["forward"]
        effects = []
        for path, ours in reference.items():
            theirs = candidate.get(path)
            if not _RETURNED.match(path) or not isinstance(ours, torch.Tensor):
                continue
            if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape or not is_inexact(ours.dtype):
                self.notes[f"{path} has no SQNR: {_described(ours)} became {_described(theirs)}"] = None
                continue
            effects.append(Effect(path=path, measurement=measure(ours, theirs)))
        return tuple(effects)


def _readers(graph: GraphModule) -> dict[str, tuple[str, ...]]:
    """Return, by the path of each module, the names of its operations that read a dequantized value, each name once.

    Modules without such operations are left out; the output node does not count.
    """
    readers: dict[str, dict[str, None]] = {}
    for node in handled_nodes(graph):
        if is_dequantizing(node):
            for reader in node.users:
                if reader.op != "output":
                    readers.setdefault(module_path(reader), {})[op_name(reader)] = None
    return {path: tuple(ops) for path, ops in readers.items()}


def _is_directly_in(node: torch.fx.Node, path: str) -> bool:
    """Tell whether a node was traced in the module itself, and not in a module within it."""
    return module_path(node) == path


def _by_loss(layer: LayerEffect) -> tuple[bool, float]:
    """Return the key that sorts layers by SQNR, the lowest first, and those without one last."""
    return layer.sqnr_db is None, layer.sqnr_db or 0.0


def _words(error: BaseException) -> str:
    """Return the first line of `TYPE: MESSAGE` for an exception."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _described(value: Any) -> str:
    """Return dtype and shape of a tensor, as in `float32[2, 3]`, or the name of the type of any other value."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
