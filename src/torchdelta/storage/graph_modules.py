"""A graph module and everything in it as a table of modules, each after those that it holds, and back.

A nested graph is a table row like the outer one; a module that a graph calls as a whole is kept as its class and its
attributes. Reading one runs no constructor: an instance is made bare and its attributes are put in place. Every graph
comes back as a plain `GraphModule`, whatever subclass it was.

What `torch.export` adds to check the inputs of `ep.module()` (`_guards_fn`, and hooks that run before the call) is
generated code, and is left out: a graph that was read takes any input that its operators take.
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
from torchdelta.storage.graph_nodes import Find, fetching, read_nodes, refer_to_callable, write_nodes
from torchdelta.storage.tensors import TensorWriter
from torchdelta.storage.values import Unwritable, decode_value, encode_value

_GUARDS = "_guards_fn"
_MACHINERY = frozenset(vars(torch.nn.Module()))
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))


class ModuleWriter:
    """Writes modules, each once."""

    def __init__(self, tensors: TensorWriter) -> None:
        self.records: list[dict[str, Any]] = []
        self._tensors = tensors
        self._index: dict[int, int] = {}
        self._read: set[tuple[int, str]] = set()

    def add(self, module: torch.nn.Module, path: str = "") -> int:
        """Return the row of a module; UsageError says what in it cannot be written."""
        if id(module) not in self._index:
            record = self._record(module, path)
            self._index[id(module)] = len(self.records)
            self.records.append(record)
        return self._index[id(module)]

    def _record(self, module: torch.nn.Module, path: str) -> dict[str, Any]:
        where = path or "the graph"
        _refuse_hooks(module, where)
        held = vars(module)
        is_graph = isinstance(module, GraphModule)
        if isinstance(module, GraphModule):
            self._read.update((id(owner), name) for owner, name in _attributes_read(module))
        modules = {
            name: None if child is None else self.add(child, f"{path}.{name}" if path else name)
            for name, child in held["_modules"].items()
            if not (is_graph and name == _GUARDS and _is_of_export(type(child)))
        }
        try:
            record = {
                "training": bool(module.training),
                "modules": modules,
                "parameters": {name: self._tensor(value) for name, value in held["_parameters"].items()},
                "buffers": {name: self._tensor(value) for name, value in held["_buffers"].items()},
                "not_persistent": sorted(held["_non_persistent_buffers_set"]),
                "attributes": self._attributes(module),
            }
            if not isinstance(module, GraphModule):
                return {"class": refer_to_callable(type(module)), **record}
            return {"name": type(module).__name__, **record, **self._graph(module, path)}
        except Unwritable as error:
            kind = "" if is_graph else f" ({type(module).__qualname__})"
            raise UsageError(
                f"{where}{kind} cannot be written to a file: {error}. Trace or export it so that its work is nodes, "
                "or give it only tensors, numbers, text and functions of modules as attributes"
            ) from error

    def _graph(self, module: GraphModule, path: str) -> dict[str, Any]:
        try:
            convention = descriptions.describe_convention(
                module.graph, lambda context: encode_value(context, refer_to_callable)
            )
        except ValueError as error:
            raise Unwritable(str(error)) from error
        return {
            "nodes": write_nodes(module.graph, f"{path}." if path else "", _is_guard),
            "convention": convention,
            "meta": {key: encode_value(value) for key, value in module.meta.items() if _is_plain(value)},
        }

    def _attributes(self, module: torch.nn.Module) -> dict[str, Any]:
        own = {name: value for name, value in vars(module).items() if name not in _MACHINERY}
        if isinstance(module, GraphModule):
            # the rest belongs to whoever traced it
            own = {name: value for name, value in own.items() if (id(module), name) in self._read}
        return {name: encode_value(value, self._refer) for name, value in own.items()}

    def _tensor(self, value: Any) -> int | None:
        return None if value is None else self._tensors.add(value)

    def _refer(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensors.add(value)}
        if isinstance(value, weakref.ref) and isinstance(value(), torch.Tensor):
            # recurrent layers keep such of their weights
            return {"weak": self._tensors.add(cast(torch.Tensor, value()))}
        return refer_to_callable(value)


def read_modules(records: Any, tensors: Sequence[torch.Tensor], find: Find) -> GraphModule:
    """Return the outermost graph of a table; ReportUnreadable says which row is none."""
    made: list[torch.nn.Module] = []
    if not isinstance(records, list):
        raise ReportUnreadable(f"modules: expected a list, found {reprlib.repr(records)}")
    redrawing = descriptions.Redrawing()
    for index, record in enumerate(records):
        made.append(_read_module(record, f"modules[{index}]", made, tensors, find, redrawing))
    if not made or not isinstance(made[-1], GraphModule):
        raise ReportUnreadable("modules: the last of them is no graph")
    return made[-1]


def _read_module(
    record: Any,
    where: str,
    modules: Sequence[torch.nn.Module],
    tensors: Sequence[torch.Tensor],
    find: Find,
    redrawing: descriptions.Redrawing,
) -> torch.nn.Module:
    if not isinstance(record, dict):
        raise ReportUnreadable(f"{where}: {reprlib.repr(record)} is no module")

    fetch_other = fetching(find)

    def fetch(tag: str, data: Any, place: str) -> Any:
        if tag == "tensor":
            return _member(tensors, data, place)
        if tag == "weak":
            return weakref.ref(_member(tensors, data, place))
        return fetch_other(tag, data, place)

    module = _bare(record, where, find)
    state = vars(module)
    state["training"] = record.get("training") is True
    for key, table in (("modules", modules), ("parameters", tensors), ("buffers", tensors)):
        for name, index in _entries(record, key, where).items():
            state[f"_{key}"][name] = None if index is None else _member(table, index, f"{where}.{key}.{name}")
    if not all(isinstance(value, (torch.nn.Parameter, type(None))) for value in state["_parameters"].values()):
        raise ReportUnreadable(f"{where}.parameters: one of them is a tensor, and no parameter")
    state["_non_persistent_buffers_set"].update(decode_value(record.get("not_persistent"), where))
    for name, value in _entries(record, "attributes", where).items():
        # what a graph module has itself is called while its code is made
        if name in _MACHINERY or (isinstance(module, GraphModule) and hasattr(module, name)):
            raise ReportUnreadable(f"{where}.attributes: {name} is torch's own")
        state[name] = decode_value(value, f"{where}.attributes.{name}", fetch)
    if isinstance(module, GraphModule):
        _read_graph(module, record, where, find, redrawing)
    return module


def _bare(record: Mapping[str, Any], where: str, find: Find) -> torch.nn.Module:
    """Return a module without anything in it."""
    if "nodes" in record:
        name = record.get("name")
        if not isinstance(name, str) or not name.isprintable():
            raise ReportUnreadable(f"{where}.name: {reprlib.repr(name)} is no name of a class")
        return GraphModule({}, Graph(), name)
    kind = decode_value(record.get("class"), f"{where}.class", fetching(find))
    if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module) or issubclass(kind, GraphModule):
        raise ReportUnreadable(f"{where}.class: {kind!r} is no module")
    module: torch.nn.Module = object.__new__(kind)
    vars(module).update(vars(torch.nn.Module()))
    return module


def _read_graph(
    module: GraphModule, record: Mapping[str, Any], where: str, find: Find, redrawing: descriptions.Redrawing
) -> None:
    graph = read_nodes(record["nodes"], f"{where}.nodes", find, redrawing)
    place = f"{where}.convention"

    def decode(context: Any) -> Any:
        return decode_value(context, place, fetching(find))

    try:
        descriptions.set_convention(graph, record.get("convention"), decode, lambda name: find(name, place))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ReportUnreadable(f"{place}: {error}") from error
    meta = _entries(record, "meta", where)
    module.meta.update({key: decode_value(value, f"{where}.meta.{key}") for key, value in meta.items()})
    for owner, name in _attributes_read(module, graph):
        if not _has(owner, name):
            raise ReportUnreadable(f"{where}.nodes: one of them reads or calls {name}, which no module has")
    try:
        module.graph = graph
    except Exception as error:
        raise ReportUnreadable(f"{where}: its nodes make no code: {error}") from error


def _attributes_read(module: GraphModule, graph: Graph | None = None) -> Iterator[tuple[Any, str]]:
    """Yield each attribute that a graph's nodes read or call, with the module that it belongs to."""
    for node in (graph or module.graph).nodes:
        if node.op in ("get_attr", "call_module"):
            *path, name = str(node.target).split(".")
            owner: Any = module
            for step in path:
                owner = vars(owner)["_modules"].get(step) if isinstance(owner, torch.nn.Module) else None
            yield owner, name


