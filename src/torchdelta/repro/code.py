"""A graph as Python code to read: a function of its inputs, or a module if the graph has parameters of its own.

`write_program` writes the whole; below it come the statements of a graph (`_Body`), the expression of one node
(`write_call`), the call that builds a module of torch.nn (`write_module`), and short names (`Names`): `x` and `weight`
where a tracer wrote `arg0_1` and `L_self_modules_…_weight_`.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchdelta._torch.graphs import nodes
from torchdelta._torch.graphs.graphs import attribute
from torchdelta._torch.operators.lookup import is_operator, registered_by
from torchdelta._torch.process import runtime
from torchdelta.errors import ReproUnwritable
from torchdelta.records.printable import printable
from torchdelta.repro.values import Refer, attribute_path, write_callable, write_index, write_value

INDENT = "    "
_GUARDS = "_guards_fn"
"""The submodule in which export puts its assertions about the inputs."""


@dataclass(kw_only=True)
class ProgramSource:
    """The source text of a script's program, and the tensors and modules that it needs."""

    inputs: list[str] = field(default_factory=list)
    """Names of the inputs, in their order."""
    body: list[str] = field(default_factory=list)
    """The statements of the function, one a line."""
    imports: set[str] = field(default_factory=set)
    """Modules that the script has to import."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The program's own parameters, buffers and constants, by their names in the script."""
    paths: dict[str, str] = field(default_factory=dict)
    """The name in the script of each tensor and module, by its path in the graph module."""
    modules: dict[str, str] = field(default_factory=dict)
    """The expression that builds each module that the program calls, by its name in the script.

    Modules that only hold others come first, if paths are kept.
    """

    @property
    def is_module(self) -> bool:
        """Whether the program has tensors or modules of its own, and so is written as a module."""
        return bool(self.tensors or self.modules)


def write_program(
    graph_module: GraphModule, inputs: tuple[Any, ...], imports: tuple[str, ...] = (), *, keeps_names: bool = False
) -> ProgramSource:
    """Return the source text of a graph as a program; raise ReproUnwritable if a node or a called module has no code.

    `inputs` has one value for each placeholder, in order; they only help to choose names. The graph's tensors are
    returned themselves, in `tensors` of the result. `imports` are modules that the script imports in any case. With
    `keeps_names`, inputs have the names of their placeholders as far as these are free, and tensors and modules have
    their paths: dynamo makes the names that a pass is given from them.
    """
    source = ProgramSource(imports=set(imports))
    names = Names()
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    input_names = {
        node: names.choose((str(node.target),) if keeps_names else wishes_for_input(node, value))
        for node, value in zip(placeholders, inputs, strict=True)
    }
    source.inputs = list(input_names.values())
    _name_tensors_and_modules(graph_module, source, keeps_names=keeps_names)
    source.body = list(_Body(graph_module, source, names, "", input_names).lines())
    return source


def _name_tensors_and_modules(graph_module: GraphModule, source: ProgramSource, *, keeps_names: bool) -> None:
    """Add the tensors that the graph reads and the modules that it calls to `source`, under new names or their paths.

    Parameters and buffers of a called module are added under its name (`linear.weight`). A tensor that is read at
    several paths is added once. Inner graphs are searched too, but get no name, because they become functions; other
    attributes are skipped. With `keeps_names`, the modules above these paths are added too (`_holders`). Raise
    ReproUnwritable if a called module cannot be built, or if a part of a path is neither a name nor a number.
    """
    names = Names()
    known: dict[int, str] = {}
    targets = [str(node.target) for _, node, owner in _reads(graph_module, "") if owner is graph_module]
    for target in targets if keeps_names else ():
        _require_names(target)
    source.modules.update(_holders(targets) if keeps_names else {})

    def name_of(target: str) -> str:
        if not keeps_names:
            return names.choose(wishes_for_path(target))
        _require_names(target)
        return attribute_path("", target).lstrip(".")

    for path, node, owner in _reads(graph_module, ""):
        target = str(node.target)
        value = attribute(owner, target)
        if id(value) in known:
            source.paths[path] = known[id(value)]
            continue
        if isinstance(value, GraphModule):
            continue
        if isinstance(value, torch.nn.Module) and node.op == "call_module":
            name = name_of(target)
            known[id(value)] = source.paths[path] = name
            source.modules[name] = write_module(value, target)
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                _require_names(inner)
                known[id(tensor)] = source.paths[f"{path}.{inner}"] = attribute_path(name, inner)
                source.tensors[attribute_path(name, inner)] = tensor
        elif isinstance(value, torch.Tensor):
            name = name_of(target)
            known[id(value)] = source.paths[path] = name
            source.tensors[name] = value


