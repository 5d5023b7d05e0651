"""Run an FX graph node by node, and call back before a node may write to memory and after each value.

Used to record a graph's run (`ObservingInterpreter`): a value that will be overwritten can be copied in time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx._pytree import tree_flatten_spec
from torch.utils._pytree import tree_leaves

from torchdelta._torch.graphs.nodes import WRITING_OPERATORS, is_inplace, updates_statistics
from torchdelta.errors import UsageError

_PURE_MODULES = ("torch", "_operator", "operator", "builtins", "math")


class ObservingInterpreter(Interpreter):
    """Interprets a graph, and calls `before_write` before each node runs, and `after_node` after it.

    The first gets the tensors that the node may write to, the second the node's name and value. The graphs that the
    interpreted one calls and the branch that a `cond` takes are interpreted too, with the name of their graph as a
    prefix. Other operators that run graphs inside, which are not observed, are added to `unlogged` by node name.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        *,
        before_write: Callable[[list[torch.Tensor]], None],
        after_node: Callable[[str, Any], None],
        unlogged: dict[str, str],
        prefix: str = "",
    ) -> None:
        """Prepare to interpret the graph; nothing runs yet.

        `before_write` gets the tensors that a node may write to, before it runs, and `after_node` a node's name and
        value. Operators whose inner graphs are not observed are added to `unlogged`, by the name of their node. Names
        start with `prefix`.
        """
        super().__init__(graph_module, garbage_collect_values=True)
        self.before_write = before_write
        self.after_node = after_node
        self.unlogged = unlogged
        self.prefix = prefix
        self.at = ""
        """The name of the node that runs."""
        self.extra_traceback = False

    def run_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph on the arguments of a call of its module, and return what the call would.

        Raise UsageError if the graph does not take these arguments.
        """
        flat = flat_inputs(self.module, args, kwargs)  # type: ignore[arg-type]
        return self.graph.process_outputs(self.run(*flat, enable_io_processing=False))

    def run_node(self, n: Node) -> Any:
        """Run one node, with `before_write` before and `after_node` after it, and return its value.

        Placeholders and outputs have neither callback, and a node whose value is a module only the first. A graph
        module that the node calls (except export's `_guards_fn`), and the branch that a `cond` takes, are interpreted
        too. Other higher-order operators with graphs as arguments are added to `unlogged`. `at` is set to the node's
        name with the prefix.
        """
        self.at = self.prefix + n.name
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.before_write(self._may_write(n, args, kwargs))
        called = self.fetch_attr(str(n.target)) if n.op == "call_module" and n.target != "_guards_fn" else None
        if isinstance(called, GraphModule):
            value = self._run_inner(called, n.target, lambda inner: inner.run_on(args, kwargs))
        elif n.target is torch.ops.higher_order.cond and all(isinstance(arg, GraphModule) for arg in args[1:3]):
            value = self._run_branch(n, *args, **kwargs)
        else:
            if isinstance(n.target, HigherOrderOperator) and any(isinstance(arg, GraphModule) for arg in args):
                self.unlogged[self.prefix + n.name] = str(n.target)
            value = super().run_node(n)
        if not isinstance(value, torch.nn.Module):
            self.after_node(self.prefix + n.name, value)
        return value

    def _run_branch(
        self, node: Node, predicate: Any, if_true: GraphModule, if_false: GraphModule, operands: Any = ()
    ) -> Any:
        """Interpret the branch that a `cond` takes, and return its value.

        `node` is the node of the `cond`; the others are the values of its arguments.
        """
        place, branch = (1, if_true) if bool(predicate) else (2, if_false)
        source = node.args[place]
        assert isinstance(source, Node)
        return self._run_inner(branch, source.target, lambda inner: inner.run(*operands, enable_io_processing=False))

    def _run_inner(self, graph_module: GraphModule, target: Any, run: Callable[[ObservingInterpreter], Any]) -> Any:
        """Run a graph inside of this one with an interpreter of its own, with the same callbacks, and return its value.

        `target`, the name of the inner graph, is added to the prefix of names. `run` starts the new interpreter. If
        that raises, `at` becomes the name of the inner node that raised.
        """
        prefix = f"{self.prefix}{target}."
        inner = ObservingInterpreter(
            graph_module,
            before_write=self.before_write,
            after_node=self.after_node,
            unlogged=self.unlogged,
            prefix=prefix,
        )
        try:
            return run(inner)
        except Exception:
            self.at = inner.at
            raise

    def _may_write(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a node may write to; `args` and `kwargs` are the values of its arguments.

        An operator writes to what its schema says, and one that `updates_statistics` accepts to all inputs but the
        first. A module may write to its parameters and buffers, and unless it is one of torch.nn's without `inplace`,
        to its inputs. A `get_attr` node has none, and neither has a method, or a function of torch or Python, whose
        name and arguments do not say that it writes. Any other call may write to all its inputs.
        """
        if node.op == "get_attr":
            return []
        target: Any = node.target
        if isinstance(target, OpOverload) and updates_statistics(str(target)):
            return list(_tensors((args[1:], kwargs)))
        if isinstance(target, OpOverload):
            return list(_tensors(_written_by_schema(target, args, kwargs)))
        if node.op == "call_module":
            module = self.fetch_attr(target)
            state = [*module.parameters(), *module.buffers()]
            is_plain = type(module).__module__.startswith("torch.nn.") and not getattr(module, "inplace", False)
            return state if is_plain else [*state, *_tensors((args, kwargs))]
        name = str(target) if node.op == "call_method" else getattr(target, "__name__", "")
        is_known = node.op == "call_method" or _is_of_torch(target)
        says_so = name.endswith("_") and not name.endswith("__")
        says_so |= target in WRITING_OPERATORS or name == "__setitem__" or "out" in kwargs
        says_so |= updates_statistics(name) or is_inplace(target, args, kwargs)
        if is_known and not says_so and name != "cond":
            return []
        return list(_tensors((args, kwargs)))


def as_graph_module(graph: Any) -> GraphModule:
    """Return a graph module as it is, or a new graph module of an exported program; UsageError for anything else."""
    if isinstance(graph, ExportedProgram):
        module = graph.module()
        assert isinstance(module, GraphModule)
        return module
    if isinstance(graph, GraphModule):
        return graph
    raise UsageError(
        f"a graph is a torch.fx.GraphModule or a torch.export.ExportedProgram, and this is a {type(graph).__name__}: "
        "trace or export it first"
    )


def flat_inputs(graph_module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the value of each placeholder, in order, for a call of the graph module with these arguments.

    Defaults are filled in. The structures of an exported graph are flattened in the order of its placeholders. Raise
    UsageError if the arguments do not fit the signature of `forward`.
    """
    try:
        bound = inspect.signature(graph_module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"the graph does not take this batch: {error}") from error
    bound.apply_defaults()
    spec = getattr(graph_module, "_in_spec", None)
    if spec is None:
        return [*bound.args, *bound.kwargs.values()]
    values = list(bound.arguments.values())
    positional, named = spec.child(0), spec.child(1)
    count = positional.num_children
    by_name = dict(zip(named.context or [], values[count:], strict=True))
    return tree_flatten_spec((values[:count], by_name), spec)


def _written_by_schema(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of the arguments that an operator's schema declares as written to; None for one left out."""
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield kwargs[argument.name] if argument.name in kwargs else args[index] if index < len(args) else None


def _is_of_torch(target: Any) -> bool:
    """Tell whether a function is defined in torch, `operator`, `builtins` or `math`: its name then says if it writes.

    Builtins without a module and operator packets count too; higher-order operators do not.
    """
    module = getattr(target, "__module__", None)
    if module is None:  # torch's builtins and operator packets have no module
        return isinstance(target, torch._ops.OpOverloadPacket) or type(target).__name__.startswith("builtin")
    return str(module).split(".")[0] in _PURE_MODULES and not isinstance(target, HigherOrderOperator)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested values, or in the values that an iterator yields."""
    items = list(values) if isinstance(values, Iterator) else values
    for leaf in tree_leaves(items):
        if isinstance(leaf, torch.Tensor):
            yield leaf
