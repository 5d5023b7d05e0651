"""Does a callable that a pass returned do anything besides calling the graph as it was?

A pass may return `lambda *args: graph_module(*args)`. The graph is unchanged and is not what runs, so only a run can
tell: `watch_calls` looks whether each call hands its own arguments to the graph and returns what the graph returns, the
very objects, without writing to them and without another setting of torch. Then nothing was transformed.

While a call is watched, the `_wrapped_call` of each graph's own class notes what it is called with: the callable that
the `__call__` of a graph hands on to. Tracers, compilers and `recompile` work on `forward`, and copies get a class of
their own, so none of them meets it. A call by `.forward` is not noted, and counts as something else than calling the
graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from torchdelta._torch import tensors
from torchdelta._torch.process import runtime


def watch_calls(
    call: Callable[..., Any], graphs: Sequence[GraphModule], report: Callable[[bool], None]
) -> Callable[..., Any]:
    """Return a callable that does what `call` does, and reports after each call whether it only called a graph.

    After the first call that does more, `report` is not called any more. It is not called for a call that raises, and
    several threads are not told apart.
    """
    is_watched = [True]

    @functools.wraps(call, updated=())
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not is_watched[0]:
            return call(*args, **kwargs)
        watch = _Watch([*args, *kwargs.values()])
        with ExitStack() as stack:
            for graph in graphs:
                stack.enter_context(watch.noting(graph))
            result = call(*args, **kwargs)
        is_watched[0] = watch.has_passed_through(result)
        report(is_watched[0])
        return result

    return watched


def build(graph: GraphModule) -> None:
    """Generate the code of a graph of dynamo now, and not when it is first used, so that `watch_calls` sees every call.

    Its class gets `forward`, `__call__` and `_wrapped_call` with the code; a method that is bound earlier is another.
    """
    _ = graph.code


class _Watch:
    """Notes the calls of graphs within one call."""

    def __init__(self, arguments: list[Any]) -> None:
        """Take the arguments of the watched call, and the settings and versions at its start."""
        self.arguments = arguments
        self.start = _settings(), _versions(arguments)
        self.calls = 0
        self.is_recompiled = False
        """Whether a graph got another `forward` since `noting` began."""
        self.passes_arguments = False
        """Whether the last call of a graph had the arguments of the watched call, under the same settings."""
        self.returned: list[Any] = []
        self.versions: list[int | None] = []
        """The versions of the tensors in `returned` when the graph returned them."""

    @contextmanager
    def noting(self, graph: GraphModule) -> Iterator[None]:
        """Note what a graph is called with and returns in the block."""
        build(graph)
        kind: Any = type(graph)  # a class of the graph's own
        original, forward = kind._wrapped_call, kind.forward
        kind._wrapped_call = _NotedCall(self, original)
        try:
            yield
        finally:
            kind._wrapped_call = original
            self.is_recompiled |= kind.forward is not forward

    def note_arguments(self, arguments: list[Any]) -> None:
        """Note a call of a graph with these arguments, before it runs."""
        is_start = (_settings(), _versions(arguments)) == self.start
        self.passes_arguments = is_start and _are_same(arguments, self.arguments)
        self.calls += 1

    def note_result(self, result: Any) -> None:
        """Note what a graph returned."""
        self.returned = tree_leaves(result)
        self.versions = _versions(self.returned)

    def has_passed_through(self, result: Any) -> bool:
        """Tell whether a graph was called once, with the watched call's arguments, and its result was returned.

        It is False if a graph was compiled anew, because later calls may run other code.
        """
        if self.is_recompiled:
            return False
        own = tree_leaves(result)
        is_same = self.calls == 1 and self.passes_arguments and _are_same(own, self.returned)
        return is_same and _versions(own) == self.versions


class _NotedCall:
    """Calls a graph, and tells a watch about it; takes the graph and its arguments."""

    def __init__(self, watch: _Watch, original: Callable[..., Any]) -> None:
        """Take the watch to tell, and the callable that calls the graph."""
        self.watch = watch
        self.original = original

    @skip  # this frame itself must not be compiled; dynamo goes on to the graph's own
    def __call__(self, module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Return what the graph returns; nothing is noted if dynamo compiles the graph, which then does not run."""
        if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
            return self.original(module, *args, **kwargs)
        self.watch.note_arguments([*args, *kwargs.values()])
        result = self.original(module, *args, **kwargs)
        self.watch.note_result(result)
        return result


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Tell whether both have the very same objects in the same order."""
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _versions(values: Iterable[Any]) -> list[int | None]:
    """Return how often each tensor was written to, and None for any other value."""
    return [tensors.version(value) if isinstance(value, torch.Tensor) else None for value in values]


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that change what a graph computes."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), runtime.autocast(), runtime.plain_flags()
