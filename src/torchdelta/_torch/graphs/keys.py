"""Keys: texts that tell whether two graphs are the same, whatever their nodes are named.

`key_of` compares calls, and attributes by identity. `content_key` compares what attributes contain, so that a graph can
be compared with a copy of itself, or with its own state from before a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchdelta._torch import tensors
from torchdelta._torch.graphs import graphs

Describe = Callable[[Any], str]
"""Returns a text for an attribute of a graph, which changes if the attribute does."""

HOLDING = ("get_attr", "call_module")
"""Kinds of nodes that read or call an attribute of the graph module."""


def key_of(module: GraphModule, describe: Describe | None = None) -> str:
    """Return a hash that two graphs share if they run the same calls in the same order, whatever their nodes are named.

    Calls are the same if target, arguments and, for modules and constants, the attribute are. `describe` gives the text
    of an attribute that is not a graph; without it, attributes are the same if they are one object.
    """
    digest = hashlib.sha256()
    places: dict[Node, int] = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else _target(node)
        digest.update(f"{node.op} {target} {plain_arguments((node.args, node.kwargs), places)}\n".encode())
        if node.op in HOLDING:
            value = graphs.attribute(module, str(node.target))
            inner = isinstance(value, GraphModule)
            text = key_of(value, describe) if inner else describe(value) if describe else f"{id(value)}"
            digest.update(f"  {text}\n".encode())
    return digest.hexdigest()


def content_key(module: GraphModule) -> str:
    """Return a hash that two graphs share if they run the same calls with the same content of modules and tensors."""
    return key_of(module, _describe_attribute)


def _describe_attribute(value: Any) -> str:
    """Return a text that two attributes share if their content is the same, so that a changed weight is a change.

    A tensor whose values cannot be read, such as a sparse or fake one, counts by its identity, so that even its copy is
    another. Values other than tensors and modules count by their `repr`.
    """
    if isinstance(value, torch.Tensor):
        if not tensors.has_own_buffer(value):
            return f"{id(value)}"
        flat = tensors.bytes_of(value).cpu()
        content = hashlib.sha256(flat.numpy().data if flat.numel() else b"").hexdigest()
        return repr((tuple(value.shape), value.stride(), value.dtype, value.requires_grad, content))
    if isinstance(value, torch.nn.Module):
        state = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        plain = [
            (type(module), sorted((name, repr(each)) for name, each in vars(module).items() if name not in state))
            for module in value.modules()
        ]
        return f"{value!r} {plain} {[(name, _describe_attribute(tensor)) for name, tensor in state.items()]}"
    return repr(value)


def _target(node: Node) -> str:
    """Return the target of a node as text: the name of an operator, method or attribute, or a function with its id."""
    # by id, because two functions may have the same name; both live as long as their graph
    return str(node.target) if isinstance(node.target, (str, OpOverload)) else f"{node.target!r} {id(node.target)}"


class _NodePlace(str):
    """The place of a node in a printed argument: it prints without quotes, unlike a text argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def plain_arguments(value: Any, places: dict[Node, int] | None = None) -> str:
    """Return nested arguments as text; a node is `%` with its number in `places`, or `%` alone if `places` is None."""
    return repr(map_arg(value, lambda node: _NodePlace("%" if places is None else f"%{places[node]}")))
