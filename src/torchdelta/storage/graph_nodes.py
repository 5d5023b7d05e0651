"""The nodes of one graph as JSON's own types, and a graph of them again.

    {"op": "call_function", "name": "add", "target": "operator aten::add.Tensor", "args": [{"node": "x"}, 2.0],
     "kwargs": {}, "meta": {"val": {"described": {"tensor": ["float32", [2, 3], [3, 1], "cpu", false]}}, …}}

Names, order, arguments and annotations are kept exactly. Of a node's `meta`, plain data is kept, and so are the modules
that it was traced in (their classes by name) and its value, described as a fake tensor. Other entries refer to the
process that traced the graph, and are not written: objects that dynamo guards on, callables and earlier nodes.

Torch puts the names of nodes, methods, attributes and arguments into the code that it generates and runs. So each is
read only if it can be nothing but a name.

Start reading at `write_nodes` and `read_nodes`.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch.fx import Graph, Node

from torchdelta._torch.graphs import descriptions, targets
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.storage.values import Fetch, Unwritable, decode_value, encode_value, expect, is_plain

_OPS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
_DESCRIBED = ("val", "example_value", "tensor_meta")
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")

Find = Callable[[str, str], Any]
"""Returns the callable of a name; the second argument is the place in the file, for the error message."""


def write_nodes(graph: Graph, where: str, is_left_out: Callable[[Node], bool]) -> list[dict[str, Any]]:
    """Return a record of each node of a graph, in order, except those for which `is_left_out` is true.

    Raise UsageError if a node cannot be written, or reads a node that was left out or comes later; `where` is put in
    front of the node's name in the message.
    """
    written: set[Node] = set()
    records = []
    for node in graph.nodes:
        if not is_left_out(node):
            records.append(_write_node(node, f"{where}{node.name}", written))
            written.add(node)
    return records


def read_nodes(records: Any, where: str, find: Find, builder: descriptions.ValueBuilder) -> Graph:
    """Return a new graph of the nodes that `write_nodes` wrote; raise ReportUnreadable if a record is not a node.

    `find` returns a callable by its name, `builder` makes the fake values in `meta`, and `where` is the place for
    messages.
    """
    graph = Graph()
    nodes: dict[str, Node] = {}
    for index, record in enumerate(expect(records, list, where)):
        place = f"{where}[{index}]"
        node = _read_node(graph, expect(record, dict, place), place, nodes, find)
        node.meta = _read_meta(record.get("meta", {}), f"{place}.meta", find, builder)
        nodes[node.name] = node
    return graph


def refer_to_callable(value: Any) -> dict[str, Any] | None:
    """Return the reference to a callable, a member of an enumeration or a pytree's structure; None for other values.

    The reference is a dict of one entry with the key `target`, `enum` or `tree`. Devices, modules and tensors count as
    other values. Raise Unwritable if another process could not find the callable or class.
    """
    if descriptions.is_tree_spec(value):
        return {"tree": descriptions.describe_tree(value, lambda context: encode_value(context, refer_to_callable))}
    if isinstance(value, enum.Enum):
        return {"enum": [_name(type(value)), value.name]}
    # a device can be called too, as a decorator
    if callable(value) and not isinstance(value, (torch.device, torch.nn.Module, torch.Tensor)):
        return {"target": _name(value)}
    return None


def make_fetch(find: Find) -> Fetch:
    """Return a function that reads a reference of `refer_to_callable` and returns the value it stands for.

    It takes the reference's tag, content and place, and raises ReportUnreadable if the tag is another one or the
    content is damaged. `find` returns a callable by its name.
    """

    def fetch(tag: str, data: Any, where: str) -> Any:
        """Return the callable, the member or the structure that a reference stands for."""
        if tag == "target":
            return find(expect(data, str, where), where)
        if tag == "enum":
            return _read_member(data, where, find)
        if tag != "tree":
            raise ReportUnreadable(f"{where}: {tag!r} is not a kind of value")
        try:
            return descriptions.rebuild_tree(
                data, lambda context: decode_value(context, where, fetch), lambda name: find(name, where)
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ReportUnreadable(f"{where}: it does not describe a structure: {error}") from error

    return fetch


def _read_member(data: Any, where: str, find: Find) -> Any:
    """Return the member of an enumeration that `data`, a list [name of the class, name of the member], refers to.

    `find` returns the class by its name. Raise ReportUnreadable if there is no such member.
    """
    if not isinstance(data, list) or len(data) != 2 or not all(isinstance(part, str) for part in data):
        raise ReportUnreadable(f"{where}: {reprlib.repr(data)} is not a member of an enumeration")
    kind = find(data[0], where)
    if not isinstance(kind, enum.EnumMeta) or data[1] not in kind.__members__:
        raise ReportUnreadable(f"{where}: {data[0]} has no member {data[1]!r}")
    return kind.__members__[data[1]]


def _write_node(node: Node, where: str, written: Set[Node]) -> dict[str, Any]:
    """Return the record of a node: op, name, target, arguments, and type and `meta` if they have something to write.

    Raise UsageError if it reads a node that is not in `written`, the nodes before it, or if its function or an argument
    cannot be written. `where` is the node's name in the message.
    """
    for source in node.all_input_nodes:
        if source not in written:
            raise UsageError(
                f"{where} uses {source.name}, which its graph has not computed before it: sort the graph first"
            )
    try:
        target = targets.name_target(node.target) if node.op == "call_function" else node.target
    except ValueError as error:
        raise UsageError(f"{where} calls a function that another process would not find: {error}") from error
    try:
        record = {
            "op": node.op,
            "name": node.name,
            "target": target,
            "args": [encode_value(argument, _refer) for argument in node.args],
            "kwargs": {name: encode_value(argument, _refer) for name, argument in node.kwargs.items()},
        }
    except Unwritable as error:
        raise UsageError(
            f"{where} has an argument that cannot be written to a file: {error}. Pass it to the graph as an input, "
            "or as numbers, text, tuples, lists and dicts"
        ) from error
    annotation = _write_annotation(node.type)
    if annotation is not None:
        record["type"] = annotation
    if meta := _write_meta(node.meta):
        record["meta"] = meta
    return record


def _refer(value: Any) -> dict[str, Any] | None:
    """Return `{"node": NAME}` for a node, and what `refer_to_callable` returns for any other value."""
    return {"node": value.name} if isinstance(value, Node) else refer_to_callable(value)


def _name(value: Any) -> str:
    """Return the name of a callable; raise Unwritable if another process could not find it."""
    try:
        return targets.name_target(value)
    except ValueError as error:
        raise Unwritable(str(error)) from error


def _read_node(graph: Graph, record: dict[str, Any], where: str, nodes: Mapping[str, Node], find: Find) -> Node:
    """Add the node of a record, without its `meta`, to the end of a graph and return it.

    `nodes` are those before it, by name, which its arguments may refer to; `find` returns a callable by its name. Raise
    ReportUnreadable if the record is damaged, or if a name in it is taken or could be more than a name in code.
    """
    if unknown := record.keys() - {"op", "name", "target", "args", "kwargs", "type", "meta"}:
        raise ReportUnreadable(f"{where}: unknown {', '.join(sorted(unknown))}")
    op, name, target = (expect(record.get(key), str, f"{where}.{key}") for key in ("op", "name", "target"))
    args = expect(record.get("args"), list, f"{where}.args")
    kwargs = expect(record.get("kwargs"), dict, f"{where}.kwargs")

    fetch_other = make_fetch(find)

    def fetch(tag: str, data: Any, place: str) -> Any:
        """Return the earlier node, or the other value, that a reference stands for."""
        if tag != "node":
            return fetch_other(tag, data, place)
        if not isinstance(data, str) or data not in nodes:
            raise ReportUnreadable(f"{place}: no node before it is called {data!r}")
        return nodes[data]

    if op not in _OPS:
        raise ReportUnreadable(f"{where}: {op!r} is not an op of a node")
    if not descriptions.is_plain_name(name) or name in nodes:
        raise ReportUnreadable(f"{where}: {name!r} is not a name for a node, or is another's")
    _refuse_strange_names(op, target, kwargs, where)
    node = graph.create_node(
        op,
        find(target, f"{where}.target") if op == "call_function" else target,
        tuple(decode_value(item, f"{where}.args[{index}]", fetch) for index, item in enumerate(args)),
        {key: decode_value(item, f"{where}.kwargs.{key}", fetch) for key, item in kwargs.items()},
        name,
        _read_annotation(record.get("type"), f"{where}.type", find),
    )
    _refuse_inner_attributes(node, where)
    descriptions.rename(node, name)
    return node


def _refuse_inner_attributes(node: Node, where: str) -> None:
    """Raise ReportUnreadable if a node takes an attribute of Python's own, which could lead to all code of the process.

    These are attributes with two underscores, such as `__globals__`, and those whose names are not in the graph.
    """
    is_getter = node.op == "call_method" and node.target in ("__getattribute__", "__getattr__")
    if node.target is getattr:
        name = node.args[1] if len(node.args) > 1 else None
        is_getter = not isinstance(name, str) or name.startswith("__")
    if is_getter:
        raise ReportUnreadable(f"{where}: it takes an attribute of Python's own, which no traced graph does")


def _refuse_strange_names(op: str, target: str, kwargs: Mapping[str, Any], where: str) -> None:
    """Raise ReportUnreadable if a target or keyword could be more than a name in the code that torch generates.

    Most have to be identifiers. The path of an attribute or module may have other printable characters, but no double
    quotes, backslashes or empty parts. The target of a function is not looked at, because it is never code.
    """
    parts = [target.lstrip("*")] if op == "placeholder" else target.split(".")
    if op in ("get_attr", "call_module"):
        is_fine = all(part.isprintable() and not set(part) & {'"', "\\"} and part for part in parts)
    else:
        is_fine = op == "call_function" or all(map(descriptions.is_plain_name, parts))
    if not is_fine:
        raise ReportUnreadable(f"{where}.target: {target!r} is not a name that a {op} could have")
    for name in kwargs:
        if not descriptions.is_plain_name(name):
            raise ReportUnreadable(f"{where}.kwargs: {name!r} is not the name of an argument")


def _write_annotation(annotation: Any) -> str | None:
    """Return the name of an annotation if it is a class that every reader may look up, such as one of torch; else None.

    Others are left out, because an annotation computes nothing.
    """
    try:
        name = targets.name_target(annotation) if isinstance(annotation, type) else None
        if name is not None:
            targets.find_target(name)
        return name
    except (ValueError, LookupError):
        return None


def _read_annotation(data: Any, where: str, find: Find) -> Any:
    """Return the class that `_write_annotation` named; None for None. Raise ReportUnreadable if it cannot be found."""
    return None if data is None else find(expect(data, str, where), where)


def _write_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a node's `meta`, encoded by key; those that cannot be written are left out without a word.

    Traced values are described without their elements, classes in module stacks are given by name, and of the dict
    `custom` only entries of plain data are kept.
    """
    entries: dict[str, Any] = {}
    for key, value in meta.items():
        try:
            if key in _DESCRIBED:
                entries[key] = {"described": descriptions.describe_value(value)}
            elif key in _STACKS and isinstance(value, dict):
                entries[key] = encode_value({name: _name_class(place) for name, place in value.items()})
            elif key == "custom" and isinstance(value, dict):
                # each tool has an entry of its own, and not all of them are plain data
                entries[key] = encode_value({name: item for name, item in value.items() if is_plain(item)})
            else:
                entries[key] = encode_value(value, _refer_to_member)
        except (AttributeError, TypeError, ValueError):  # tools put what they like into `meta`
            continue
    return entries


