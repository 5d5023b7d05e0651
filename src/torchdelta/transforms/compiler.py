"""`torch.compile` with any backend: the program is compiled afresh each time the transform is applied.

Start with `Compiler.apply`; the capture itself is in `_torch/compile/dynamo.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch.compile import dynamo, settings
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta._torch.graphs.nodes import drop_metadata_assertions
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Options, OtherInputs, Traits, Transform, TransformedSide, flag, require_known

SAME_RANDOM = (
    "the program draws random numbers: the candidate was compiled with fallback_random, so that it draws the same ones"
)


def split_settings(options: Options) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split options into inductor's settings (`config.NAME`), those of dynamo and functorch, and all other options.

    Return three dicts: the first by NAME alone, the second by the setting's full name in torch, the third by the
    option's own name. UsageError if dynamo or functorch has no such setting, or if its value has another type;
    inductor's settings are not checked.
    """
    inductor: dict[str, Any] = {}
    others: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in options.items():
        part, dot, name = key.partition(".")
        if dot and part == "config":
            inductor[name] = value
        elif dot and part in ("dynamo", "functorch"):
            dynamo.require_known_config({name: value}, part)
            others[f"{dynamo.PARTS[part].__name__}.{name}"] = value
        else:
            rest[key] = value
    return inductor, others, rest


class Compiler(Transform):
    """`torch.compile(program, backend=…)`, with its options and the settings of the compiler's parts.

    Inductor's are `config.KEY`, those of the others `dynamo.KEY` and `functorch.KEY`.
    """

    traits = Traits(is_compiler=True, has_seam=True)

    def __init__(self, backend: str | dynamo.Backend, options: Options) -> None:
        """Read the options `dynamic`, `fullgraph`, `mode`, and the settings.

        `backend` is a registered name or a function. Settings override those of the mode. UsageError if the backend, an
        option, the mode or a setting is unknown, or if a value has the wrong type.
        """
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
        config, self.other_settings, rest = split_settings(options)
        require_known(name, rest, ("dynamic", "fullgraph", "mode"))
        self.is_inductor = backend == "inductor"
        self.backend = dynamo.backend_named(backend) if isinstance(backend, str) else backend
        self.dynamic = flag(rest, "dynamic")
        if self.dynamic:
            self.traits = replace(self.traits, other_inputs=OtherInputs.SIZES)
        self.fullgraph = bool(flag(rest, "fullgraph"))
        mode = rest.get("mode")
        dynamo.require_known_config(config)
        self.config = {**(dynamo.mode_config(str(mode), dynamic=self.dynamic) if mode else {}), **config}

    def with_backend(self, name: str) -> Compiler:
        """Return a copy of this compiler with the registered backend of that name; UsageError if there is none.

        Its options and settings stay.
        """
        changed = copy.copy(self)
        changed.backend, changed.is_inductor = dynamo.backend_named(name), name == "inductor"
        return changed

    def with_config(self, config: Mapping[str, Any]) -> Compiler:
        """Return a copy of this compiler with these inductor settings on top of its own; names are not checked."""
        changed = copy.copy(self)
        changed.config = {**self.config, **config}
        return changed

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with its call compiled afresh; it is compiled in its first call, while the context is open.

        The compiler's settings hold while the context is open. If `draws_random`, inductor's `fallback_random` is on
        too, so that the candidate draws the numbers of eager, and a note says so. If `lifted`, each captured graph is
        rewritten to compute in float64 before the `seam` gets it, and an exported program in the side loses its
        assertions about dtypes.
        """
        if lifted and isinstance(side.call, torch.nn.Module):
            # those of an exported program name the dtypes that it had natively
            drop_metadata_assertions(side.call)
        config = {**self.config, "fallback_random": True} if draws_random else self.config
        held = settings.applied(self.other_settings)
        compiling = dynamo.compiling(
            side.call,
            self.backend,
            dynamic=self.dynamic,
            fullgraph=self.fullgraph,
            config=config,
            lifted=lifted,
            seam=seam,
        )
        with held, compiling as (call, witness):
            notes = [SAME_RANDOM] if draws_random else []
            yield TransformedSide(side=replace(side, call=call), witness=witness, notes=notes)
