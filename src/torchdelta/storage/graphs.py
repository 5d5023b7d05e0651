"""A graph in a file: one strict JSON file, and one safetensors file beside it; nothing is pickled.

The JSON has a table of modules, each after the modules that it contains, so the outermost graph is the last. Modules
refer to tensors by their rows in the table of `storage.tensors`. A graph that adds 1 to its input:

    {"format": "torchdelta graph", "graph_version": 1, "torch": "2.9.0",
     "modules": [{"name": "GraphModule", "training": true, "modules": {}, "parameters": {}, "buffers": {}, …,
                  "nodes": [{"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}},
                            {"op": "call_function", "name": "add", "target": "function _operator:add",
                             "args": [{"node": "x"}, 1], "kwargs": {}},
                            {"op": "output", "name": "output", "target": "output", "args": [{"node": "add"}], …}],
                  "convention": "values", "meta": {}}],
     "tensors": [], "storages": []}

Values without a graph, such as a program's inputs, are written as a graph that returns them. So strides, shared memory
and `requires_grad` are kept in the same way as those of a graph's own tensors.

Reading a graph runs no code from the file. It imports the modules that callables are named to be in, if they are
allowed (torch, operator, math, some builtins, and the packages that the caller allows), and looks attributes up in
them. Torch then generates the code of the graph from names that were checked to be names. Calling the graph runs the
functions that it names: of a graph that someone else wrote, `computations.find_other_calls` finds those that may do
more than compute.

Start reading at `write_graph` and `read_graph`; `graph_modules` and `graph_nodes` have the tables.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from torchdelta._torch.graphs import graphs, targets
from torchdelta._torch.modes import outside
from torchdelta.errors import ReportUnreadable, TorchDeltaError, UsageError
from torchdelta.records.codec import decode, encode
from torchdelta.records.strict_json import FileFormat
from torchdelta.storage.graph_modules import ModuleWriter, read_modules
from torchdelta.storage.graph_nodes import refer_to_callable
from torchdelta.storage.tensors import StorageRow, TensorRow, TensorTable, TensorWriter, read_tensors, refuse_special
from torchdelta.storage.values import encode_value

_FORMAT = FileFormat(kind="graph", version=1, remedy="write the graph again")


def write_graph(graph_module: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a graph with its tensors: JSON to the path, and the tensors to `<path>.safetensors` beside it.

    Entries of a node's `meta` that cannot be written are left out. Raise UsageError, before any file is touched, if
    `graph_module` is not a graph or anything else in it cannot be written. Raise UsageError too if a file cannot be
    written.
    """
    if not isinstance(graph_module, GraphModule):
        raise UsageError(f"{type(graph_module).__name__} is not a graph: trace it, or take the `module()` of an export")
    with outside.outside_modes():
        tensors = TensorWriter()
        modules = ModuleWriter(tensors)
        modules.add(graph_module)
        # the JSON comes last, because it has the checksums of the tensors
        table = tensors.write(tensors_path(path))
    _FORMAT.write(Path(path), {"torch": torch.__version__, "modules": modules.records, **encode(table)})


def read_graph(path: str | os.PathLike[str], *, allow: Iterable[str] = ()) -> GraphModule:
    """Return the graph in a file; `allow` names further packages whose functions and classes it may use.

    Operators, `operator`, `math`, some builtins and most of torch are always allowed. Raise ReportUnreadable if a file
    is missing or damaged, or the graph uses something that is not allowed, EnvironmentUnfit if this machine lacks the
    device of a tensor, and UsageError if `allow` is a single text.
    """
    if isinstance(allow, str):
        raise UsageError(f"allow is a sequence of packages: pass ({allow!r},)")
    document = _FORMAT.read(Path(path))
    try:
        table = TensorTable(
            tensors=decode(tuple[TensorRow, ...], document.get("tensors"), "tensors"),
            storages=decode(tuple[StorageRow, ...], document.get("storages"), "storages"),
        )
        with outside.outside_modes():
            tensors = read_tensors(tensors_path(path), table)
            return read_modules(document.get("modules"), tensors, _make_finder(tuple(allow)))
    except RecursionError as error:
        raise ReportUnreadable(f"{os.fspath(path)}: it is nested too deeply") from error
    except TorchDeltaError as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error