def _require_names(path: str) -> None:
    """Raise ReproUnwritable if a part of a dotted path is neither a number nor a name that code can have.

    A graph that was read from a file may have any text there, and a script must not run it.
    """
    for part in path.split("."):
        if not part.isdigit() and (not part.isidentifier() or keyword.iskeyword(part)):
            raise ReproUnwritable(f"{part!r} of {path!r} is not a name in Python: give it another name")


def _holders(targets: Sequence[str]) -> dict[str, str]:
    """Return expressions that build the modules above these paths, by name, outer ones first.

    Each is a `Sequential` with as many empty parts as the numbers in the paths need.
    """
    holders = dict.fromkeys(
        ".".join(parts[:depth]) for parts in (target.split(".") for target in targets) for depth in range(1, len(parts))
    )
    expressions: dict[str, str] = {}
    for holder in sorted(holders, key=lambda path: path.count(".")):
        inner = [
            target.removeprefix(f"{holder}.").split(".")[0] for target in targets if target.startswith(f"{holder}.")
        ]
        count = max((int(part) + 1 for part in inner if part.isdigit()), default=0)
        empty = ", ".join(["torch.nn.Sequential()"] * count)
        expressions[attribute_path("", holder).lstrip(".")] = f"torch.nn.Sequential({empty})"
    return expressions


def _reads(graph_module: GraphModule, prefix: str) -> Iterator[tuple[str, Node, GraphModule]]:
    """Yield (path, node, owning graph) for every `call_module` node, and then for every `get_attr` node.

    `prefix` begins each path: empty for the outermost graph, `inner.` for an inner one. A node that names an inner
    graph is followed at once by the nodes of that graph. The call of export's guards is left out.
    """
    readers = [
        node for node in graph_module.graph.nodes if node.op in ("get_attr", "call_module") and not _is_guard(node)
    ]
    for node in sorted(readers, key=lambda node: node.op):
        value = attribute(graph_module, str(node.target))
        yield f"{prefix}{node.target}", node, graph_module
        if isinstance(value, GraphModule):
            yield from _reads(value, f"{prefix}{node.target}.")


def _is_guard(node: Node) -> bool:
    """Tell whether a node is the call of export's assertions about the inputs, with a result that no node reads."""
    return node.op == "call_module" and node.target == _GUARDS and not node.users


