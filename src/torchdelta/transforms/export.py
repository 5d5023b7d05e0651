"""`torch.export`: the program as one graph, run by itself.

Other transforms start from an exported program too, through `export_side`.
"""

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
from torchdelta.transforms.base import Options, Transform, TransformedSide, flag, require_known

ExportedProgram = torch.export.ExportedProgram


class Export(Transform):
    """`torch.export.export(program).module()`."""

    def __init__(self, options: Options) -> None:
        require_known("export", options, ("strict",))
        self.strict = bool(flag(options, "strict"))

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with its call exported; all calls count as transformed. The keywords are not used."""
        yield TransformedSide.counting_calls(export_side(side, strict=self.strict)[1], captured=1)


def export_side(
    side: Side, *, strict: bool, then: Callable[[ExportedProgram], ExportedProgram] = lambda program: program
) -> tuple[GraphModule, Side]:
    """Export a side's callable; return the exported module, and the side with it as call and as owner of the state.

    The new side has the same inputs, and the program's names for the module's state. `then` takes the exported program
    and returns the one to use.
    """
    owner, names = _as_module(side)
    program = then(torch.export.export(owner, side.args, side.kwargs, strict=strict))
    module = program.module()
    assert isinstance(module, GraphModule)
    return module, replace(side, call=module, owner=module, names=names)


class Exports:
    """Exports one program many times, and traces it once in each precision, because copying a graph is cheaper."""

    def __init__(self) -> None:
        self._exports: dict[bool, tuple[GraphModule, Side]] = {}

    def of(self, side: Side, *, lifted: bool) -> tuple[GraphModule, Side]:
        """Return an exported module that the caller may change, and the side that runs it, as `export_side` does.

        Only the first side of each precision (`lifted` or not) is exported. Of later sides only the inputs are used,
        with a copy of that export.
        """
        if lifted not in self._exports:
            module, exported = export_side(side, strict=False)
            self._exports[lifted] = copy.deepcopy(module), exported
            return module, exported
        original, exported = self._exports[lifted]
        module = copy.deepcopy(original)
        return module, replace(side, call=module, owner=module, names=exported.names)


def _as_module(side: Side) -> tuple[torch.nn.Module, dict[str, str]]:
    """Return the side's callable as a module, and a dict: the program's name of each tensor by that in the module.

    A module is returned itself. A function is wrapped in a new module, in which the modules that it refers to are
    registered, because export sees only such state. Tensors that it holds outside of modules have no name then.
    """
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
