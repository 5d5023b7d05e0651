"""A side: one independent copy of a program, with its inputs and its state by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from torchdelta.program import copies
from torchdelta.program.copies import Convert, copy_together
from torchdelta.program.programs import Program


@dataclass(frozen=True, kw_only=True)
class State:
    """What a callable keeps between calls, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, torch.Tensor]
    """Tensors that a module holds without registering them."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is run: nothing in it is shared with another side."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: Callable[..., Any]
    """Whose state this is; `call` may be a wrapper of it."""
    names: Mapping[str, str] | None = None
    """The owner's names of the state, and those they have here; None where they are the same."""

    @classmethod
    def copied_from(
        cls, program: Program, *, convert: Convert = lambda dtype: dtype, with_callable: bool = True
    ) -> Side:
        """Copy the program; `convert` may change the dtypes of its tensors.

        Without its callable the side has copies of the inputs only, and its call is not to be run.
        """
        if not with_callable:
            args, kwargs = copy_together((program.args, dict(program.kwargs)), name=program.name, convert=convert)
            return cls.of(program.call, args, kwargs)
        call, args, kwargs = copy_together(
            (program.call, program.args, dict(program.kwargs)), name=program.name, convert=convert
        )
        return cls.of(call, args, kwargs)

    @classmethod
    def of(cls, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Side:
        """Take a callable as it is."""
        return cls(call=call, args=args, kwargs=kwargs, owner=call)

    @property
    def state(self) -> State:
        """The state as it is now: a call may have put another tensor in the place of one."""
        state = state_of(self.owner)
        if self.names is None:
            return state
        return State(
            parameters={self.names[name]: tensor for name, tensor in state.parameters.items() if name in self.names},
            buffers={self.names[name]: tensor for name, tensor in state.buffers.items() if name in self.names},
            attributes={},
        )


def started_from(side: Side) -> list[torch.Tensor]:
    """Return every tensor that a run of the side starts from: its state and its inputs."""
    return [*side.state.buffers.values(), *varied_in(side)]


def varied_in(side: Side) -> list[torch.Tensor]:
    """Return what varies from one use of the program to the next: parameters and inputs, and no constants."""
    inputs = [value for value in copies.everything_in((side.args, side.kwargs)) if isinstance(value, torch.Tensor)]
    return [*side.state.parameters.values(), *inputs]


def state_of(call: Callable[..., Any]) -> State:
    """Return the state that a callable reaches; a tensor in a closure is a parameter or a buffer of its own."""
    state = State(parameters={}, buffers={}, attributes={})
    met: set[int] = set()

    def take(kind: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in met:
            met.add(id(tensor))
            kind[name] = tensor

    for name, holder in state_holders(call):
        if isinstance(holder, torch.Tensor):
            take(state.parameters if holder.requires_grad else state.buffers, name, holder)
            continue
        prefix = f"{name}." if name else ""
        for inner, parameter in holder.named_parameters():
            take(state.parameters, f"{prefix}{inner}", parameter)
        for inner, buffer in holder.named_buffers():
            take(state.buffers, f"{prefix}{inner}", buffer)
        for inner, module in holder.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    take(state.attributes, f"{prefix}{inner}.{attribute}" if inner else f"{prefix}{attribute}", value)
    return state


def state_holders(call: Callable[..., Any]) -> Iterator[tuple[str, torch.nn.Module | torch.Tensor]]:
    """Yield the outermost modules and the tensors that a callable reaches, by the names its source has for them."""
    yield from _holders(call, "", set())


def _holders(value: Any, name: str, met: set[int]) -> Iterator[tuple[str, torch.nn.Module | torch.Tensor]]:
    if id(value) in met or isinstance(value, type):
        return
    met.add(id(value))
    if isinstance(value, (torch.nn.Module, torch.Tensor)):
        yield name, value
        return
    is_function = isinstance(value, (FunctionType, MethodType, functools.partial))
    for inner, child in copies.children(value):
        if is_function:  # what a function captures has a name of its own: `model.weight`, not `closure.model.weight`
            path = name if inner in ("__self__", "__func__", "func") else inner
        else:
            path = f"{name}.{inner}" if name else inner
        yield from _holders(child, path, met)
