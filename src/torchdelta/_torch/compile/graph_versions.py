"""Versions of a graph while passes rewrite it: taken only where something changed, built when somebody wants to run it.

The nodes of a graph that is rewritten in place stay the objects that they are, so that the copies of one node can carry
the same handle in every version. What is held by the graph (constants, modules) is shared with it and not copied.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchdelta._torch.graphs import graphs, handles
from torchdelta._torch.graphs.nodes import INDUCTOR_RANDOMS, arguments, op_name
from torchdelta._torch.modes.outside import outside_modes

Handle = Callable[[Node], int]
Describe = Callable[[Any], str]
"""Says of what a graph holds what changes when that does."""

_HOLDING = ("get_attr", "call_module")
_PACKING = ("mkl", "mkldnn", "onednn")
"""Libraries that lay weights out as they like: nobody else can copy those, and none of them knows float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """A graph as a pass left it."""

    name: str
    """The pass; empty for the graph as it came."""
    graph: Graph
    held: dict[str, Any]
    """What the graph holds, by target; graphs inside of it are versions themselves."""

    @functools.cached_property
    def built(self) -> GraphModule:
        """The graph as a module that takes and returns its values one by one."""
        held = {name: each.built if isinstance(each, Version) else each for name, each in self.held.items()}
        return GraphModule(held, self.graph)

    @property
    def inputs(self) -> list[Node]:
        """The placeholders, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def is_packed(self) -> bool:
        """Whether the graph holds or computes what only a library for one processor can read."""
        held = self.held.values()
        if any(isinstance(each, torch.Tensor) and each.is_mkldnn for each in held):
            return True
        calls = (node.target for node in self.graph.nodes if isinstance(node.target, OpOverload))
        inside = any(each.is_packed for each in held if isinstance(each, Version))
        return inside or any(target.namespace in _PACKING for target in calls)

    @property
    def draws(self) -> tuple[str, ...]:
        """What draws random numbers, in its order: who draws others, or in another order, computes something else."""
        inside = (each.draws for each in self.held.values() if isinstance(each, Version))
        own = (f"{node.name} {node.target} {_plain(node.args)}" for node in self.graph.nodes if _draws(node))
        return (*own, *(drawn for drawn_inside in inside for drawn in drawn_inside))


@dataclass(kw_only=True, eq=False)
class Chain:
    """What the passes of one phase made of a graph, one after the other."""

    phase: str
    module: GraphModule | None
    """The graph that is rewritten; nobody's when the phase is over."""
    versions: list[Version] = field(default_factory=list)
    passes: int = 0
    """How many ran, whether or not they changed anything."""
    _handles: dict[Node, int] = field(default_factory=dict)
    _seen: list[Any] = field(default_factory=list)
    _key: str = ""

    def look(self, name: str) -> None:
        """Take the graph as it is now, if it is not as it was."""
        assert self.module is not None
        seen = list(_parts(self.module))
        # a node that is changed has other arguments and not changed ones: who finds the same objects needs no key
        if len(seen) == len(self._seen) and all(one is other for one, other in zip(seen, self._seen, strict=True)):
            return
        self._seen = seen
        key = key_of(self.module)
        if key == self._key:
            return
        self._key = key
        with outside_modes():
            self.versions.append(
                taken(self.module, name, lambda node: self._handles.setdefault(node, len(self._handles)))
            )

    def end(self) -> None:
        """Let go of the graph itself, which goes on to be compiled."""
        self.module = None
        self._handles, self._seen = {}, []


def taken(module: GraphModule, name: str, handle: Handle) -> Version:
    """Return a copy of the nodes of a graph, and of those inside of it, over what it holds."""
    held: dict[str, Any] = {}
    for target in sorted({str(node.target) for node in module.graph.nodes if node.op in _HOLDING}):
        value = graphs.attribute(module, target)
        held[target] = taken(value, name, handle) if isinstance(value, GraphModule) else value
    made = Graph()
    known: dict[Node, Node] = {}
    for node in _sources_first(module.graph):
        known[node] = made.node_copy(node, known.__getitem__)
        if node.op not in ("placeholder", "output"):
            handles.write_handles(known[node], (handle(node),))
    return Version(name=name, graph=made, held=held)


def key_of(module: GraphModule, describe: Describe | None = None) -> str:
    """Return what two graphs have in common exactly when they do the same, whatever their nodes are called.

    Without `describe`, what they hold counts as the objects that they are.
    """
    digest = hashlib.sha256()
    places: dict[Node, int] = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else _target(node)
        digest.update(f"{node.op} {target} {_plain((node.args, node.kwargs), places)}\n".encode())
        if node.op in _HOLDING:
            value = graphs.attribute(module, str(node.target))
            inner = isinstance(value, GraphModule)
            said = key_of(value, describe) if inner else describe(value) if describe else f"{id(value)}"
            digest.update(f"  {said}\n".encode())
    return digest.hexdigest()


def _parts(module: GraphModule) -> Iterator[Any]:
    """Yield every object that is another one when the graph changed."""
    for node in module.graph.nodes:
        yield from (node, node.target, node.args, node.kwargs)
        if node.op in _HOLDING:
            value = graphs.attribute(module, str(node.target))
            yield value
            if isinstance(value, GraphModule):
                yield from _parts(value)


def _sources_first(graph: Graph) -> Iterator[Node]:
    """Yield the nodes in their order, but none before what it reads: between two passes a graph need not be sorted."""
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


def _target(node: Node) -> str:
    # two functions may have the same name, and live as long as the module that has them
    return str(node.target) if isinstance(node.target, (str, OpOverload)) else f"{node.target!r} {id(node.target)}"


class _NodePlace(str):
    """Prints as it is, unlike text among the arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _plain(value: Any, places: dict[Node, int] | None = None) -> str:
    return repr(map_arg(value, lambda node: _NodePlace("%" if places is None else f"%{places[node]}")))


def _draws(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    # given seeds, inductor's own draw and say nothing of it in their tags
    if op_name(node).startswith(INDUCTOR_RANDOMS):
        return True
    # attention is among what may draw, and draws only where it drops something
    drops = arguments(node).get("dropout_p")
    return torch.Tag.nondeterministic_seeded in node.target.tags and (drops is None or drops != 0)
