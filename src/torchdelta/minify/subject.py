"""A subject: a graph with its inputs while it is being minified.

It has a normal form: one placeholder for each input, the graph's constants among them, and one flat tuple of outputs.
So every reduction pass can cut at any node: the node becomes a placeholder, and its value becomes an input.

    graph():  %x = placeholder        inputs = (tensor(…), tensor(…))
              %weight = placeholder
              %mm = call_function[torch.mm](%x, %weight)
              return (mm,)

The numbers of an input may be replaced by a `Draw`, an expression that makes them: the script then needs no data file.

Start reading at `Subject.of`, which makes the normal form, and `rebuild`, which makes a smaller subject.
"""

from __future__ import annotations

import hashlib
import re
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
from torchdelta.errors import UsageError
from torchdelta.program.copies import copy_together
from torchdelta.storage.graphs import modules_named, read_graph, read_values, write_graph, write_values

_LOCAL = re.compile(r"L_(\w*[^\W_])_")
"""The name that dynamo gives an input, with the name of the local variable in it."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """An expression for the numbers of an input: how the input is made instead of stored."""

    by: str
    """`randn`, `zeros` or `ones`."""
    seed: int = 0
    """The seed of the generator that random numbers come from."""

    def __post_init__(self) -> None:
        """Raise UsageError if `by` is unknown: it becomes code, and may come from the journal of a reduction."""
        if self.by not in ("randn", "zeros", "ones"):
            raise UsageError(f"numbers are drawn by randn, zeros or ones, not by {self.by!r}")

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of the same shape, dtype, device and `requires_grad`, filled with these numbers.

        Random ones are drawn on the CPU by a new generator with `seed`; the global generators are not advanced.
        """
        if self.by == "randn":
            dtype = torch.complex64 if value.is_complex() else torch.float32
            generator = torch.Generator().manual_seed(self.seed)
            numbers = torch.randn(value.shape, dtype=dtype, generator=generator).to(value.dtype)
        else:
            numbers = getattr(torch, self.by)(value.shape, dtype=value.dtype)
        return numbers.to(value.device).requires_grad_(value.requires_grad)

    def text(self, value: torch.Tensor) -> str:
        """Return the code of an expression that makes these numbers on the CPU, in the shape and dtype of a tensor."""
        shape = tuple(value.shape)
        if self.by != "randn":
            return f"torch.{self.by}({shape}, dtype={value.dtype})"
        sizes = ", ".join(map(str, shape)) or "()"
        generator = f"generator=torch.Generator().manual_seed({self.seed})"
        call = f"torch.randn({sizes}, {'dtype=torch.complex64, ' if value.is_complex() else ''}{generator})"
        return call if value.dtype in (torch.float32, torch.complex64) else f"{call}.to({value.dtype})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A graph in normal form, and one input for each of its placeholders."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    drawn: Mapping[str, Draw] = field(default_factory=dict)
    """Inputs whose numbers are not the user's, by name."""
    origin: str = ""
    """The level of the capture: `dynamo`, or after AOTAutograd `forward`, `backward` or `inference`; else empty."""
    with_names: Callable[[], Subject] | None = field(default=None, repr=False)
    """Makes the same subject anew with the names that the capture gave, for a pass that looks for them."""

    @classmethod
    def of(cls, graph_module: GraphModule, inputs: Sequence[Any]) -> Subject:
        """Return the normal form of a graph; `inputs` are flat, one for each placeholder in order.

        Tensors that the graph reads as attributes become inputs too. The outputs become one flat tuple, with each node
        once and without literals. Inputs and nodes that no output or effect needs are left out.
        """
        readers = {node.name: node for node in graph_module.graph.nodes if _is_constant(node, graph_module)}
        constants = {name: graphs.attribute(graph_module, str(node.target)) for name, node in readers.items()}
        arguments = dict(zip((node.name for node in placeholders(graph_module.graph)), inputs, strict=True))
        return rebuild(graph_module, {**arguments, **constants}, _output_names(graph_module.graph))

    @classmethod
    def named(cls, graph_module: GraphModule, inputs: Sequence[Any]) -> Subject:
        """Return a graph as `of` does, but in a form that gives a pass the names of the capture.

        Tensors that the graph reads as attributes stay attributes. A placeholder that dynamo called `L_x_` is called
        `x`, because dynamo makes `L_x_` of that again. Unneeded inputs and nodes are left out here too.
        """
        arguments = dict(zip((node.name for node in placeholders(graph_module.graph)), inputs, strict=True))
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                local = _LOCAL.fullmatch(str(node.target))
                copies[node] = graph.placeholder(local[1] if local is not None else str(node.target))
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        values = {copies[node].name: arguments[node.name] for node in placeholders(graph_module.graph)}
        return rebuild(GraphModule(graph_module, graph), values, _output_names(graph))

    @property
    def size(self) -> int:
        """The number of nodes, inputs and output included."""
        return len(self.graph.graph.nodes)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that compute: all but the placeholders and the output."""
        return [node for node in self.graph.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def modules(self) -> list[str]:
        """The modules of the functions that the graph calls, which another process has to import to read it."""
        return modules_named(self.graph)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the nodes that the graph returns."""
        return _output_names(self.graph.graph)

    @property
    def named_inputs(self) -> dict[str, Any]:
        """The inputs by the names of their placeholders."""
        return dict(zip((node.name for node in placeholders(self.graph.graph)), self.inputs, strict=True))

    @cached_property
    def values(self) -> dict[str, Any]:
        """The value of each input and node in a seeded eager run, by name, before any later node wrote to it.

        Inputs are the subject's own objects; values of nodes are copies that can be inputs (`as_inputs`). The run uses
        copies of the inputs. An error of the graph is raised.
        """
        values: dict[str, Any] = {}

        class ValueInterpreter(Interpreter):
            def run_node(self, n: Node) -> Any:
                value = super().run_node(n)
                if n.op not in ("placeholder", "output"):
                    values[n.name] = as_inputs(value)
                return value

        with runtime.preserved(), stances.eager_here(), torch.enable_grad():
            runtime.seed_everything(0)
            interpreter = ValueInterpreter(self.graph, garbage_collect_values=True)
            interpreter.extra_traceback = False
            interpreter.run(*copy_together(self.inputs, name="the inputs"), enable_io_processing=False)
        return {**self.named_inputs, **values}

    @cached_property
    def key(self) -> str:
        """A hash of the graph and its inputs, which is the same for equal subjects in every process.

        Names of nodes, `drawn`, `origin`, attributes of the graph module and the devices of inputs do not count.
        """
        names: dict[Node, str] = {}

        def canonical(value: Any) -> str:
            return repr(map_arg(value, lambda node: _UnquotedText(names[node])))

        digest = hashlib.sha256()
        for index, node in enumerate(self.graph.graph.nodes):
            target = "" if node.op in ("placeholder", "output") else _name_target(node)
            names[node] = f"%{index}"
            digest.update(f"{node.op} {target} {canonical((node.args, node.kwargs))}\n".encode())
        for value in self.inputs:
            _add_to_digest(value, digest)
        return digest.hexdigest()

    def write(self, directory: Any) -> None:
        """Write graph and inputs to `graph.json` and `inputs.json` in a directory that exists; nothing is pickled.

        `drawn` and `origin` are not written.
        """
        write_graph(self.graph, directory / "graph.json")
        write_values(self.inputs, directory / "inputs.json")

    @classmethod
    def read(cls, directory: Any, *, allow: Sequence[str] = ()) -> Subject:
        """Return the subject that `write` wrote, without `drawn` and `origin`; ReportUnreadable if a file is damaged.

        `allow` names the modules whose functions it may call.
        """
        graph = read_graph(directory / "graph.json", allow=allow)
        return cls(graph=graph, inputs=tuple(read_values(directory / "inputs.json", allow=allow)))


