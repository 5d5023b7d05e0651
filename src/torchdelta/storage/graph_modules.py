"""A graph module and everything in it as a table of modules, and back.

Each module is one row, after the rows of the modules that it contains. A nested graph is a row like the outer one. A
module that a graph calls as a whole is kept as its class and its attributes:

    {"class": {"target": "function torch.nn.modules.activation:ReLU"}, "training": true, "modules": {},
     "parameters": {}, "buffers": {}, "not_persistent": [], "attributes": {"inplace": false}}

Reading runs no constructor: an instance is created empty, and its attributes are put in place. Every graph is read as a
plain `GraphModule`, whatever subclass it was.

`torch.export` adds generated code that checks the inputs of `ep.module()`: `_guards_fn`, and hooks that run before the
call. It is not written, so a graph that was read takes any input that its operators take.

Start reading at `ModuleWriter.add` and `read_modules`; `graph_nodes` has the nodes of one graph.
"""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from torchdelta._torch.graphs import descriptions
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.storage.graph_nodes import Find, make_fetch, read_nodes, refer_to_callable, write_nodes
from torchdelta.storage.tensors import TensorWriter
from torchdelta.storage.values import Unwritable, decode_value, encode_value, expect, is_plain

_GUARDS = "_guards_fn"
_MACHINERY = frozenset(vars(torch.nn.Module()))
"""The attributes that torch itself keeps in every module."""
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))


