"""A side: one independent copy of a program, with its inputs and its state by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from torchdelta.execute import reach
from torchdelta.execute.copies import Convert, copy_together
from torchdelta.execute.programs import Program


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is run: nothing in it is shared with another side."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def copied_from(cls, program: Program, *, convert: Convert = lambda dtype: dtype) -> Side:
        """Copy the program; `convert` may change the dtypes of its tensors."""
        call, args, kwargs = copy_together(
            (program.call, program.args, dict(program.kwargs)), name=program.name, convert=convert
        )
        return cls.of(call, args, kwargs)

    @classmethod
    def of(cls, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Side:
        """Take a callable as it is and find its parameters and buffers."""
        parameters, buffers = state_of(call)
        return cls(call=call, args=args, kwargs=kwargs, parameters=parameters, buffers=buffers)


def state_of(call: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the parameters and the buffers that a callable reaches, by name; a tensor in a closure counts as one."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, holder in state_holders(call):
        if isinstance(holder, torch.Tensor):
            named.setdefault(id(holder), (name, holder))
            continue
        prefix = f"{name}." if name else ""
        for inner, tensor in (*holder.named_parameters(), *holder.named_buffers()):
            named.setdefault(id(tensor), (f"{prefix}{inner}", tensor))
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for name, tensor in named.values():
        (parameters if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) else buffers)[name] = tensor
    return parameters, buffers


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
    for inner, child in reach.children(value):
        if is_function:  # what a function captures has a name of its own: `model.weight`, not `closure.model.weight`
            path = name if inner in ("__self__", "__func__", "func") else inner
        else:
            path = f"{name}.{inner}" if name else inner
        yield from _holders(child, path, met)
