"""torch.export: the program as one graph, run by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta.execute.sides import Side, state_holders
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.compiler import flag

ExportedProgram = torch.export.ExportedProgram


class Export(Transform):
    """`torch.export.export(program).module()`."""

    def __init__(self, options: Options) -> None:
        require_known("export", options, ("strict",))
        self.strict = bool(flag(options, "strict"))

    @contextmanager
    def applied(self, side: Side, *, draws_random: bool) -> Iterator[Transformed]:  # noqa: ARG002 — runs eagerly
        """Export the side; its parameters keep their names."""
        yield Transformed.whole(exported(side, strict=self.strict)[1], captured=1)


def exported(
    side: Side, *, strict: bool, then: Callable[[ExportedProgram], ExportedProgram] = lambda program: program
) -> tuple[GraphModule, Side]:
    """Export a side, change the exported program by `then`, and return its module and the side that runs it."""
    program = then(torch.export.export(_as_module(side), side.args, side.kwargs, strict=strict))
    module = program.module()
    assert isinstance(module, GraphModule)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # a constant that the trace made for itself is no state of the program
    return module, Side(
        call=module,
        args=side.args,
        kwargs=side.kwargs,
        parameters={name: state.get(name, tensor) for name, tensor in side.parameters.items()},
        buffers={name: state.get(name, tensor) for name, tensor in side.buffers.items()},
    )


def _as_module(side: Side) -> torch.nn.Module:
    """Return the side's callable as a module: export takes nothing else, and takes only registered state for state."""
    if isinstance(side.call, torch.nn.Module):
        return side.call

    class Called(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return side.call(*args, **kwargs)

    module = Called()
    for name, holder in state_holders(side.call):
        if isinstance(holder, torch.nn.Module) and name.isidentifier():
            module.add_module(name, holder)
    return module
