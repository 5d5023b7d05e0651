"""The nodes of a graph, and of the graphs nested in it, as records that another process can read.

A node of a nested graph is named behind the attribute that holds its graph: the `add` in the body of a `cond` is
`true_graph_0.add`. Start reading at `node_records`.
"""

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
    """Return the nodes of a graph and of the graphs nested in it, each with its graph module, by name and in order.

    The name of a nested node begins with the attribute of its graph, as in `true_graph_0.add`. Placeholders and outputs
    are left out because they compute nothing, and so are calls of export's guards and attribute nodes that hold a
    module or a nested graph.
    """
    return dict(_walk(graph_module, ""))


def node_records(graph_module: GraphModule) -> tuple[NodeRecord, ...]:
    """Return the record of each node of `placed_nodes`, in their order."""
    return tuple(_describe(name, placed) for name, placed in placed_nodes(graph_module).items())


def _walk(owner: GraphModule, path: str) -> Iterator[tuple[str, PlacedNode]]:
    """Yield (name, node with its graph) for the nodes of a graph and of those nested in it; names begin with `path`.

    The nodes of a nested graph come where a node reads or calls that graph. `placed_nodes` says which nodes are left
    out.
    """
    for node in owner.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        target = _find_attribute(node, owner)
        if isinstance(target, GraphModule):
            yield from _walk(target, f"{path}{node.target}.")
        if isinstance(target, torch.nn.Module) and node.op == "get_attr":
            continue
        if node.op == "call_module" and node.target == "_guards_fn":
            continue
        yield f"{path}{node.name}", PlacedNode(node=node, owner=owner)


def _find_attribute(node: Node, owner: GraphModule) -> Any:
    """Return the attribute that a node reads or the module that it calls; None if it does neither or there is none."""
    attribute: Any = None
    if node.op in ("get_attr", "call_module"):
        attribute = owner
        for step in str(node.target).split("."):
            attribute = getattr(attribute, step, None)
    return attribute


def _describe(name: str, placed: PlacedNode) -> NodeRecord:
    """Return the record of a node under a name; its inputs get the same prefix of nested graphs as the name has.

    A `getitem` has the handles of its source too.
    """
    node = placed.node
    handles = handles_of(node)
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        # saving, decomposition and tracing again may replace this node by the operator whose result it picks from
        handles |= handles_of(node.args[0])
    return NodeRecord(
        name=name,
        op=nodes.op_name(node),
        kinds=kinds_of(_find_example(node, placed.owner)),
        handles=tuple(sorted(handles)),
        module_path=nodes.module_path(node),
        source_line=nodes.source_line(node),
        inputs=tuple(f"{name.removesuffix(node.name)}{source.name}" for source in node.all_input_nodes),
    )


def kinds_of(value: Any) -> tuple[str, ...]:
    """Return the kind of each tensor in a value, as in `float32[2, 3]`, or `(float32[2, 3],)` for a sequence of one.

    A size that is not a fixed number is `?`. Sequences and the values of dicts are taken apart. Any other value has the
    name of its type as kind, and None has no kind.
    """
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
    """Tell whether a value has the attributes `shape` and `dtype`."""
    # a tensor, or the metadata that shape propagation keeps of one
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _find_example(node: Node, owner: GraphModule) -> Any:
    """Return an example of a node's value, or an object that has its `shape` and `dtype`; None if neither is known.

    It is what tracing recorded, or else the attribute that a `get_attr` node reads. For an observer or dequantize node
    without these it is what `_find_observed_example` returns.
    """
    for key in ("val", "example_value", "tensor_meta"):
        if node.meta.get(key) is not None:
            return node.meta[key]
    if node.op == "get_attr":
        return _find_attribute(node, owner)
    if is_observer(node) or is_dequantizing(node):
        return _find_observed_example(node, owner)
    return None


def _find_observed_example(node: Node, owner: GraphModule) -> Any:
    """Return an object with `shape` and `dtype` of the value that an observer or dequantize node observes, or None.

    None means that the value is not known. The dtype of a dequantize node is its `out_dtype`, or float32 without one.
    """
    source: Node | None = node
    value: Any = None
    while source is not None and value is None:
        source = observed_by(source)
        value = None if source is None else source.meta.get("val", _find_attribute(source, owner))
    if not isinstance(value, torch.Tensor):
        return None
    dtype = node.kwargs.get("out_dtype") or torch.float32
    return SimpleNamespace(shape=value.shape, dtype=dtype if is_dequantizing(node) else value.dtype)
