"""torch.export: the program as one graph, run by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.program.sides import Side, state_holders
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.compiler import flag

ExportedProgram = torch.export.ExportedProgram


class Export(Transform):
    """`torch.export.export(program).module()`."""

    def __init__(self, options: Options) -> None:
        require_known("export", options, ("strict",))
        self.strict = bool(flag(options, "strict"))

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Export the side; its parameters keep their names."""
        yield Transformed.whole(exported(side, strict=self.strict)[1], captured=1)


def exported(
    side: Side, *, strict: bool, then: Callable[[ExportedProgram], ExportedProgram] = lambda program: program
) -> tuple[GraphModule, Side]:
    """Export a side, change the exported program by `then`, and return its module and the side that runs it."""
    owner, names = _as_module(side)
    program = then(torch.export.export(owner, side.args, side.kwargs, strict=strict))
    module = program.module()
    assert isinstance(module, GraphModule)
    return module, replace(side, call=module, owner=module, names=names)


class Exports:
    """Exports one program over and over, and traces it once in each precision: copying a graph is far cheaper."""

    def __init__(self) -> None:
        self._kept: dict[bool, tuple[GraphModule, Side]] = {}

    def of(self, side: Side, *, lifted: bool) -> tuple[GraphModule, Side]:
        """Return what `exported` would of a fresh side of the program."""
        if lifted not in self._kept:
            module, made = exported(side, strict=False)
            self._kept[lifted] = copy.deepcopy(module), made
            return module, made
        kept, made = self._kept[lifted]
        module = copy.deepcopy(kept)
        return module, replace(side, call=module, owner=module, names=made.names)


def _as_module(side: Side) -> tuple[torch.nn.Module, dict[str, str]]:
    """Return the side's callable as a module, and its names of the state: export takes only what is registered."""
    state = side.state
    if isinstance(side.call, torch.nn.Module):
        return side.call, {name: name for name in (*state.parameters, *state.buffers)}

    class Called(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return side.call(*args, **kwargs)

    module = Called()
    names: dict[str, str] = {}
    for index, (name, holder) in enumerate(state_holders(side.call)):
        if isinstance(holder, torch.nn.Module):
            module.add_module(f"held_{index}", holder)
            for inner in (*dict(holder.named_parameters()), *dict(holder.named_buffers())):
                names[f"held_{index}.{inner}"] = f"{name}.{inner}" if name else inner
    return module, names