def modules_named(graph_module: GraphModule) -> list[str]:
    """Return the sorted names of the Python modules that a graph's functions and module classes are in.

    Nested graphs count too; operators are in no module, and a function that has no name to be found by is left out.
    `read_graph` has to be told to allow modules that are neither torch's nor `operator`, `math` or `builtins`.
    """
    inner = list(graph_module.modules())
    nodes = (node for module in inner if isinstance(module, GraphModule) for node in module.graph.nodes)
    functions = (node.target for node in nodes if node.op == "call_function")
    classes = (type(module) for module in inner if not isinstance(module, GraphModule))
    return sorted({place for each in (*functions, *classes) if (place := _find_module(each)) is not None})


def _find_module(target: Any) -> str | None:
    """Return the module that a function or class is named to be in; None if it is an operator or has no name."""
    try:
        kind, _, rest = targets.name_target(target).partition(" ")
    except ValueError:  # a callable without a name cannot be written either, and `write_graph` says so
        return None
    return rest.partition(":")[0] if kind == "function" else None


def tensors_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the tensor file that belongs to the graph at this path."""
    return Path(f"{os.fspath(path)}.safetensors")


def _make_finder(allow: tuple[str, ...]) -> Callable[[str, str], Any]:
    """Return a function that finds a callable by its name, and remembers it; `allow` names packages beyond torch.

    It takes the name and its place, and raises ReportUnreadable if there is no such callable or it is not allowed.
    """
    callables: dict[str, Any] = {}

    def find(name: str, where: str) -> Any:
        """Return the callable of a name; raise ReportUnreadable if there is none or it is not allowed."""
        if name not in callables:
            try:
                callables[name] = targets.find_target(name, allow)
            except LookupError as error:
                raise ReportUnreadable(f"{where}: {error.args[0]}") from error
        return callables[name]

    return find


def write_values(values: Any, path: str | os.PathLike[str]) -> None:
    """Write tensors and plain values, also in tuples, lists and dicts, to the two files that `write_graph` writes.

    Raise UsageError if one cannot be written.
    """
    write_graph(_graph_returning(values), path)


def read_values(
    path: str | os.PathLike[str],
    *,
    allow: Iterable[str] = (),
    require: Callable[[GraphModule], None] = lambda _: None,
) -> Any:
    """Return the values that `write_values` wrote; takes `allow`, and raises, as `read_graph` does.

    ReportUnreadable if a value would have to be computed. `require` gets the graph of the values before it runs, and
    raises if a value is refused.
    """
    graph = read_graph(path, allow=allow)
    for node in graph.graph.nodes:
        if node.op not in ("get_attr", "output"):
            raise ReportUnreadable(f"{os.fspath(path)}: {node.name} is computed, and values are only read")
    require(graph)
    # values are not in structures of their own, which torch would call classes to build
    return graphs.flatten_signature(graph)()


def require_writable(value: Any) -> None:
    """Raise Unwritable if `write_values` could not write this value; otherwise do nothing. No file is written."""

    def refer(inner: Any) -> dict[str, Any] | None:
        if not isinstance(inner, torch.Tensor):
            return refer_to_callable(inner)
        refuse_special(inner)
        return {}

    encode_value(value, refer)


def _graph_returning(values: Any) -> GraphModule:
    """Return a graph without inputs that returns the values; their tensors themselves become its attributes.

    Tensors are found in plain tuples, lists and dicts, nested too. Other values become arguments of the output node.
    """
    graph, root = Graph(), torch.nn.Module()
    numbers = itertools.count()

    def as_argument(value: Any) -> Any:
        """Return a value as an argument of a node, with a node that reads an attribute in the place of each tensor."""
        if isinstance(value, torch.Tensor):
            name = f"input_{next(numbers)}"
            setattr(root, name, value)
            return graph.get_attr(name)
        if type(value) is tuple:
            return tuple(map(as_argument, value))
        if isinstance(value, list):
            return list(map(as_argument, value))
        if isinstance(value, dict):
            return {key: as_argument(item) for key, item in value.items()}
        return value

    graph.output(as_argument(values))
    return GraphModule(root, graph)
