"""Values that a graph is given, in a file: as a graph that returns them.

So strides, gradients asked for and shared memory are kept, by whatever keeps those of a graph's own tensors.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from torchdelta.execute.graph_files import read_graph, write_graph
from torchdelta.execute.graph_nodes import refer_to_callable
from torchdelta.execute.graph_tensors import refuse_special
from torchdelta.execute.graph_values import encode_value


def write_values(values: Any, path: str | os.PathLike[str]) -> None:
    """Write tensors and plain values in tuples, lists and dicts; UsageError says which cannot be written."""
    write_graph(_holding(values), path)


def read_values(path: str | os.PathLike[str], *, allow: Iterable[str] = ()) -> Any:
    """Read what `write_values` wrote; ReportUnreadable says what is wrong with the file."""
    return read_graph(path, allow=allow)()


def require_writable(value: Any) -> None:
    """Raise Unwritable where a value cannot be written, before anything is."""

    def refer(inner: Any) -> dict[str, Any] | None:
        if not isinstance(inner, torch.Tensor):
            return refer_to_callable(inner)
        refuse_special(inner)
        return {}

    encode_value(value, refer)


def _holding(values: Any) -> GraphModule:
    graph, root = Graph(), torch.nn.Module()
    numbers = itertools.count()

    def held(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"input_{next(numbers)}"
            setattr(root, name, value)
            return graph.get_attr(name)
        if type(value) is tuple:
            return tuple(map(held, value))
        if isinstance(value, list):
            return list(map(held, value))
        if isinstance(value, dict):
            return {key: held(item) for key, item in value.items()}
        return value

    graph.output(held(values))
    return GraphModule(root, graph)