def rebuild(
    source: GraphModule,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    cut: Mapping[str, Any] | None = None,
    instead: Mapping[str, Any] | None = None,
    dropped: frozenset[str] = frozenset(),
) -> Subject:
    """Return a subject of the outputs, the nodes that have an effect, and all that these need; keep `source` unchanged.

    The nodes named in `inputs`, which are all placeholders and maybe constants, become inputs of these values, as far
    as they are needed. A node in `cut` becomes an input of that value for its readers; if it is an output itself, it is
    also computed. `instead` replaces a node by another one, as a `Name`, or by a literal, also in the outputs; a
    literal is not returned. Nodes in `dropped` or `instead` are not kept for their effect alone. The result has neither
    `drawn` nor `origin`.
    """
    ordered = list(source.graph.nodes)
    cut, other = cut or {}, instead or {}

    def resolve(name: str) -> Any:
        """Return the `Name` or literal at the end of a node's replacements; its own `Name` if it is not replaced."""
        while name in other:
            if not isinstance(other[name], Name):
                return other[name]
            name = other[name].name
        return Name(name)

    # a node that writes, draws or asserts stays although its result is not needed, until an edit drops it
    effects = [node.name for node in ordered if _has_effect(node) and node.name not in dropped | other.keys()]
    returned = [each.name for each in map(resolve, outputs) if isinstance(each, Name)]
    needed, read_cut = _find_needed({node.name: node for node in ordered}, [*returned, *effects], inputs, cut, resolve)
    graph = Graph()
    copies: dict[str, Node] = {}
    new_inputs: dict[str, Node] = {}
    taken = {node.name for node in ordered}
    for node in ordered:
        if node.name in inputs and node.name in needed:
            copies[node.name] = new_inputs[node.name] = graph.placeholder(node.name)
        elif node.name in read_cut:
            new_name = _take_free_name(node.name, taken) if node.name in needed else node.name
            new_inputs[node.name] = graph.placeholder(new_name)
        if node.name in new_inputs:
            new_inputs[node.name].meta = _provenance(node)

    def read(node: Node) -> Any:
        name = resolve(node.name)
        return new_inputs.get(name.name, copies.get(name.name)) if isinstance(name, Name) else name

    for node in ordered:
        if node.name in needed and node.name not in inputs:
            copies[node.name] = graph.create_node(
                node.op, node.target, *map_arg((node.args, node.kwargs), read), name=node.name, type_expr=node.type
            )
            copies[node.name].meta = dict(node.meta)
    graph.output(tuple(copies[name] for name in dict.fromkeys(returned)))
    values = [inputs[name] if name in inputs else cut[name] for name in new_inputs]
    return Subject(graph=GraphModule(source, graph), inputs=tuple(values))


