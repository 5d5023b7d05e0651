"""Transforms by name: the table `TRANSFORMS`, and `build`, which turns what a user wrote into a transform.

A new transform is one file in this folder and one line in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdelta._torch.compile import dynamo
from torchdelta.errors import UsageError
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
    """Builds a transform from the argument behind the colon of its name (empty if there is none) and its options."""

    build: Callable[[str, Options], Transform]
    argument: str = ""
    """What the argument stands for, for messages; empty if the transform takes none."""


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


def is_pass(spec: object) -> bool:
    """Tell whether a name, function or transform stands for a pass of the user's; nothing is loaded.

    A text does if it has a colon and the part before it is not a name in `TRANSFORMS`; a transform if it is an
    `FxPass`; any other value if it is callable.
    """
    if isinstance(spec, str):
        name, colon, _ = spec.partition(":")
        return bool(colon) and name not in TRANSFORMS
    return isinstance(spec, FxPass) if isinstance(spec, Transform) else callable(spec)


def build(spec: str | Transform | Callable[..., Any], options: Options) -> Transform:
    """Return the transform that a name, `file.py:fn` or a function stands for; a transform is returned as it is.

    A name is one of `TRANSFORMS`, with its argument behind a colon if it takes one. Any other text with a colon, and
    any function, is a pass; a named one is loaded when it is applied. UsageError if the name, its argument or an option
    is wrong; UsageError or ProgramError if a function cannot be loaded; EnvironmentUnfit if the transform needs a
    package that is not installed.
    """
    if isinstance(spec, Transform):
        return spec
    if not isinstance(spec, str):
        return FxPass(spec, options)
    name, colon, argument = spec.partition(":")
    if name in TRANSFORMS:
        factory = TRANSFORMS.get(name)
        if bool(argument) != bool(factory.argument):
            raise UsageError(f"transform {spec!r} is written {name}{':' if factory.argument else ''}{factory.argument}")
        return factory.build(argument, options)
    if colon:
        return FxPass(spec, options)
    known = [*TRANSFORMS, *(f"backend:{backend}" for backend in dynamo.backend_names())]
    raise UsageError(f"unknown transform {spec!r}: {nearest(name, known)} A pass of your own is file.py:fn.")
