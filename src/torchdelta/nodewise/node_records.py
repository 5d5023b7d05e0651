"""The nodes of a graph and of the bodies nested in it, as records that another process can read."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch.graphs import nodes
from torchdelta._torch.graphs.handles import handles_of, is_dequantizing, is_observer, observed_by
from torchdelta.records.location import NodeRecord


@dataclass(frozen=True, kw_only=True)
class PlacedNode:
    """A node and the graph module that it runs in."""

    node: Node
    owner: GraphModule


def placed_nodes(graph_module: GraphModule) -> dict[str, PlacedNode]:
    """Return the nodes by the names that their records have, in the order of the graph.

    Placeholders and outputs compute nothing and are left out, as are guards and the names of nested graphs.
    """
    return dict(_walk(graph_module, ""))


def node_records(graph_module: GraphModule) -> tuple[NodeRecord, ...]:
    """Describe each of `placed_nodes`."""
    return tuple(_record(name, placed) for name, placed in placed_nodes(graph_module).items())


def _walk(owner: GraphModule, path: str) -> Iterator[tuple[str, PlacedNode]]:
    for node in owner.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        held = _held(node, owner)
        if isinstance(held, GraphModule):
            yield from _walk(held, f"{path}{node.target}.")
        if isinstance(held, torch.nn.Module) and node.op == "get_attr":
            continue
        if node.op == "call_module" and node.target == "_guards_fn":
            continue
        yield f"{path}{node.name}", PlacedNode(node=node, owner=owner)


def _held(node: Node, owner: GraphModule) -> Any:
    """Return the attribute that a node reads or the module that it calls."""
    held: Any = None
    if node.op in ("get_attr", "call_module"):
        held = owner
        for step in str(node.target).split("."):
            held = getattr(held, step, None)
    return held


def _record(name: str, placed: PlacedNode) -> NodeRecord:
    node = placed.node
    handles = handles_of(node)
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        # saving, decomposition and tracing again may dissolve one part of a result in the operator that returns it
        handles |= handles_of(node.args[0])
    return NodeRecord(
        name=name,
        op=nodes.op_name(node),
        kinds=kinds_of(_value(node, placed.owner)),
        handles=tuple(sorted(handles)),
        module_path=nodes.module_path(node),
        source_line=nodes.source_line(node),
        inputs=tuple(f"{name.removesuffix(node.name)}{source.name}" for source in node.all_input_nodes),
    )


def kinds_of(value: Any) -> tuple[str, ...]:
    """Say what each tensor of a value is; a sequence of one is told apart from what is in it."""
    if isinstance(value, (list, tuple)) and not _has_shape(value):
        inner = tuple(kind for item in value for kind in kinds_of(item))
        return (f"({inner[0]},)",) if len(inner) == 1 else inner
    if isinstance(value, dict):
        return tuple(kind for item in value.values() for kind in kinds_of(item))
    if _has_shape(value):
        # another export of the same program has other names for its symbols
        sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in value.shape)
        return (f"{str(value.dtype).removeprefix('torch.')}[{sizes}]",)
    return () if value is None else (type(value).__name__,)


def _has_shape(value: Any) -> bool:
    # a tensor, or what shape propagation noted of one
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _value(node: Node, owner: GraphModule) -> Any:
    """Return an example of what a node returns: as it was traced, as it is held, or as what it passes on."""
    for key in ("val", "example_value", "tensor_meta"):
        if node.meta.get(key) is not None:
            return node.meta[key]
    if node.op == "get_attr":
        return _held(node, owner)
    if is_observer(node) or is_dequantizing(node):
        return _value_passed_on(node, owner)
    return None


def _value_passed_on(node: Node, owner: GraphModule) -> Any:
    """Return an example of what is observed, in the dtype that a dequantize node returns."""
    source: Node | None = node
    value: Any = None
    while source is not None and value is None:
        source = observed_by(source)
        value = None if source is None else source.meta.get("val", _held(source, owner))
    if not isinstance(value, torch.Tensor):
        return None
    dtype = node.kwargs.get("out_dtype") or torch.float32
    return SimpleNamespace(shape=value.shape, dtype=dtype if is_dequantizing(node) else value.dtype)