def _has(owner: Any, name: str) -> bool:
    if not isinstance(owner, torch.nn.Module):
        return False
    state = vars(owner)
    held = (state, state["_modules"], state["_parameters"], state["_buffers"])
    return any(name in names for names in held) or hasattr(type(owner), name)


def _entries(record: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    entries = record.get(key)
    if not isinstance(entries, dict):
        raise ReportUnreadable(f"{where}.{key}: expected a dict, found {reprlib.repr(entries)}")
    return entries


def _member(table: Sequence[Any], index: Any, where: str) -> Any:
    if type(index) is not int or not 0 <= index < len(table):
        raise ReportUnreadable(f"{where}: there is no {reprlib.repr(index)} among the {len(table)} before it")
    return table[index]


def _refuse_hooks(module: torch.nn.Module, where: str) -> None:
    for name in _HOOKS:
        hooks = (vars(module)[name] or {}).values()
        foreign = [hook for hook in hooks if not (isinstance(module, GraphModule) and _is_of_export(hook))]
        if foreign:
            raise UsageError(
                f"{where} has hooks ({name}: {reprlib.repr(foreign[0])}), which are code and cannot be written to a "
                "file: remove them first"
            )


def _is_of_export(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch.export.")


def _is_guard(node: Node) -> bool:
    owner = node.graph.owning_module
    return (
        node.op == "call_module"
        and node.target == _GUARDS
        and not node.users
        and _is_of_export(type(getattr(owner, _GUARDS, None)))
    )


def _is_plain(value: Any) -> bool:
    try:
        encode_value(value)
    except Unwritable:
        return False
    return True
