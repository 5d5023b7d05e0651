"""A graph as code to read: a function of its inputs, or a module where the graph has parameters of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchdelta._torch import nodes
from torchdelta._torch.graphs import attribute
from torchdelta.errors import ReproUnwritable
from torchdelta.repro.expressions import is_statement, write_call
from torchdelta.repro.literals import attribute_path, write_value
from torchdelta.repro.modules import write_module
from torchdelta.repro.naming import Names, wishes_for_input, wishes_for_path

INDENT = "    "
_GUARDS = "_guards_fn"
"""Where export leaves its assertions about the inputs."""


@dataclass(kw_only=True)
class ProgramSource:
    """The program of a script."""

    inputs: list[str] = field(default_factory=list)
    """Names of the inputs, in their order."""
    body: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the program holds besides its inputs, by its own name for it."""
    paths: dict[str, str] = field(default_factory=dict)
    """The name of that in a report, and how a script reaches it."""
    modules: dict[str, str] = field(default_factory=dict)
    """Modules that the program calls, by its own name for them: the call that builds each."""

    @property
    def is_module(self) -> bool:
        """Whether the program holds something, and so is a module."""
        return bool(self.tensors or self.modules)


def write_program(graph_module: GraphModule, inputs: tuple[Any, ...], imports: tuple[str, ...] = ()) -> ProgramSource:
    """Return the code of a graph; ReproUnwritable names the node that has none."""
    source = ProgramSource(imports=set(imports))
    names = Names()
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    given = {node: names.give(wishes_for_input(node, value)) for node, value in zip(placeholders, inputs, strict=True)}
    source.inputs = list(given.values())
    _hold(graph_module, source)
    source.body = list(_Body(graph_module, source, names, "", given).lines())
    return source


def _hold(graph_module: GraphModule, source: ProgramSource) -> None:
    """Give a name to every tensor and module that the graph has of its own."""
    names = Names()
    met: dict[int, str] = {}
    for path, node, owner in _reads(graph_module, ""):
        target = str(node.target)
        value = attribute(owner, target)
        if id(value) in met or isinstance(value, GraphModule):
            if id(value) in met and not isinstance(value, torch.nn.Module):
                source.paths[path] = met[id(value)]
            continue
        if isinstance(value, torch.nn.Module) and node.op == "call_module":
            name = names.give(wishes_for_path(target))
            met[id(value)] = source.paths[path] = name
            source.modules[name] = write_module(value, target)
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                met[id(tensor)] = source.paths[f"{path}.{inner}"] = attribute_path(name, inner)
                source.tensors[attribute_path(name, inner)] = tensor
        elif isinstance(value, torch.Tensor):
            name = names.give(wishes_for_path(target))
            met[id(value)] = source.paths[path] = name
            source.tensors[name] = value


def _reads(graph_module: GraphModule, prefix: str) -> Iterator[tuple[str, Node, GraphModule]]:
    """Yield every node that reads what a module has, modules that are called first, those inside of graphs too."""
    found = [
        node for node in graph_module.graph.nodes if node.op in ("get_attr", "call_module") and not _is_guard(node)
    ]
    for node in sorted(found, key=lambda node: node.op):
        value = attribute(graph_module, str(node.target))
        yield f"{prefix}{node.target}", node, graph_module
        if isinstance(value, GraphModule):
            yield from _reads(value, f"{prefix}{node.target}.")


def _is_guard(node: Node) -> bool:
    return node.op == "call_module" and node.target == _GUARDS and not node.users


class _Body:
    """Writes the statements of one graph."""

    def __init__(
        self, graph_module: GraphModule, source: ProgramSource, names: Names, prefix: str, given: Mapping[Node, str]
    ) -> None:
        self.graph_module = graph_module
        self.source = source
        self.names = names
        self.prefix = prefix
        self.text: dict[Node, str] = dict(given)
        self.functions: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        place = ""
        body = [node for node in self.graph_module.graph.nodes if node.op != "placeholder" and not _is_guard(node)]
        inlined = _returned_at_once(body)
        for node in body:
            try:
                yield from self._functions_of(node)
                written = self._written(node)
            except ReproUnwritable as error:
                raise ReproUnwritable(f"{node.name} ({nodes.op_name(node)}): {error}") from error
            if node.op == "get_attr":
                self.text[node] = written
                continue
            here = place_of(node)
            if here and here != place and node.op != "output":
                place = here
                yield f"# {here}"
            if inlined is not None and node is inlined:
                self.text[node] = written
            elif node.op == "output" or not node.users or is_statement(node):
                yield written
                self.text[node] = "None"
            else:
                self.text[node] = self.names.give((node.name,))
                yield f"{self.text[node]} = {written}"

    def _written(self, node: Node) -> str:
        if node.op == "get_attr":
            return self._attribute(node)
        if node.op == "output":
            return f"return {write_value(node.args[0], self._refer)}"
        if node.op == "call_module":
            args = [write_value(argument, self._refer) for argument in node.args]
            keywords = [f"{name}={write_value(argument, self._refer)}" for name, argument in node.kwargs.items()]
            return f"{self._attribute(node)}({', '.join((*args, *keywords))})"
        return write_call(node, self._refer, self.source.imports)

    def _attribute(self, node: Node) -> str:
        target = str(node.target)
        if target in self.functions:
            return self.functions[target]
        if (known := self.source.paths.get(f"{self.prefix}{target}")) is not None:
            return f"self.{known}"
        return write_value(attribute(self.graph_module, target))

    def _functions_of(self, node: Node) -> Iterator[str]:
        """Write a graph inside of the graph as a function inside of the function."""
        if node.op not in ("get_attr", "call_module") or str(node.target) in self.functions:
            return
        inner = attribute(self.graph_module, str(node.target))
        if not isinstance(inner, GraphModule):
            return
        name = self.functions[str(node.target)] = self.names.give(wishes_for_path(str(node.target)))
        given = {one: self.names.give((one.name,)) for one in inner.graph.nodes if one.op == "placeholder"}
        yield f"def {name}({', '.join(given.values())}):"
        for line in _Body(inner, self.source, self.names, f"{self.prefix}{node.target}.", given).lines():
            yield f"{INDENT}{line}"

    def _refer(self, value: Any) -> str | None:
        return self.text[value] if isinstance(value, Node) else None


def _returned_at_once(body: list[Node]) -> Node | None:
    """Return the last node before the output where that only returns it: it needs no name."""
    if len(body) < 2 or body[-1].op != "output" or body[-2].op not in ("call_function", "call_method", "call_module"):
        return None
    last, returned = body[-2], body[-1].args[0]
    is_alone = returned is last or (isinstance(returned, (tuple, list)) and list(returned) == [last])
    return last if is_alone and list(last.users) == [body[-1]] and not is_statement(last) else None


def place_of(node: Node) -> str:
    """Return where in the user's source a node comes from, without the user's folders."""
    line = nodes.source_line(node)
    parts = []
    if found := re.match(r"(?P<file>.+?):(?P<line>\d+): ", line):
        where = f"{os.path.basename(found['file'])}:{found['line']}"
        frame = re.search(
            rf'File "{re.escape(found["file"])}", line {found["line"]}, in (?P<function>\S+)',
            str(node.meta.get("stack_trace")),
        )
        parts.append(f"{where} in {frame['function']}" if frame else where)
    if path := nodes.module_path(node):
        parts.append(f"module {path}")
    return ", ".join(parts)
