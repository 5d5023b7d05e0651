"""Which calls of a graph only compute? A graph that someone else wrote may call no others, unless the user trusts it.

Torch has functions that start programs, run text as code, or write files (`torch.utils.collect_env`, the caches of
inductor, `torch.from_file`), and so have most packages. So what computes is listed here, and all else is refused:
operators, the functions and methods of tensors, `torch.nn.functional` and its neighbours, the arithmetic of Python, and
functions that a package declared fit for graphs (`torch.compiler.allow_in_graph`).

A graph could also reach a function through an attribute, as in `x.numpy().tofile(path)`. So methods and attributes are
those of tensors and of plain values, without the ones that lead out of them. And a graph that takes or returns pytrees
builds them by calling their classes. Start with `find_other_calls`.
"""

from __future__ import annotations

import collections
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._pytree import TreeSpec

from torchdelta._torch.graphs.targets import BUILTINS, home_of, is_within

_MODULES = (
    *("torch.nn.functional", "torch.nn.modules", "torch.nn.init", "torch.nn.attention", "torch.functional"),
    *("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._sparse", "torch._C._nested"),
    *("torch._C._functorch", "torch._functorch.predispatch", "torch._functorch.vmap", "torch._functorch.apis"),
    *("torch._functorch.eager_transforms", "torch._functorch.pyfunctorch", "torch._functorch.autograd_function"),
    *("torch._higher_order_ops", "torch._refs", "torch._prims", "torch._prims_common", "torch._decomp"),
    *("torch._lowrank", "torch._lobpcg", "torch.amp.autocast_mode", "torch.autograd.function", "torch.return_types"),
    *("torch.autograd.forward_ad", "torch.nested._internal.nested_tensor"),
    *("torch.autograd.grad_mode", "torch.utils.checkpoint", "torch.random", "torch.sparse", "torch.masked"),
    *("torch.distributed._functional_collectives", "torch.fx.experimental.symbolic_shapes"),
    *("torch.ao.nn", "torch.ao.quantization.fake_quantize", "torch.ao.quantization.observer", "math"),
)
"""Modules whose functions compute, or set a mode that holds while the graph runs; those inside of them too."""
_PACKAGES = ("torch.autograd", "torch.nested")
"""Packages of which only their own functions count, and not their modules, such as `torch.autograd.profiler`."""
_OTHER_MODULES = (
    *("torch.nn.attention._fa3", "torch.nn.attention._fa4", "torch.sparse._triton_ops_meta"),
    *("torch._higher_order_ops.invoke_leaf_function", "torch._higher_order_ops.torchbind"),
    *("torch._higher_order_ops.triton_kernel_wrap",),
)
"""Modules inside of `_MODULES` whose functions import modules, run text, write files, or call methods by name."""
_PUBLIC_MODULES = (
    *("torch.utils.checkpoint", "torch.fx.experimental.symbolic_shapes", "torch.random"),
    *("torch._higher_order_ops", "torch._prims", "torch._prims_common", "torch._refs", "torch.ao", "torch.masked"),
)
"""Modules of which functions with an underscore in front do not count: some return a module or operator by its name."""
_LOOKUPS = ("get_aten_op",)
"""Public functions of these modules that return an operator by its name."""
_TYPES = (
    *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
    *(torch.Tensor, torch.nn.Parameter, torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool),
)
_FUNCTIONS = (
    *("_assert", "_check", "cond", "is_tensor", "typename", "while_loop", "vmap"),
    *("autocast_increment_nesting", "autocast_decrement_nesting", "clear_autocast_cache", "is_autocast_enabled"),
    *("set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled", "is_autocast_cache_enabled"),
    *("_set_grad_enabled", "_set_fwd_grad_enabled", "is_grad_enabled", "is_inference_mode_enabled"),
    "get_default_dtype",
)
"""Functions of `torch` and `torch._C` themselves that compute or set such a mode, besides those on tensors."""
_MODES = (
    torch._C._log_api_usage_once,
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
    getattr(torch._C._autograd, "_get_data_attr", None),
)
"""Functions that dynamo puts into graphs, and that do no harm; the last one reads `x.data`."""
_STARTS = ("sym_", "_sym_", "_check_", "_constrain_as_")
_FILES = ("from_file", "save", "load_tensor")
"""Names of operators and functions that read or write a file."""
_CALLERS = ("call", "methodcaller", "attrgetter", "itemgetter")
"""Functions of `operator` that call, or look up, what is only known when they run."""
_LEAVES_TENSORS = frozenset(
    {
        *("numpy", "storage", "untyped_storage", "_typed_storage", "_reduce_ex_internal", "module_load", "dlpack"),
        *("apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "share_memory_"),
    }
)
"""Methods of tensors that give another object than a tensor or a number, or that call a function of Python."""
_SPECIAL = ("__len__", "__bool__", "__int__", "__float__", "__complex__", "__iter__", "__reversed__", "__hash__")
"""Methods with two underscores that only compute, besides those that `operator` has too."""
_PLAIN = (torch.Tensor, torch.Size, torch.Generator, tuple, list, dict, set, str, int, float, complex, slice)
_FIELDS = ("type", "index", "start", "stop", "step", "values", "indices", "itemsize", "max", "min", "eps", "tiny")
"""Attributes of devices, slices, dtypes and named results."""
_TREES = (
    tuple,
    list,
    dict,
    collections.OrderedDict,
    collections.deque,
    collections.defaultdict,
    collections.namedtuple,
)
"""Structures of which torch builds a pytree; it calls what the context of the last two has."""
_NOT_CALLED = (Node, torch.nn.Module, torch.Tensor, torch.device, weakref.ref)
"""Callable values that are looked at elsewhere, or that run no code of others."""
_OWN = frozenset(vars(torch.nn.Module()))
"""The attributes that torch itself keeps in every module."""


def find_other_calls(graph_module: GraphModule, may_call: Callable[[Any], bool] = lambda _: False) -> Iterator[str]:
    """Yield in words each call of a graph, and of the graphs in it, that may do more than compute.

    `may_call` tells whether the user trusts a function or a class of modules that is not known to compute. Functions
    count even if they are only arguments, attributes of a module that the graph calls, or what builds a structure that
    a graph takes or returns.
    """

    def is_fine(value: Any) -> bool:
        return is_computation(value) or may_call(value)

    for path, module in graph_module.named_modules():
        where = f"{path}." if path else ""
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                yield from (f"{where}{node.name} {words}" for words in _other_calls(module, node, is_fine))
            for each in _callables(_trees(module.graph)):
                if not is_fine(each):
                    yield f"{path or 'the graph'} takes or returns a structure, and calls {_named(each)}"
            continue
        if not is_fine(type(module)):
            yield f"{where.rstrip('.')} is a module of {_named(type(module))}"
        own = {name: value for name, value in vars(module).items() if name not in _OWN}
        yield from (f"{where}{each} is an attribute of a module" for each in _callables(own) if not is_fine(each))


def is_computation(target: Any) -> bool:
    """Tell whether a callable only computes: it runs no code from elsewhere and opens no file.

    `getattr` does not count: it depends on its arguments.
    """
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, OpOverload) else target
        return packet._qualified_op_name.partition("::")[2] not in _FILES
    if isinstance(target, HigherOrderOperator):
        return True
    home, name = home_of(target), str(getattr(target, "__name__", ""))
    if home == "builtins" and not isinstance(target, (types.WrapperDescriptorType, types.MethodDescriptorType)):
        return name in BUILTINS and name != "getattr"
    if home in ("operator", "_operator"):
        return name not in _CALLERS
    if any(target is known for known in (*_TYPES, *_MODES)):
        return True
    if home in ("torch._tensor", "torch._C") and getattr(torch.Tensor, name, None) is not None:
        return is_method(name)
    if home in ("torch", "torch._C", "torch._VF", "torch._jit_internal", None):
        return _is_torchs_computation(target, name)
    if home in _PACKAGES or any(is_within(str(home), module) for module in _MODULES):
        return _is_own_function(target, str(home), name)
    return trace_rules.is_callable_allowed(target)