class _Body:
    """Writes the statements of one graph."""

    def __init__(
        self, graph_module: GraphModule, source: ProgramSource, names: Names, prefix: str, inputs: Mapping[Node, str]
    ) -> None:
        """Set up the writer of one graph; `inputs` has the name of each of its placeholders.

        `prefix` is the path of an inner graph with a dot at its end, and empty for the outermost one. All graphs of a
        script share `source` and `names`, which are added to.
        """
        self.graph_module = graph_module
        self.source = source
        self.names = names
        self.prefix = prefix
        self.text: dict[Node, str] = dict(inputs)
        """The name or expression of each node that is written already."""
        self.functions: dict[str, str] = {}
        """The name of each inner graph's function, by the graph's attribute."""

    def lines(self) -> Iterator[str]:
        """Yield the statements of the graph, with a comment wherever the place in the user's code changes.

        Each inner graph is defined as a function before the first node that names it. Attributes, and a call that is
        the whole output, are written into their readers; the result of a node without readers gets no name. Raise
        ReproUnwritable, with the node's name in its message, if a node has no code.
        """
        place = ""
        body = [node for node in self.graph_module.graph.nodes if node.op != "placeholder" and not _is_guard(node)]
        inlined = _only_returned(body)
        for node in body:
            try:
                yield from self._functions_of(node)
                text = self._write(node)
            except ReproUnwritable as error:
                raise ReproUnwritable(f"{node.name} ({nodes.op_name(node)}): {error}") from error
            if node.op == "get_attr":
                self.text[node] = text
                continue
            here = place_of(node)
            if here and here != place and node.op != "output":
                place = here
                yield f"# {here}"
            if inlined is not None and node is inlined:
                self.text[node] = text
            elif node.op == "output" or not node.users or is_statement(node):
                yield text
                self.text[node] = "None"
            else:
                self.text[node] = self.names.choose((node.name,))
                yield f"{self.text[node]} = {text}"

    def _write(self, node: Node) -> str:
        """Return the code of a node: `return …` for the output, an assignment for `setitem`, else an expression.

        Modules to import are added to `source.imports`. Raise ReproUnwritable if the node has no code.
        """
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
        """Return the expression of the attribute that a `get_attr` or `call_module` node names.

        It is the name of an inner graph's function, `self.name` for a tensor or module of the program, or else the
        attribute's value as a literal. Raise ReproUnwritable if it has no literal.
        """
        target = str(node.target)
        if target in self.functions:
            return self.functions[target]
        if (known := self.source.paths.get(f"{self.prefix}{target}")) is not None:
            return f"self.{known}"
        return write_value(attribute(self.graph_module, target))

    def _functions_of(self, node: Node) -> Iterator[str]:
        """Yield the lines that define a function for the inner graph that a `get_attr` or `call_module` node names.

        The function's name is kept in `functions`. Nothing is yielded if the node names no graph, or one whose function
        is defined already.
        """
        if node.op not in ("get_attr", "call_module") or str(node.target) in self.functions:
            return
        inner = attribute(self.graph_module, str(node.target))
        if not isinstance(inner, GraphModule):
            return
        name = self.functions[str(node.target)] = self.names.choose(wishes_for_path(str(node.target)))
        inputs = {each: self.names.choose((each.name,)) for each in inner.graph.nodes if each.op == "placeholder"}
        yield f"def {name}({', '.join(inputs.values())}):"
        for line in _Body(inner, self.source, self.names, f"{self.prefix}{node.target}.", inputs).lines():
            yield f"{INDENT}{line}"

    def _refer(self, value: Any) -> str | None:
        """Return the name or expression of a node that is written already, or None if the value is not a node."""
        return self.text[value] if isinstance(value, Node) else None


def _only_returned(body: list[Node]) -> Node | None:
    """Return the node before the output if it is a call and the whole output, so that it needs no name, or else None.

    It is the whole output if the graph returns it, alone or in a tuple or list of one, and no other node reads it. An
    assignment (`setitem`) is never returned.
    """
    if len(body) < 2 or body[-1].op != "output" or body[-2].op not in ("call_function", "call_method", "call_module"):
        return None
    last, output = body[-2], body[-1].args[0]
    is_whole_output = output is last or (isinstance(output, (tuple, list)) and list(output) == [last])
    return last if is_whole_output and list(last.users) == [body[-1]] and not is_statement(last) else None


def place_of(node: Node) -> str:
    """Return where a node comes from, as text: `model.py:12 in forward, module layers.0`.

    The file is named without its folders. Parts that are unknown are left out; the text is empty if all are. The text
    is one line, with control characters as escapes, because it becomes a comment and may come from a file.
    """
    line = nodes.source_line(node)
    parts = []
    if location := re.match(r"(?P<file>.+?):(?P<line>\d+): ", line):
        where = f"{os.path.basename(location['file'])}:{location['line']}"
        frame = re.search(
            rf'File "{re.escape(location["file"])}", line {location["line"]}, in (?P<function>\S+)',
            str(node.meta.get("stack_trace")),
        )
        parts.append(f"{where} in {frame['function']}" if frame else where)
    if path := nodes.module_path(node):
        parts.append(f"module {path}")
    text = printable(", ".join(parts)).replace("\n", "\\n")
    return text.encode(errors="backslashreplace").decode()


_INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lshift: "<<", operator.rshift: ">>", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_PREFIX: dict[Any, str] = {operator.neg: "-", operator.pos: "+", operator.invert: "~", operator.not_: "not "}
_PUBLIC: dict[Any, str] = {torch.ops.higher_order.cond: "torch.cond"}
_GETATTR: tuple[Callable[..., Any], ...] = (getattr,)


