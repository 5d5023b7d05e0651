"""Does a callable that a pass returned do anything besides calling the graph as it was?

A pass may return `lambda *args: graph_module(*args)`. The graph is unchanged and is not what runs, so only a run can
tell: `watch_first_call` looks whether the first call hands its own arguments to the graph and returns what the graph
returns, the very objects, without writing to them and without another setting of torch. Then nothing was transformed.

The watch is a profile function of Python, because a hook on the graph would be traced by a compiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves

from torchdelta._torch import tensors
from torchdelta._torch.process import runtime


def watch_first_call(
    call: Callable[..., Any], graphs: Sequence[GraphModule], report: Callable[[bool], None]
) -> Callable[..., Any]:
    """Return a callable that does what `call` does, and reports once whether it only calls one of the graphs.

    `report` is called at the end of the first call, unless that raises. Several threads are not told apart.
    """
    waiting = [_Watch(_codes_of(graphs))]

    @functools.wraps(call, updated=())
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not waiting:
            return call(*args, **kwargs)
        watch = waiting.pop()
        watch.begin([*args, *kwargs.values()])
        with watch.active():
            result = call(*args, **kwargs)
        report(watch.has_passed_through(result))
        return result

    return watched


@dataclass
class _Watch:
    """Watches one call for calls of the graphs."""

    codes: frozenset[CodeType]
    """The code of each graph."""
    arguments: list[Any] = field(default_factory=list)
    start: tuple[Any, ...] = ()
    calls: int = 0
    passes_arguments: bool = False
    """Whether the last call of a graph had the arguments of the watched call, under the same settings."""
    returned: list[Any] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    """The versions of the tensors in `returned` when the graph returned them."""

    def begin(self, arguments: list[Any]) -> None:
        """Take the arguments of the watched call, and the settings and versions at its start."""
        self.arguments = arguments
        self.start = _settings(), _versions(arguments)

    @contextmanager
    def active(self) -> Any:
        """Watch the calls in the block; a profile function of the user's is put back after it."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def has_passed_through(self, result: Any) -> bool:
        """Tell whether the graph was called once, with the watched call's arguments, and its result was returned."""
        own = tree_leaves(result)
        return (
            self.calls == 1
            and self.passes_arguments
            and _are_same(own, self.returned)
            and (_versions(own) == self.versions)
        )

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call of a graph, or what it returned; all other events of Python are left alone."""
        if frame.f_code not in self.codes or event not in ("call", "return"):
            return
        names = frame.f_code.co_varnames
        own = frame.f_locals.get("self")
        if event == "call":
            flat = [frame.f_locals[name] for name in names[1 : frame.f_code.co_argcount] if name in frame.f_locals]
            if isinstance(own, Interpreter):
                flat = list(frame.f_locals.get("args", ()))
            self.calls += 1
            is_plain = not isinstance(own, Interpreter) or type(own) is Interpreter
            is_same = _are_same(flat, self.arguments) and (_settings(), _versions(flat)) == self.start
            self.passes_arguments = is_plain and is_same
        else:
            self.returned = tree_leaves(argument)
            self.versions = _versions(self.returned)


def _codes_of(graphs: Sequence[GraphModule]) -> frozenset[CodeType]:
    """Return the code that runs when one of the graphs is called, by itself or by torch's interpreter of graphs."""
    for graph in graphs:
        _ = graph.code  # dynamo's graphs are compiled to Python when they are first used
    return frozenset((Interpreter.run.__code__, *(type(graph).forward.__code__ for graph in graphs)))


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Tell whether both have the very same objects in the same order."""
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _versions(values: Iterable[Any]) -> list[int | None]:
    """Return how often each tensor was written to, and None for any other value."""
    return [tensors.version(value) if isinstance(value, torch.Tensor) else None for value in values]


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that change what a graph computes."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), runtime.autocast(), runtime.plain_flags()