def _is_torchs_computation(target: Any, name: str) -> bool:
    """Tell whether a function of torch's own namespace computes: one on tensors, of sizes, or one of `_FUNCTIONS`."""
    if name in _FILES or isinstance(target, (types.MethodType, type)):
        return False
    if getattr(torch._C._VariableFunctions, name, None) == target or vars(torch.nn.functional).get(name) is target:
        return True
    dispatchers = [value for key, value in vars(torch.nn.functional).items() if not key.startswith("_")]
    is_dispatcher = home_of(target) == "torch._jit_internal" and any(value is target for value in dispatchers)
    is_own = home_of(target) in ("torch", "torch._C")
    return is_dispatcher or (is_own and (name in _FUNCTIONS or name.startswith(_STARTS)))


def _is_own_function(target: Any, home: str, name: str) -> bool:
    """Tell whether a callable of `home`, one of `_MODULES`, computes: a class, or a function at the top of the module.

    Methods do not count, because some run text, such as `ShapeEnv.evaluate_symexpr` of torch's symbolic shapes.
    """
    if isinstance(target, type):
        return True
    if name.startswith("__") or name in _LOOKUPS or any(is_within(home, module) for module in _OTHER_MODULES):
        return False
    if name.startswith("_") and any(is_within(home, module) for module in _PUBLIC_MODULES):
        return False
    # `torch.manual_seed` is another object than the function of its own module
    return any(value is target for module in (home, "torch") for value in vars(sys.modules[module]).values())


