"""Seams: the places where a graph is handed over, and where it can be looked at or replaced.

Dynamo hands captured graphs to a backend, AOTAutograd hands forward and backward graphs to a compiler, and a pass gets
the graph that it changes. At a seam all of them look alike: a `HandedGraph` has a graph and a function `make` that
turns a graph into a callable. A `Seam` takes one and returns the callable to run.

    def printing(handed: HandedGraph) -> Callable[..., Any]:
        print(handed.graph.code)
        return handed.on()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch.fx import GraphModule, Interpreter

Make = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class HandedGraph:
    """A graph on its way to the compiler or pass that turns it into a callable."""

    graph: GraphModule
    example_inputs: Sequence[Any]
    make: Make
    """Takes a graph and example inputs; returns a callable that takes its arguments one by one."""
    level: str
    """`dynamo`, `export`, or after AOTAutograd `forward`, `backward` or `inference`."""

    def on(self) -> Callable[..., Any]:
        """Call `make` with the graph itself and its example inputs, and return the callable that it makes."""
        return self.make(self.graph, self.example_inputs)


class BoxedCall:
    """Calls a function that takes its arguments in a list, which it may empty to free them, with separate arguments."""

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self.boxed = run

    def __call__(self, *args: Any) -> Any:
        """Call the function with the arguments in a new list, and return its result."""
        return self.boxed(list(args))


def as_boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return a function that takes the arguments of a callable in a list; of a `BoxedCall` the one inside."""
    return run.boxed if isinstance(run, BoxedCall) else lambda args: run(*args)


Seam = Callable[[HandedGraph], Callable[..., Any]]


def hand_on(handed: HandedGraph) -> Callable[..., Any]:
    """Return the callable that is made of the graph itself: the seam that does nothing."""
    return handed.on()


def chain_seams(first: Seam, second: Seam) -> Seam:
    """Return a seam that hands a graph to the first seam, and the graph that this one hands on to the second.

    If the second is `hand_on`, the first itself is returned.
    """
    if second is hand_on:
        return first

    def both(handed: HandedGraph) -> Callable[..., Any]:
        def make(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return second(replace(handed, graph=graph, example_inputs=example_inputs))

        return first(replace(handed, make=make))

    return both


def graph_behind(call: Callable[..., Any]) -> GraphModule | None:
    """Return the graph that a callable runs, or None if it is not a graph module or a method of one.

    The method `run` of torch's interpreter of graphs runs the interpreter's graph.
    """
    owner = call.__self__ if isinstance(call, MethodType) else call
    if type(owner) is Interpreter:
        owner = owner.module
    return owner if isinstance(owner, GraphModule) else None