def write_call(node: Node, refer: Refer, imports: set[str]) -> str:
    """Return the code of a node that calls a function or method; modules to import are added to `imports`.

    `refer` returns the name of a node that is written already, and None for any other value. Operators of Python are
    written with their signs (`x + y`, `x[i]`), `getattr` as `x.name`, and `setitem` as an assignment. Raise
    ReproUnwritable if the function or an argument has no code.
    """

    def refer_or_import(value: Any) -> str | None:
        if (name := refer(value)) is not None:
            return name
        is_function = callable(value) and not isinstance(value, (torch.device, torch.Tensor, torch.nn.Module, type))
        return write_callable(value, imports) if is_function else None

    args = [write_value(argument, refer_or_import) for argument in node.args]
    keywords = [f"{name}={write_value(argument, refer_or_import)}" for name, argument in node.kwargs.items()]
    if node.op == "call_method":
        return f"{_operand(args[0])}.{node.target}({', '.join((*args[1:], *keywords))})"
    target = node.target
    if not keywords:
        if target in _INFIX and len(args) == 2:
            return f"{_operand(args[0])} {_INFIX[target]} {_operand(args[1])}"
        if target in _PREFIX and len(args) == 1:
            return f"{_PREFIX[target]}{_operand(args[0])}"
        if target is operator.getitem:
            return f"{_operand(args[0])}[{write_index(node.args[1], refer_or_import)}]"
        if target is operator.setitem:
            return f"{_operand(args[0])}[{write_index(node.args[1], refer_or_import)}] = {args[2]}"
        if target in _GETATTR and len(args) == 2 and isinstance(node.args[1], str) and node.args[1].isidentifier():
            return f"{_operand(args[0])}.{node.args[1]}"
    _import_registration(target, imports)
    name = _PUBLIC[target] if target in _PUBLIC else write_callable(target, imports)
    return f"{name}({', '.join((*args, *keywords))})"


def is_statement(node: Node) -> bool:
    """Tell whether a node is written as a statement, not as an expression."""
    return node.target is operator.setitem


def _import_registration(target: Any, imports: set[str]) -> None:
    """Add the module that registers an operator to `imports`; add nothing for torch's own operators and for functions.

    If the module is unknown, nothing is added, because one of the `imports` is taken to register the operator; raise
    ReproUnwritable if there are none.
    """
    try:
        module = registered_by(target)
    except LookupError as error:
        if not imports:
            raise ReproUnwritable(f"{error}: name its module in the finding's imports") from error
        return
    if module is not None:
        imports.add(module)


def _operand(text: str) -> str:
    """Return the text of an operand, in parentheses if it begins with a minus or has a space before any parenthesis."""
    return f"({text})" if text.startswith("-") or " " in text.split("(")[0] else text


def write_module(module: nn.Module, name: str) -> str:
    """Return an expression that builds a module of the same class and settings, with new parameters and buffers.

    It is the module's repr, which is tried here; a `Sequential` is built from its parts. `.eval()` is added if the
    module is not in training mode. `name` is for messages. Raise ReproUnwritable if the module or a part is not of
    torch.nn, or its repr does not say all that it was built with.
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind:
        raise ReproUnwritable(
            f"the graph calls {name}, a {kind.__module__}.{kind.__qualname__}, which no script of torch alone can "
            "build: trace through it"
        )
    if kind is nn.Sequential:
        parts = ", ".join(write_module(part, f"{name}.{step}") for step, part in module.named_children())
        text = f"torch.nn.Sequential({parts})"
    else:
        text = f"torch.nn.{module!r}"
        if not _builds(text, module):
            raise ReproUnwritable(f"the graph calls {name}, and {module!r} does not say all that it was built with")
    return text if module.training else f"{text}.eval()"


def _builds(text: str, module: nn.Module) -> bool:
    """Tell whether an expression builds a module with the same class, repr and `_traits`; False if it raises.

    Only a call with literal arguments is evaluated. Torch's random generators are left as they were.
    """
    if not _is_literal_call(text):
        return False
    try:
        with runtime.drawing_from():
            built = eval(text, {"torch": torch})
    except Exception:
        return False
    return type(built) is type(module) and repr(built) == repr(module) and _traits(built) == _traits(module)


def _is_literal_call(text: str) -> bool:
    """Tell whether a text is `torch.nn.Name(…)` with literals alone as arguments.

    The repr of a module has its attributes as they are, and those of a graph that was read may be any text.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not re.fullmatch(r"torch\.nn\.\w+", ast.unparse(call.func)):
            return False
        for argument in (*call.args, *(each.value for each in call.keywords)):
            ast.literal_eval(argument)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _traits(module: nn.Module) -> tuple[Any, ...]:
    """Return the traits to compare modules by: shapes of parameters and buffers, and plain public attributes, by name.

    Plain attributes are numbers, texts, tuples and None; `training` is left out.
    """
    state = {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    plain = (bool, int, float, str, tuple, type(None))
    settings = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "training"
    }
    return state, settings


