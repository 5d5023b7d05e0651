"""Where a graph is handed over: whoever stands at the seam sees it, and may hand on another in its place.

A compiler hands captured graphs to its backend, AOTAutograd its forward and backward graphs to a compiler, and a pass
gets the graph that it changes. At a seam all of them look the same: a graph, and a way to make something callable of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch.fx import GraphModule

Make = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class HandedGraph:
    """A graph on its way to whoever makes something else of it."""

    graph: GraphModule
    example_inputs: Sequence[Any]
    make: Make
    """Takes a graph and inputs like those that it will get; what comes back takes its arguments one by one."""
    level: str
    """`dynamo`, `export`, or after AOTAutograd `forward`, `backward` or `inference`."""

    def on(self) -> Callable[..., Any]:
        """Hand the graph on as it is."""
        return self.make(self.graph, self.example_inputs)


class Boxed:
    """What takes its arguments in a list, and may empty that to free them; called here with one after the other."""

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self.boxed = run

    def __call__(self, *args: Any) -> Any:
        return self.boxed(list(args))


def as_boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return what takes the arguments of a callable in a list, which whoever can free them early gets itself."""
    return run.boxed if isinstance(run, Boxed) else lambda args: run(*args)


Seam = Callable[[HandedGraph], Callable[..., Any]]


def hand_on(handed: HandedGraph) -> Callable[..., Any]:
    """Be nobody at the seam."""
    return handed.on()


def one_behind_the_other(first: Seam, second: Seam) -> Seam:
    """Let two stand at one seam: what the first hands on passes the second."""
    if second is hand_on:
        return first

    def both(handed: HandedGraph) -> Callable[..., Any]:
        def make(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return second(replace(handed, graph=graph, example_inputs=example_inputs))

        return first(replace(handed, make=make))

    return both


def graph_behind(made: Callable[..., Any]) -> GraphModule | None:
    """Return the graph that a callable runs; None of a black box."""
    owner = made.__self__ if isinstance(made, MethodType) else made
    return owner if isinstance(owner, GraphModule) else None
