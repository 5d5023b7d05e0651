"""Versions of a graph while passes rewrite it: copied only after a change, and built into a module only to be run.

A pass that rewrites a graph in place keeps the node objects. So the copies of one node carry the same handle in every
version, and two versions can be compared node by node. Constants and modules of the graph are shared, not copied.

A `Chain` follows one graph: call `chain.look(pass_name)` after each pass, and read `chain.versions` at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from torchdelta._torch.graphs import graphs, handles
from torchdelta._torch.graphs.keys import HOLDING, key_of, plain_arguments
from torchdelta._torch.graphs.nodes import INDUCTOR_RANDOMS, arguments, op_name
from torchdelta._torch.modes.outside import outside_modes

Handle = Callable[[Node], int]
_PACKING = ("mkl", "mkldnn", "onednn")
"""Libraries with a weight layout of their own: such weights cannot be copied, and have no float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """A graph as a pass left it."""

    name: str
    """The name of the pass; empty for the graph before the first pass."""
    graph: Graph
    attributes: dict[str, Any]
    """The attributes that the graph reads or calls, by target; an inner graph is a version itself."""

    @functools.cached_property
    def as_module(self) -> GraphModule:
        """The graph as a module that can be run."""
        attributes = {
            name: each.as_module if isinstance(each, Version) else each for name, each in self.attributes.items()
        }
        return GraphModule(attributes, self.graph)

    @property
    def inputs(self) -> list[Node]:
        """The placeholders, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def is_packed(self) -> bool:
        """Whether the graph or one inside of it holds MKLDNN tensors, or calls an operator of a `_PACKING` library."""
        attributes = self.attributes.values()
        if any(isinstance(each, torch.Tensor) and each.is_mkldnn for each in attributes):
            return True
        calls = (node.target for node in self.graph.nodes if isinstance(node.target, OpOverload))
        inside = any(each.is_packed for each in attributes if isinstance(each, Version))
        return inside or any(target.namespace in _PACKING for target in calls)

    @property
    def draws(self) -> tuple[str, ...]:
        """The calls of operators that draw random numbers, in order, then those of inner graphs, each as a text.

        Versions with other draws cannot be compared.
        """
        inside = (each.draws for each in self.attributes.values() if isinstance(each, Version))
        own = (f"{node.name} {node.target} {plain_arguments(node.args)}" for node in self.graph.nodes if _draws(node))
        return (*own, *(drawn for drawn_inside in inside for drawn in drawn_inside))


@dataclass(kw_only=True, eq=False)
class Chain:
    """The versions of one graph that the passes of a phase made, in order."""

    phase: str
    module: GraphModule | None
    """The graph that is rewritten; None when the phase is over."""
    versions: list[Version] = field(default_factory=list)
    passes: int = 0
    """The number of passes that ran, whether or not they changed the graph."""
    _handles: dict[Node, int] = field(default_factory=dict)
    _parts: list[Any] = field(default_factory=list)
    _key: str = ""

    def look(self, name: str) -> None:
        """Add a version of this name if the graph has changed since the last one, or if there is none yet.

        Otherwise nothing is added; `key_of` tells what a change is. A node keeps its handle, a number, from version to
        version.
        """
        assert self.module is not None
        parts = list(_parts(self.module))
        # a changed node has new argument objects, so the same objects mean the same graph, and no key is needed
        if len(parts) == len(self._parts) and all(one is other for one, other in zip(parts, self._parts, strict=True)):
            return
        self._parts = parts
        key = key_of(self.module)
        if key == self._key:
            return
        self._key = key
        with outside_modes():
            self.versions.append(
                take_version(self.module, name, lambda node: self._handles.setdefault(node, len(self._handles)))
            )

    def end(self) -> None:
        """Drop the references to the graph, which is compiled next, and to its nodes; the versions stay."""
        self.module = None
        self._handles, self._parts = {}, []


def take_version(module: GraphModule, name: str, handle: Handle) -> Version:
    """Return a copy of a graph's nodes as a version of this name; `handle` numbers each original node.

    The copies carry that number as their handle, except inputs and the output. Nodes are sorted so that each comes
    after its sources: ValueError if there is a cycle. Inner graphs become versions too; all other attributes are
    shared.
    """
    attributes: dict[str, Any] = {}
    for target in sorted({str(node.target) for node in module.graph.nodes if node.op in HOLDING}):
        value = graphs.attribute(module, target)
        attributes[target] = take_version(value, name, handle) if isinstance(value, GraphModule) else value
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in _sources_first(module.graph):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op not in ("placeholder", "output"):
            handles.write_handles(copies[node], (handle(node),))
    return Version(name=name, graph=graph, attributes=attributes)


def _parts(module: GraphModule) -> Iterator[Any]:
    """Yield the nodes, targets, arguments and attributes of a graph and of its inner graphs."""
    for node in module.graph.nodes:
        yield from (node, node.target, node.args, node.kwargs)
        if node.op in HOLDING:
            value = graphs.attribute(module, str(node.target))
            yield value
            if isinstance(value, GraphModule):
                yield from _parts(value)


def _sources_first(graph: Graph) -> Iterator[Node]:
    """Yield the nodes in order, but each after its sources, because a graph between two passes may be unsorted.

    Raise ValueError if the graph has a cycle.
    """
    done: set[Node] = set()
    for node in graph.nodes:
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [source for source in last.all_input_nodes if source not in done]
            if any(source in waiting for source in missing):
                raise ValueError(f"the graph has a cycle through {last.name}")
            if missing:
                waiting += missing[:1]
                continue
            waiting.pop()
            if last not in done:
                done.add(last)
                yield last


def _draws(node: Node) -> bool:
    """Tell whether a node calls an operator that draws random numbers; other functions never count.

    An operator whose argument `dropout_p` is 0 does not draw, unless it is one of inductor's own.
    """
    if not isinstance(node.target, OpOverload):
        return False
    # inductor's own operators draw from seeds, and their tags do not say so
    if op_name(node).startswith(INDUCTOR_RANDOMS):
        return True
    # attention has the tag too, and draws only if it has dropout
    drops = arguments(node).get("dropout_p")
    return torch.Tag.nondeterministic_seeded in node.target.tags and (drops is None or drops != 0)
