"""A side: one independent copy of a program, with its inputs and its state by name.

Reference, candidate and truth are sides of the same program. They share nothing, so a run of one cannot change
another. `copies.py` does the copying; `stages.py` runs a side. Start reading at `Side.copied_from`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any

import torch

from torchdelta.program import copies
from torchdelta.program.copies import Convert, copy_together
from torchdelta.program.programs import Program
from torchdelta.program.unregistered import UnregisteredState, reached_by


@dataclass(frozen=True, kw_only=True)
class State:
    """The tensors that a callable keeps between calls, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, torch.Tensor]
    """Tensors that a module holds without registering them."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A callable with its inputs, ready to run; it shares nothing with another side."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: Callable[..., Any]
    """The callable that holds the state; `call` may be a wrapper of it."""
    names: Mapping[str, str] | None = None
    """The name of each state tensor in this side by its name in the owner, or None if the names are the same."""
    carried: frozenset[str] = frozenset()
    """With `names`, the paths of the submodules that the owner has as they are in the program, under the same paths."""
    start: Side | None = None
    """Another implementation as it was before any run, or None if this side is a copy of the program."""

    @classmethod
    def copied_from(
        cls, program: Program, *, convert: Convert = lambda dtype: dtype, with_callable: bool = True
    ) -> Side:
        """Return a copy of the program as a side; `convert` may change the dtypes of its tensors.

        Without `with_callable` only the inputs are copied: the side's call is the program's own, and must not be run.
        Raise ProgramError if the program cannot be copied.
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
        """Return a side of a callable, which is also its owner, and of its inputs; nothing is copied."""
        return cls(call=call, args=args, kwargs=kwargs, owner=call)

    @property
    def state(self) -> State:
        """The owner's state as it is now, because a call may have replaced a tensor by another.

        With `names`, parameters and buffers go by their names in this side; those without one, and all attributes, are
        left out.
        """
        state = state_of(self.owner)
        if self.names is None:
            return state
        return State(
            parameters={self.names[name]: tensor for name, tensor in state.parameters.items() if name in self.names},
            buffers={self.names[name]: tensor for name, tensor in state.buffers.items() if name in self.names},
            attributes={},
        )

    @cached_property
    def unrun(self) -> UnregisteredState:
        """The owner's unregistered state at the first access, which later accesses return too.

        It is for a side that is never run, whose state does not change.
        """
        return self.reach()

    def reach(self) -> UnregisteredState:
        """Return the owner's unregistered state as it is now.

        With `names`, which name only registered state, return the leaves of the `carried` submodules alone.
        """
        registered = registered_in(self.state)
        if self.names is None:
            return reached_by(self.owner, registered)
        owned = dict(self.owner.named_modules()) if isinstance(self.owner, torch.nn.Module) else {}
        return UnregisteredState(
            {
                path.replace(_ATTRIBUTE, f"{_ATTRIBUTE}{name}.", 1): leaf
                for name in sorted(self.carried & owned.keys())
                for path, leaf in reached_by(owned[name], registered).leaves.items()
                if path.startswith(_ATTRIBUTE)
            }
        )


_ATTRIBUTE = "attributes['"
"""The path of an attribute begins with this, and goes on with the path of its module."""


def registered_in(state: State) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by path, such as `buffers['mean']`."""
    kinds = {"parameters": state.parameters, "buffers": state.buffers}
    return {f"{kind}[{name!r}]": tensor for kind, held in kinds.items() for name, tensor in held.items()}


def started_from(side: Side) -> list[torch.Tensor]:
    """Return the tensors that a run of the side starts from: buffers, parameters, inputs, and unregistered ones.

    The side must not have run, because its unregistered tensors are looked up once.
    """
    unregistered = [leaf for leaf in side.unrun.leaves.values() if isinstance(leaf, torch.Tensor)]
    return [*side.state.buffers.values(), *varied_in(side), *unregistered]


def varied_in(side: Side) -> list[torch.Tensor]:
    """Return the parameters and the tensors that the inputs reach: they vary from use to use, unlike buffers."""
    inputs = [value for value in copies.everything_in((side.args, side.kwargs)) if isinstance(value, torch.Tensor)]
    return [*side.state.parameters.values(), *inputs]


def state_of(call: Callable[..., Any]) -> State:
    """Return the state that a callable reaches: of its modules, and of tensors in its closure and globals.

    A tensor outside of a module counts as a parameter if it is a leaf that requires grad, and else as a buffer; one
    that is a module's attribute without being registered counts as an attribute. A tensor with several names has the
    first one only. The tensors are the callable's own, not copies.
    """
    state = State(parameters={}, buffers={}, attributes={})
    known: set[int] = set()

    def add(kind: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in known:
            known.add(id(tensor))
            while name in kind:  # two functions may capture values of one name
                name += "′"
            kind[name] = tensor

    for name, holder in state_holders(call):
        if isinstance(holder, torch.Tensor):
            is_trained = holder.requires_grad and holder.is_leaf
            add(state.parameters if is_trained else state.buffers, name, holder)
            continue
        prefix = f"{name}." if name else ""
        for inner, parameter in holder.named_parameters():
            add(state.parameters, f"{prefix}{inner}", parameter)
        for inner, buffer in holder.named_buffers():
            add(state.buffers, f"{prefix}{inner}", buffer)
        for inner, module in holder.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    add(state.attributes, f"{prefix}{inner}.{attribute}" if inner else f"{prefix}{attribute}", value)
    return state


def state_holders(call: Callable[..., Any]) -> Iterator[tuple[str, torch.nn.Module | torch.Tensor]]:
    """Yield (name, holder) for the outermost modules and the tensors that a callable reaches, each once.

    The name is that in the source code, and empty if the callable itself is a module.
    """
    yield from _holders(call, "", set())


def _holders(value: Any, name: str, visited: set[int]) -> Iterator[tuple[str, torch.nn.Module | torch.Tensor]]:
    """Yield (name, holder) for the outermost modules and tensors within a value called `name`, except for `visited`.

    `visited` has ids, and every object that is looked at is added to it. Classes are skipped. A value that a function
    captures has its own name. The object and function of a bound method, and the function of a partial, are called
    `name` too. A value within any other object is called `name.inner` or `name[inner]`, or `inner` if `name` is empty.
    """
    if id(value) in visited or isinstance(value, type):
        return
    visited.add(id(value))
    if isinstance(value, (torch.nn.Module, torch.Tensor)):
        yield name, value
        return
    is_function = isinstance(value, (FunctionType, MethodType, functools.partial))
    for inner, child in copies.children(value):
        if is_function:  # a captured value has a name of its own: `model.weight`, not `closure.model.weight`
            path = name if inner in ("__self__", "__func__", "func") else inner
        else:
            path = f"{name}{inner}" if inner.startswith(("[", ".")) or not name else f"{name}.{inner}"
        yield from _holders(child, path, visited)