RESERVED = frozenset(
    {
        *("torch", "sys", "math", "operator", "subprocess", "signal", "resource", "importlib", "pathlib", "program"),
        *("Program", "inputs", "run", "main", "self", "transformed", "saved", "memory", "cotangent", "structure"),
        *("args", "autocast", "call", "cast", "decomposed", "exported", "given", "outputs", "transform"),
        *("built", "inspect", "kwargs", "leaves", "raised_by", "state", "zlib"),
    }
)
"""Names that the rest of a script uses."""
_ANONYMOUS = re.compile(r"^(arg|primals_|tangents_|args_|input_|inputs_)\d+(_\d+)?$")
_LOCAL = re.compile(r"^(?:[LG]_+)+")
_OWNER = re.compile(r"_(?:parameters|buffers|modules)_")
_ROLES = {"self": "x", "input": "x", "other": "y", "mat1": "x", "mat2": "weight", "tensor": "x", "grad_output": "grad"}
_PLAIN = ("x", "y", "z", "u", "v", "w")


class Names:
    """Chooses names that are neither taken, reserved, keywords nor builtins."""

    def __init__(self) -> None:
        self._taken: set[str] = set(RESERVED)

    def choose(self, wishes: Iterable[str]) -> str:
        """Return the first wish that is free, or the last one with a number (`x_1`), and mark it as taken.

        Wishes are turned into identifiers first. Without any wish, `value_1` and so on are tried.
        """
        wish = "value"
        for raw in wishes:
            wish = _identifier(raw)
            if self._is_free(wish):
                self._taken.add(wish)
                return wish
        number = 1
        while not self._is_free(f"{wish}_{number}"):
            number += 1
        self._taken.add(f"{wish}_{number}")
        return f"{wish}_{number}"

    def _is_free(self, name: str) -> bool:
        """Tell whether a name is not taken, reserved, a keyword or a builtin other than `input`."""
        # `input` is allowed, because a graph never reads from the terminal
        is_built_in = hasattr(builtins, name) and name != "input"
        return name not in self._taken and not keyword.iskeyword(name) and not is_built_in


def wishes_for_input(node: Node, value: Any) -> Iterator[str]:
    """Yield names for a placeholder, the best first; `value` is its input.

    For a tensor that a tracer named (`arg0_1`), names of operators' arguments that it is passed as, and `x`, `y`, …
    come first; for a symbolic size (`s0`), `size`. The names that `wishes_for_path` makes of its own name come last.
    """
    # the reducer adds this suffix to a node that it turns into an input
    target = str(node.target).removesuffix("_given")
    if not isinstance(value, torch.Tensor):
        yield from ("size",) if type(value) is int and re.fullmatch(r"(s|u)\d+", target) else ()
    elif _ANONYMOUS.match(target):
        yield from _roles(node)
        yield from _PLAIN
    yield from wishes_for_path(target)


def wishes_for_path(path: str) -> Iterator[str]:
    """Yield names for a dotted path or a tracer's name, short ones first: `weight`, `mlp_weight`, … for `h.mlp.weight`.

    Names that begin with a digit and dynamo's prefixes (`L_self_modules_`) are left out. The last name is the whole
    path in any case, or `value` if nothing is left of it.
    """
    owners = _OWNER.split(_LOCAL.sub("", path).removeprefix("l_"))
    parts = [part for part in ".".join(owners[1:] or owners).strip("_").split(".") if part.strip("_")]
    for count in range(1, len(parts) + 1):
        name = "_".join(part.strip("_") for part in parts[-count:])
        if not name[:1].isdigit():
            yield name
    yield "_".join(parts) or "value"


def _roles(node: Node) -> Iterator[str]:
    """Yield the schema's name of each operator argument that is this placeholder, or its short form in `_ROLES`."""
    for user in node.users:
        if is_operator(user.target):
            for name, value in nodes.arguments(user).items():
                if value is node:
                    yield _ROLES.get(name, name)


def _identifier(raw: str) -> str:
    """Return a text as an identifier: other characters become underscores, and none is left at its ends.

    `value` if nothing is left; an underscore is put before a digit at the beginning.
    """
    name = re.sub(r"\W+", "_", raw).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() else name