def _name_class(place: Any) -> Any:
    """Return an entry of a module stack, (path, class), with the class by its full name; one that is a text stays."""
    path, kind = place
    return path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _refer_to_member(value: Any) -> dict[str, Any] | None:
    """Return the reference to a member of an enumeration; None for other values.

    Raise Unwritable if the enumeration is not one of torch's or Python's own, because a reader may not look it up.
    """
    if not isinstance(value, enum.Enum):
        return None
    try:
        targets.find_target(_name(type(value)))
    except LookupError as error:
        raise Unwritable(str(error)) from error
    return refer_to_callable(value)


def _read_meta(data: Any, where: str, find: Find, builder: descriptions.ValueBuilder) -> dict[str, Any]:
    """Return the `meta` that `_write_meta` wrote as `data`; raise ReportUnreadable if an entry is damaged.

    A described value becomes a fake value of `builder`; a class in a module stack stays a name.
    """

    def fetch(tag: str, content: Any, place: str) -> Any:
        """Return the member of an enumeration, or the fake value of a description."""
        if tag == "enum":
            return _read_member(content, place, find)
        if tag != "described":
            raise ReportUnreadable(f"{place}: {tag!r} is not a kind of plain data")
        try:
            return builder.build(content)
        except Exception as error:
            raise ReportUnreadable(f"{place}: {reprlib.repr(content)} does not describe a value: {error}") from error

    return {key: decode_value(value, f"{where}.{key}", fetch) for key, value in expect(data, dict, where).items()}
