"""Numbers that stand for the user's: an expression makes them again, for each shape others.

A subject: a graph with its inputs while it is being minified.

It has a normal form: one placeholder for each input, constants of the graph among them, and one flat tuple of outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from torchdelta._torch import tensors
from torchdelta._torch.compile import stances
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import has_effect
from torchdelta._torch.process import runtime
from torchdelta.program.copies import copy_together
from torchdelta.storage.graphs import modules_named, read_graph, read_values, write_graph, write_values


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How an input is made instead of kept."""

    by: str
    """`randn`, `zeros` or `ones`."""
    seed: int = 0
    """What random numbers are drawn from."""

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return numbers in the place of a tensor's own."""
        if self.by == "randn":
            dtype = torch.complex64 if value.is_complex() else torch.float32
            generator = torch.Generator().manual_seed(self.seed)
            made = torch.randn(value.shape, dtype=dtype, generator=generator).to(value.dtype)
        else:
            made = getattr(torch, self.by)(value.shape, dtype=value.dtype)
        return made.to(value.device).requires_grad_(value.requires_grad)

    def text(self, value: torch.Tensor) -> str:
        """Return the expression that makes them on the CPU."""
        shape = tuple(value.shape)
        if self.by != "randn":
            return f"torch.{self.by}({shape}, dtype={value.dtype})"
        sizes = ", ".join(map(str, shape)) or "()"
        generator = f"generator=torch.Generator().manual_seed({self.seed})"
        drawn = f"torch.randn({sizes}, {'dtype=torch.complex64, ' if value.is_complex() else ''}{generator})"
        return drawn if value.dtype in (torch.float32, torch.complex64) else f"{drawn}.to({value.dtype})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A graph in normal form, and one input for each of its placeholders."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    drawn: Mapping[str, Draw] = field(default_factory=dict)
    """Inputs whose numbers are not the user's, by name."""
    origin: str = ""
    """Who made the graph, where that was captured and not cut out of another: dynamo, or forward or backward of AOT."""

    @classmethod
    def of(cls, graph_module: GraphModule, inputs: Sequence[Any]) -> Subject:
        """Return the normal form of any graph with flat inputs."""
        held = {node.name: node for node in graph_module.graph.nodes if _is_constant(node, graph_module)}
        constants = {name: graphs.attribute(graph_module, str(node.target)) for name, node in held.items()}
        given = dict(zip((node.name for node in placeholders(graph_module.graph)), inputs, strict=True))
        return rebuilt(graph_module, {**given, **constants}, _outputs(graph_module.graph))

    @property
    def size(self) -> int:
        """The number of nodes, inputs and output included."""
        return len(self.graph.graph.nodes)

    @property
    def nodes(self) -> list[Node]:
        """What the graph computes, without its inputs and its output."""
        return [node for node in self.graph.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def modules(self) -> list[str]:
        """Where the functions are that the graph calls: who reads it in another process has to import them."""
        return modules_named(self.graph)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what the graph returns."""
        return _outputs(self.graph.graph)

    @property
    def named_inputs(self) -> dict[str, Any]:
        """The inputs by the names of their placeholders."""
        return dict(zip((node.name for node in placeholders(self.graph.graph)), self.inputs, strict=True))

    @cached_property
    def values(self) -> dict[str, Any]:
        """What each node is when the graph runs eagerly, as it was before anything wrote to it."""
        values: dict[str, Any] = {}

        class Noting(Interpreter):
            def run_node(self, n: Node) -> Any:
                value = super().run_node(n)
                if n.op not in ("placeholder", "output"):
                    values[n.name] = as_inputs(value)
                return value

        with runtime.preserved(), stances.eager_here(), torch.enable_grad():
            runtime.seed_everything(0)
            noting = Noting(self.graph, garbage_collect_values=True)
            noting.extra_traceback = False
            noting.run(*copy_together(self.inputs, name="the inputs"), enable_io_processing=False)
        return {**self.named_inputs, **values}

    @cached_property
    def key(self) -> str:
        """What two subjects have in common exactly when they are the same graph on the same inputs."""
        names: dict[Node, str] = {}

        def canonical(value: Any) -> str:
            return repr(map_arg(value, lambda node: _Name(names[node])))

        digest = hashlib.sha256()
        for index, node in enumerate(self.graph.graph.nodes):
            target = "" if node.op in ("placeholder", "output") else _target(node)
            names[node] = f"%{index}"
            digest.update(f"{node.op} {target} {canonical((node.args, node.kwargs))}\n".encode())
        for value in self.inputs:
            _digest(value, digest)
        return digest.hexdigest()

    def write(self, directory: Any) -> None:
        """Write graph and inputs into a directory, without pickling anything."""
        write_graph(self.graph, directory / "graph.json")
        write_values(self.inputs, directory / "inputs.json")

    @classmethod
    def read(cls, directory: Any, *, allow: Sequence[str] = ()) -> Subject:
        """Read what `write` wrote."""
        graph = read_graph(directory / "graph.json", allow=allow)
        return cls(graph=graph, inputs=tuple(read_values(directory / "inputs.json", allow=allow)))


def rebuilt(
    source: GraphModule,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    given: Mapping[str, Any] | None = None,
    instead: Mapping[str, Any] | None = None,
    dropped: frozenset[str] = frozenset(),
) -> Subject:
    """Build a subject of the nodes that the outputs need, and of those that have an effect and are not dropped.

    `inputs` has a value for each placeholder and constant. Who reads a node that is `given` reads an input of that
    value; the node itself stays where it is returned. `instead` has for a node another one, as a `Name`, or a literal.
    """
    ordered = list(source.graph.nodes)
    cut, other = given or {}, instead or {}

    def found(name: str) -> Any:
        while name in other:
            if not isinstance(other[name], Name):
                return other[name]
            name = other[name].name
        return Name(name)

    # what writes, draws or asserts is not needed for its result: it goes when somebody proposes that
    effects = [node.name for node in ordered if _has_effect(node) and node.name not in dropped | other.keys()]
    returned = [each.name for each in map(found, outputs) if isinstance(each, Name)]
    kept, read_cut = _needed({node.name: node for node in ordered}, [*returned, *effects], inputs, cut, found)
    graph = Graph()
    made: dict[str, Node] = {}
    placed: dict[str, Node] = {}
    taken = {node.name for node in ordered}
    for node in ordered:
        if node.name in inputs and node.name in kept:
            made[node.name] = placed[node.name] = graph.placeholder(node.name)
        elif node.name in read_cut:
            placed[node.name] = graph.placeholder(_beside(node.name, taken) if node.name in kept else node.name)
        if node.name in placed:
            placed[node.name].meta = _provenance(node)

    def read(node: Node) -> Any:
        name = found(node.name)
        return placed.get(name.name, made.get(name.name)) if isinstance(name, Name) else name

    for node in ordered:
        if node.name in kept and node.name not in inputs:
            made[node.name] = graph.create_node(
                node.op, node.target, *map_arg((node.args, node.kwargs), read), name=node.name, type_expr=node.type
            )
            made[node.name].meta = dict(node.meta)
    graph.output(tuple(made[name] for name in dict.fromkeys(returned)))
    values = [inputs[name] if name in inputs else cut[name] for name in placed]
    return Subject(graph=GraphModule(source, graph), inputs=tuple(values))


@dataclass(frozen=True)
class Name:
    """A node by its name, where a literal could stand as well."""

    name: str


def placeholders(graph: Graph) -> list[Node]:
    """Return the placeholders of a graph in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def as_inputs(value: Any) -> Any:
    """Return what a graph may be given instead of computing a value: leaves of their own, laid out in the same way."""
    if isinstance(value, (tuple, list)):
        return type(value)(as_inputs(item) for item in value) if type(value) in (tuple, list) else value
    if not isinstance(value, torch.Tensor):
        return value
    copied: torch.Tensor = copy_together(value.detach(), name="a value")
    return copied.requires_grad_(value.requires_grad)


def _beside(name: str, taken: set[str]) -> str:
    """Return, and take, a name for the input that stands for a node which stays."""
    while name in taken:
        name += "_given"
    taken.add(name)
    return name


def _needed(
    by_name: Mapping[str, Node],
    asked: Sequence[str],
    inputs: Mapping[str, Any],
    cut: Mapping[str, Any],
    found: Callable[[str], Any],
) -> tuple[set[str], set[str]]:
    """Return what has to be there or be computed for what is asked, and which cut nodes it reads."""
    kept: set[str] = set()
    read_cut: set[str] = set()
    waiting = list(asked)
    while waiting:
        name = waiting.pop()
        if name in kept:
            continue
        kept.add(name)
        if name in inputs:
            continue
        for each in map(found, (source.name for source in by_name[name].all_input_nodes)):
            if isinstance(each, Name):
                (read_cut.add if each.name in cut else waiting.append)(each.name)
    return kept, read_cut


def _has_effect(node: Node) -> bool:
    return node.op not in ("placeholder", "output", "get_attr") and has_effect(node)


def _is_constant(node: Node, graph_module: GraphModule) -> bool:
    return node.op == "get_attr" and isinstance(graphs.attribute(graph_module, str(node.target)), torch.Tensor)


def _outputs(graph: Graph) -> tuple[str, ...]:
    found: dict[str, None] = {}
    map_arg(graph.output_node().args, lambda node: found.setdefault(node.name, None))
    return tuple(found)


def _provenance(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _target(node: Node) -> str:
    """Return what a node calls without its address, which is another one in each process."""
    name = getattr(node.target, "__qualname__", None)
    return f"{getattr(node.target, '__module__', '')}.{name}" if name else str(node.target)


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _digest(value: Any, digest: Any) -> None:
    if not isinstance(value, torch.Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(repr((tuple(value.shape), value.stride(), value.dtype, value.requires_grad)).encode())
    if tensors.has_own_buffer(value):
        flat = value.detach().contiguous().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