def is_method(name: str) -> bool:
    """Tell whether a method of this name, of a tensor or a plain value, only computes.

    Of the names with two underscores, these are those of Python's operators, and `_SPECIAL`.
    """
    if name in _LEAVES_TENSORS or name == "__call__":
        return False
    if name.startswith("__"):
        plain = name.replace("__r", "__", 1)
        return name in _SPECIAL or hasattr(operator, name) or hasattr(operator, plain) or plain == "__div__"
    return any(hasattr(kind, name) for kind in _PLAIN)


def _is_attribute(name: Any) -> bool:
    """Tell whether `name` is that of a property of tensors, or of a field of a plain value; methods do not count."""
    if not isinstance(name, str) or name.startswith("_"):
        return False
    return name in _FIELDS or (hasattr(torch.Tensor, name) and not callable(getattr(torch.Tensor, name)))


def _other_calls(module: GraphModule, node: Node, is_fine: Callable[[Any], bool]) -> Iterator[str]:
    """Yield in words what a node of a module calls, or hands on to be called, that is not fine."""
    if node.op == "call_function" and node.target is getattr:
        if len(node.args) < 2 or not isinstance(node.args[0], Node) or not _is_attribute(node.args[1]):
            yield f"reads the attribute {node.args[1:2]}"
    elif node.op == "call_function" and not is_fine(node.target):
        yield f"calls {_named(node.target)}"
    elif node.op == "call_method" and not is_method(str(node.target)):
        yield f"calls the method {node.target}"
    elif node.op in ("call_module", "get_attr"):
        value: Any = module
        for step in str(node.target).split("."):
            value = getattr(value, step, None)
        is_right = isinstance(value, (torch.nn.Module, torch.Tensor)) or node.op == "get_attr"
        if not is_right or any(not is_fine(each) for each in _callables(value)):
            yield f"{'calls' if node.op == 'call_module' else 'reads'} {node.target}, which is not a tensor or a module"
    for each in _callables((node.args, node.kwargs)):
        if not is_fine(each):
            yield f"hands on {_named(each)}"


def _trees(graph: Graph) -> tuple[Any, ...]:
    """Return the descriptions of the pytrees that a graph takes and returns; empty if it takes and returns none."""
    info = graph._codegen.pytree_info if isinstance(graph._codegen, _PyTreeCodeGen) else None
    return () if info is None else (info.in_spec, info.out_spec)


def _callables(value: Any) -> list[Any]:
    """Return the callables in nested values, without nodes, modules, tensors, weak references and devices.

    Of a description of a pytree, these are the classes that torch calls to build it, except for those in `_TREES`, and
    the callables in their contexts.
    """
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [each for item in value for each in _callables(item)]
    if isinstance(value, Mapping):
        return [each for item in (*value.keys(), *value.values()) for each in _callables(item)]
    if isinstance(value, slice):
        return _callables((value.start, value.stop, value.step))
    if isinstance(value, TreeSpec):
        kind = () if value.is_leaf() or value.type in _TREES else value.type
        return _callables((kind, value.context, value.children()))
    return [value] if callable(value) and not isinstance(value, _NOT_CALLED) else []


def _named(target: Any) -> str:
    """Return the module and the name of a callable."""
    return f"{home_of(target)}.{getattr(target, '__qualname__', type(target).__name__)}"
