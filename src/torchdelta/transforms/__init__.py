"""Transforms by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdelta._torch.compile import dynamo
from torchdelta.errors import UsageError
from torchdelta.program.programs import load_callable
from torchdelta.registry import Registry, nearest
from torchdelta.transforms.aot import Aot
from torchdelta.transforms.autocast import Autocast
from torchdelta.transforms.base import Options, Transform
from torchdelta.transforms.cast import Cast
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.decompose import Decompose
from torchdelta.transforms.export import Export
from torchdelta.transforms.fx_pass import FxPass
from torchdelta.transforms.quantize import Quantize
from torchdelta.transforms.replacement import OtherModule


@dataclass(frozen=True)
class TransformFactory:
    """How a transform is built from its options and from what stands behind the colon of its name, if anything does."""

    build: Callable[[str, Options], Transform]
    argument: str = ""
    """What to write behind the colon; empty when there is none."""


TRANSFORMS: Registry[TransformFactory] = Registry("transform")
TRANSFORMS.add("inductor", TransformFactory(lambda _, options: Compiler("inductor", options)))
TRANSFORMS.add("aot_eager", TransformFactory(lambda _, options: Compiler("aot_eager", options)))
TRANSFORMS.add(
    "aot_eager_decomp_partition", TransformFactory(lambda _, options: Compiler("aot_eager_decomp_partition", options))
)
TRANSFORMS.add("eager", TransformFactory(lambda _, options: Compiler("eager", options)))
TRANSFORMS.add("aot", TransformFactory(lambda _, options: Aot(options)))
TRANSFORMS.add("backend", TransformFactory(Compiler, "NAME"))
TRANSFORMS.add("export", TransformFactory(lambda _, options: Export(options)))
TRANSFORMS.add("decompose", TransformFactory(lambda _, options: Decompose(options)))
TRANSFORMS.add("cast", TransformFactory(Cast, "DTYPE"))
TRANSFORMS.add("autocast", TransformFactory(Autocast, "DTYPE"))
TRANSFORMS.add("quantize", TransformFactory(Quantize, "QUANTIZER"))
TRANSFORMS.add("module", TransformFactory(OtherModule, "FACTORY"))


def build(spec: str | Transform | Callable[..., Any], options: Options) -> Transform:
    """Return the transform of that name, or the pass that `file.py:fn` or a function is."""
    if isinstance(spec, Transform):
        return spec
    if not isinstance(spec, str):
        return FxPass(spec, options)
    name, colon, argument = spec.partition(":")
    if name in TRANSFORMS:
        named = TRANSFORMS.get(name)
        if bool(argument) != bool(named.argument):
            raise UsageError(f"transform {spec!r} is written {name}{':' if named.argument else ''}{named.argument}")
        return named.build(argument, options)
    if colon:
        return FxPass(load_callable(spec, what="pass"), options)
    known = [*TRANSFORMS, *(f"backend:{backend}" for backend in dynamo.backend_names())]
    raise UsageError(f"unknown transform {spec!r}: {nearest(name, known)} A pass of your own is file.py:fn.")
