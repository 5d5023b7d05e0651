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
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    met: set[int] = set()
    for name, tensor in _named_tensors(call, "", met):
        (parameters if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) else buffers)[name] = tensor
    return parameters, buffers


def _named_tensors(value: Any, name: str, met: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(value) in met:
        return
    met.add(id(value))
    if isinstance(value, torch.nn.Module):
        prefix = f"{name}." if name else ""
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            if id(tensor) not in met:
                met.add(id(tensor))
                yield f"{prefix}{inner}", tensor
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (FunctionType, MethodType, functools.partial)):
        # what a function captures is known by its own name in the source: `model.weight`, not `closure.model.weight`
        for inner, child in reach.children(value):
            yield from _named_tensors(child, name if inner in ("__self__", "__func__", "func") else inner, met)
    elif not isinstance(value, type):
        for inner, child in reach.children(value):
            yield from _named_tensors(child, f"{name}.{inner}" if name else inner, met)