class ModuleWriter:
    """Collects the rows of modules, each module once."""

    def __init__(self, tensors: TensorWriter) -> None:
        """Start with an empty table; tensors of the modules will be added to `tensors`."""
        self.records: list[dict[str, Any]] = []
        self._tensors = tensors
        self._rows: dict[int, int] = {}
        self._attributes_of_graphs: set[tuple[int, str]] = set()
        """The attributes that nodes read, as (id of the module, name)."""

    def add(self, module: torch.nn.Module, path: str = "") -> int:
        """Return the number of a module's row; a new module gets one, after the rows of the modules inside of it.

        `path` is the module's place in the outermost graph, for messages. Raise UsageError if something in it cannot be
        written.
        """
        if id(module) not in self._rows:
            record = self._describe(module, path)
            self._rows[id(module)] = len(self.records)
            self.records.append(record)
        return self._rows[id(module)]

    def _describe(self, module: torch.nn.Module, path: str) -> dict[str, Any]:
        """Return the row of a module; first add the modules inside of it to the table, and its tensors to the file.

        The row refers to both by number. The guards that export adds to a graph are left out. Raise UsageError if the
        module has hooks, or if something in it cannot be written; `path` is its place for the message.
        """
        where = path or "the graph"
        _refuse_hooks(module, where)
        state = vars(module)
        is_graph = isinstance(module, GraphModule)
        if isinstance(module, GraphModule):
            self._attributes_of_graphs.update((id(owner), name) for owner, name in _find_attributes(module))
        modules = {
            name: None if child is None else self.add(child, f"{path}.{name}" if path else name)
            for name, child in state["_modules"].items()
            if not (is_graph and name == _GUARDS and _is_of_export(type(child)))
        }
        try:
            record = {
                "training": bool(module.training),
                "modules": modules,
                "parameters": {name: self._add_tensor(value) for name, value in state["_parameters"].items()},
                "buffers": {name: self._add_tensor(value) for name, value in state["_buffers"].items()},
                "not_persistent": sorted(state["_non_persistent_buffers_set"]),
                "attributes": self._describe_attributes(module),
            }
            if not isinstance(module, GraphModule):
                return {"class": refer_to_callable(type(module)), **record}
            return {"name": type(module).__name__, **record, **self._describe_graph(module, path)}
        except Unwritable as error:
            kind = "" if is_graph else f" ({type(module).__qualname__})"
            raise UsageError(
                f"{where}{kind} cannot be written to a file: {error}. Trace or export it so that its work is nodes, "
                "or give it only tensors, numbers, text and functions of modules as attributes"
            ) from error

    def _describe_graph(self, module: GraphModule, path: str) -> dict[str, Any]:
        """Return the entries that only the row of a graph has: its encoded nodes, calling convention and plain `meta`.

        Nodes that call export's guards, and `meta` that is not plain data, are left out. Raise Unwritable or UsageError
        if the calling convention or a node cannot be written.
        """
        try:
            convention = descriptions.describe_convention(
                module.graph, lambda context: encode_value(context, refer_to_callable)
            )
        except ValueError as error:
            raise Unwritable(str(error)) from error
        return {
            "nodes": write_nodes(module.graph, f"{path}." if path else "", _is_guard),
            "convention": convention,
            "meta": {key: encode_value(value) for key, value in module.meta.items() if is_plain(value)},
        }

    def _describe_attributes(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the encoded attributes of a module by name, without those that torch keeps in every module.

        Of a graph, only those are returned that a node of a graph reads. Tensors among them are added to the file.
        Raise Unwritable if an attribute cannot be encoded.
        """
        own = {name: value for name, value in vars(module).items() if name not in _MACHINERY}
        if isinstance(module, GraphModule):
            # the other attributes of a graph belong to its tracer
            own = {name: value for name, value in own.items() if (id(module), name) in self._attributes_of_graphs}
        return {name: encode_value(value, self._refer) for name, value in own.items()}

    def _add_tensor(self, value: Any) -> int | None:
        """Add a tensor to the file and return the number of its row; None for None.

        Raise Unwritable if no file can hold it.
        """
        return None if value is None else self._tensors.add(value)

    def _refer(self, value: Any) -> dict[str, Any] | None:
        """Return the reference that stands for a tensor, a weak reference to a tensor, or a callable; else None.

        A tensor is added to the file. `refer_to_callable` says what counts as a callable. Raise Unwritable if the
        tensor or callable cannot be written.
        """
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensors.add(value)}
        if isinstance(value, weakref.ref) and isinstance(value(), torch.Tensor):
            # recurrent layers keep weak references to their weights
            return {"weak": self._tensors.add(cast(torch.Tensor, value()))}
        return refer_to_callable(value)


def read_modules(records: Any, tensors: Sequence[torch.Tensor], find: Find) -> GraphModule:
    """Return the outermost graph of a table of modules, which is its last row.

    `tensors` are those of the file, by row, and `find` returns a callable by its name. Raise ReportUnreadable if a row
    is damaged, or if the last one is not a graph.
    """
    modules: list[torch.nn.Module] = []
    expect(records, list, "modules")
    builder = descriptions.ValueBuilder()
    for index, record in enumerate(records):
        modules.append(_read_module(record, f"modules[{index}]", modules, tensors, find, builder))
    if not modules or not isinstance(modules[-1], GraphModule):
        raise ReportUnreadable("modules: the last of them is not a graph")
    return modules[-1]


def _read_module(
    record: Any,
    where: str,
    modules: Sequence[torch.nn.Module],
    tensors: Sequence[torch.Tensor],
    find: Find,
    builder: descriptions.ValueBuilder,
) -> torch.nn.Module:
    """Return the module of a row, with its children, tensors and attributes, and the nodes if it is a graph.

    The row refers to `modules` (those of the rows before it) and `tensors` by number. `find` and `builder` are those of
    `read_nodes`. Raise ReportUnreadable if the row is damaged, or would replace an attribute of torch's own.
    """
    if not isinstance(record, dict):
        raise ReportUnreadable(f"{where}: {reprlib.repr(record)} is not a module")

    fetch_other = make_fetch(find)

    def fetch(tag: str, data: Any, place: str) -> Any:
        """Return the tensor, the weak reference to a tensor, or the other value that a reference stands for."""
        if tag == "tensor":
            return _pick(tensors, data, place)
        if tag == "weak":
            return weakref.ref(_pick(tensors, data, place))
        return fetch_other(tag, data, place)

    module = _create_empty(record, where, find)
    state = vars(module)
    state["training"] = record.get("training") is True
    for key, table in (("modules", modules), ("parameters", tensors), ("buffers", tensors)):
        for name, index in expect(record.get(key), dict, f"{where}.{key}").items():
            state[f"_{key}"][name] = None if index is None else _pick(table, index, f"{where}.{key}.{name}")
    if not all(isinstance(value, (torch.nn.Parameter, type(None))) for value in state["_parameters"].values()):
        raise ReportUnreadable(f"{where}.parameters: one of them is a tensor, and not a parameter")
    for name in expect(record.get("not_persistent"), list, f"{where}.not_persistent"):
        state["_non_persistent_buffers_set"].add(expect(name, str, f"{where}.not_persistent"))
    for name, value in expect(record.get("attributes"), dict, f"{where}.attributes").items():
        # torch calls methods of a graph module while it generates the code: the file must not replace them
        if name in _MACHINERY or (isinstance(module, GraphModule) and hasattr(module, name)):
            raise ReportUnreadable(f"{where}.attributes: {name} is torch's own")
        state[name] = decode_value(value, f"{where}.attributes.{name}", fetch)
    if isinstance(module, GraphModule):
        _read_graph(module, record, where, find, builder)
    return module


def _create_empty(record: Mapping[str, Any], where: str, find: Find) -> torch.nn.Module:
    """Return an empty instance of a row's class without running its constructor; an empty graph if the row has nodes.

    Such a graph is a `GraphModule` whose class has the row's name. Raise ReportUnreadable if that name is not printable
    text, or if the class is not one of modules.
    """
    if "nodes" in record:
        name = record.get("name")
        if not isinstance(name, str) or not name.isprintable():
            raise ReportUnreadable(f"{where}.name: {reprlib.repr(name)} is not the name of a class")
        return GraphModule({}, Graph(), name)
    kind = decode_value(record.get("class"), f"{where}.class", make_fetch(find))
    if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module) or issubclass(kind, GraphModule):
        raise ReportUnreadable(f"{where}.class: {kind!r} is not a module")
    module: torch.nn.Module = object.__new__(kind)
    vars(module).update(vars(torch.nn.Module()))
    return module


def _read_graph(
    module: GraphModule, record: Mapping[str, Any], where: str, find: Find, builder: descriptions.ValueBuilder
) -> None:
    """Give an empty graph module the nodes, calling convention and `meta` of its row; torch then generates its code.

    The module has its children and attributes already. Raise ReportUnreadable if the row is damaged, if a node reads or
    calls an attribute that no module has, or if torch cannot generate code for the nodes.
    """
    graph = read_nodes(record["nodes"], f"{where}.nodes", find, builder)
    place = f"{where}.convention"

    def decode(context: Any) -> Any:
        return decode_value(context, place, make_fetch(find))

    try:
        descriptions.set_convention(graph, record.get("convention"), decode, lambda name: find(name, place))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ReportUnreadable(f"{place}: {error}") from error
    meta = expect(record.get("meta"), dict, f"{where}.meta")
    module.meta.update({key: decode_value(value, f"{where}.meta.{key}") for key, value in meta.items()})
    for owner, name in _find_attributes(module, graph):
        if not _has(owner, name):
            raise ReportUnreadable(f"{where}.nodes: one of them reads or calls {name}, which no module has")
    try:
        module.graph = graph
    except Exception as error:
        raise ReportUnreadable(f"{where}: no code can be generated for its nodes: {error}") from error


def _find_attributes(module: GraphModule, graph: Graph | None = None) -> Iterator[tuple[Any, str]]:
    """Yield (owner, name) for each node that reads an attribute or calls a module: the module that has it, its name.

    The nodes are those of `graph`, or the module's own if it is None. The owner is None if there is no module at the
    path.
    """
    for node in (graph or module.graph).nodes:
        if node.op in ("get_attr", "call_module"):
            *path, name = str(node.target).split(".")
            owner: Any = module
            for step in path:
                owner = vars(owner)["_modules"].get(step) if isinstance(owner, torch.nn.Module) else None
            yield owner, name


def _has(owner: Any, name: str) -> bool:
    """Tell whether `owner` is a module with an attribute, a parameter, a buffer, a module or a method of that name."""
    if not isinstance(owner, torch.nn.Module):
        return False
    state = vars(owner)
    tables = (state, state["_modules"], state["_parameters"], state["_buffers"])
    return any(name in table for table in tables) or hasattr(type(owner), name)


def _pick(table: Sequence[Any], index: Any, where: str) -> Any:
    """Return the row of that number; raise ReportUnreadable if the table has none."""
    if type(index) is not int or not 0 <= index < len(table):
        raise ReportUnreadable(f"{where}: there is no {reprlib.repr(index)} among the {len(table)} before it")
    return table[index]


def _refuse_hooks(module: torch.nn.Module, where: str) -> None:
    """Raise UsageError if a module itself has hooks; those that export adds to a graph module are accepted."""
    for name in _HOOKS:
        hooks = (vars(module)[name] or {}).values()
        foreign = [hook for hook in hooks if not (isinstance(module, GraphModule) and _is_of_export(hook))]
        if foreign:
            raise UsageError(
                f"{where} has hooks ({name}: {reprlib.repr(foreign[0])}), which are code and cannot be written to a "
                "file: remove them first"
            )


def _is_of_export(value: Any) -> bool:
    """Tell whether a class or function is defined in a module of `torch.export`."""
    return str(getattr(value, "__module__", "")).startswith("torch.export.")


def _is_guard(node: Node) -> bool:
    """Tell whether a node calls the input checks that export adds to a graph (`_guards_fn`), and nothing reads it."""
    owner = node.graph.owning_module
    return (
        node.op == "call_module"
        and node.target == _GUARDS
        and not node.users
        and _is_of_export(type(getattr(owner, _GUARDS, None)))
    )