@dataclass(frozen=True)
class Name:
    """A node by its name, to tell it from a literal."""

    name: str


def placeholders(graph: Graph) -> list[Node]:
    """Return the placeholders of a graph in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def as_inputs(value: Any) -> Any:
    """Return a copy of a value that can be an input instead: tensors become leaves with the same memory layout.

    They keep `requires_grad`. Tuples and lists are copied item by item; subclasses of them and all other values are
    returned themselves, not copied.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(as_inputs(item) for item in value) if type(value) in (tuple, list) else value
    if not isinstance(value, torch.Tensor):
        return value
    copied: torch.Tensor = copy_together(value.detach(), name="a value")
    return copied.requires_grad_(value.requires_grad)


def _take_free_name(name: str, taken: set[str]) -> str:
    """Return `name`, with `_given` behind it as often as needed until it is not in `taken`, and add it to `taken`."""
    while name in taken:
        name += "_given"
    taken.add(name)
    return name


def _find_needed(
    by_name: Mapping[str, Node],
    wanted: Sequence[str],
    inputs: Mapping[str, Any],
    cut: Mapping[str, Any],
    resolve: Callable[[str], Any],
) -> tuple[set[str], set[str]]:
    """Return the names of the nodes that the wanted ones need, themselves included, and of the cut nodes they read.

    A node in `cut` is needed only if it is wanted. The search ends at nodes in `inputs`. `resolve` returns the `Name`
    or the literal that replaces a node, or its own `Name`; a literal needs nothing.
    """
    needed: set[str] = set()
    read_cut: set[str] = set()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in inputs:
            continue
        for each in map(resolve, (source.name for source in by_name[name].all_input_nodes)):
            if isinstance(each, Name):
                (read_cut.add if each.name in cut else waiting.append)(each.name)
    return needed, read_cut


def _has_effect(node: Node) -> bool:
    """Tell whether a node does more than return a value: it writes, draws, asserts, sets a mode, or calls a module.

    False for placeholders, attributes and the output.
    """
    return node.op not in ("placeholder", "output", "get_attr") and has_effect(node)


def _is_constant(node: Node, graph_module: GraphModule) -> bool:
    """Tell whether a node reads an attribute of the graph module that is a tensor."""
    return node.op == "get_attr" and isinstance(graphs.attribute(graph_module, str(node.target)), torch.Tensor)


def _output_names(graph: Graph) -> tuple[str, ...]:
    """Return the names of the nodes that a graph returns, each once, in order; literals have none."""
    names: dict[str, None] = {}
    map_arg(graph.output_node().args, lambda node: names.setdefault(node.name, None))
    return tuple(names)


def _provenance(node: Node) -> dict[str, Any]:
    """Return the metadata of a node that says where in the user's code it comes from: stack trace and module stack."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _name_target(node: Node) -> str:
    """Return the name of a node's target without its address, which differs between processes."""
    name = getattr(node.target, "__qualname__", None)
    return f"{getattr(node.target, '__module__', '')}.{name}" if name else str(node.target)


class _UnquotedText(str):
    """Text whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _add_to_digest(value: Any, digest: Any) -> None:
    """Add a value to a hash: the repr of a non-tensor; of a tensor shape, strides, dtype, `requires_grad`, elements.

    The elements of a tensor without a plain buffer, such as a sparse one, are left out.
    """
    if not isinstance(value, torch.Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(repr((tuple(value.shape), value.stride(), value.dtype, value.requires_grad)).encode())
    if tensors.has_own_buffer(value):
        flat = value.detach().contiguous().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
