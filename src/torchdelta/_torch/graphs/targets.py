"""The callables of nodes by names that another process can find: a file holds names, never code.

    operator aten::add.Tensor
    packet aten::add
    higher_order cond torch._higher_order_ops.cond
    function torch.nn.functional:relu

Finding a callable imports the module that is named, if that is allowed, and looks attributes up; it calls nothing.
Torch, operator, math and the builtins that compute are always allowed. Other modules are allowed only by the caller.

Start reading at `name_target` and `find_target`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _higher_order_ops, _OpNamespace

BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "frozenset", "getattr"),
        *("hasattr", "hash", "int", "isinstance", "issubclass", "iter", "len", "list", "max", "min", "next", "pow"),
        *("print", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip"),
    }
)
"""Builtins that neither run text as code nor open files."""
ROOTS = ("torch", "operator", "_operator", "math")
"""Packages of which a graph may use everything but `_LOADERS` and `_GETTERS`; these too if a caller allows them."""
_LOADERS = (
    *("torch.hub", "torch.serialization", "torch.package", "torch.utils.cpp_extension", "torch.utils.model_zoo"),
    *("torch.jit", "torch.ops", "torch._ops", "torch.fx.graph_module", "torch.testing._internal.common_utils"),
    *("torch.utils.benchmark", "torch.utils.collect_env", "torch.utils.data", "torch.utils.model_dump"),
    *("torch.utils._strobelight", "torch._strobelight", "torch.backends.xeon", "torch.multiprocessing"),
    *("torch.distributed.elastic", "torch.distributed.launch", "torch.distributed.launcher", "torch.distributed.run"),
    *("torch._inductor.codecache", "torch._inductor.compile_worker", "torch._inductor.cpp_builder"),
    *("torch._inductor.runtime", "torch._dynamo.debug_utils", "torch._dynamo.repro"),
)
"""Modules of torch that run code from elsewhere, texts or other processes; no traced graph calls them."""
_GETTERS = ("attrgetter", "methodcaller")
"""Functions of `operator` that take an attribute by any name, and so could reach all code of the process."""
_PROCESS_BOUND = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")
"""Operators whose arguments are indices into a table of the process that traced them."""


def name_target(target: Any) -> str:
    """Return the name of an operator, packet, higher-order operator or function, with its kind as the first word.

    `find_target` finds it again. Raise ValueError if another process could not find it.
    """
    if isinstance(target, OpOverload):
        return f"operator {_registered_name(target)}"
    if isinstance(target, OpOverloadPacket):
        return f"packet {target._qualified_op_name}"
    if isinstance(target, HigherOrderOperator):
        name = _registered_name(target)
        if name in _PROCESS_BOUND:
            raise ValueError(f"{name} refers to a kernel that only the process that traced it has")
        return f"higher_order {name} {type(target).__module__}"
    return f"function {_name_function(target)}"


def find_target(name: str, allow: Iterable[str] = ()) -> Callable[..., Any]:
    """Return the callable that `name_target` named; raise LookupError if there is none or its module is not allowed.

    Modules may be imported for that. `allow` names packages whose modules are allowed besides those of torch,
    `operator`, `math` and some builtins. A registered operator needs no permission.
    """
    kind, _, rest = name.partition(" ")
    if kind == "operator":
        return _find_operator(rest)
    if kind == "packet":
        return _find_packet(rest)
    if kind == "higher_order":
        operator, _, module = rest.partition(" ")
        if operator not in _higher_order_ops:
            _import(module, allow)
        if operator not in _higher_order_ops:
            raise LookupError(f"this torch has no higher-order operator {operator}")
        return _higher_order_ops[operator]
    if kind == "function":
        module, _, path = rest.partition(":")
        return _find_function(module, path, tuple(allow))
    raise LookupError(f"{name!r} is not the name of a callable")


def _registered_name(target: OpOverload | HigherOrderOperator) -> str:
    return str(target.name())  # type: ignore[no-untyped-call]


def _name_function(target: Any) -> str:
    """Return the `module:path` under which a callable can be found in the modules that are loaded here.

    Raise ValueError if it is not callable, has no name, is in `__main__`, or is not what is found under its name, such
    as a function inside of another one.
    """
    if not callable(target):
        raise ValueError(f"it is a {type(target).__name__}, which cannot be called")
    module = home_of(target)
    path = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if module is None or path is None:
        raise ValueError(
            f"it is an object of {type(target).__name__} without a name of its own: call a function of a module"
        )
    if module == "__main__":
        raise ValueError(f"{path} is in __main__, which is another file in another process: move it to a module")
    for place, steps in _guess_places(target, module, path):
        match = _walk(sys.modules.get(place), steps)
        if match is target or (isinstance(target, (MethodType, BuiltinMethodType)) and match == target):
            return f"{place}:{steps}"
    if "<lambda>" in path or "<locals>" in path:
        raise ValueError(f"{path} of {module} is inside of a function: define it at the top of a module")
    raise ValueError(f"{module} has another object under the name {path}")


def _guess_places(target: Any, module: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield (module, path) pairs where a callable may be; the first is where it says it is.

    The others are tried because many of torch's callables name a wrong module.
    """
    yield module, path
    short = getattr(target, "__name__", path)
    yield module, short
    yield from (("torch", f"Tensor.{key}") for key, value in vars(torch.Tensor).items() if value is target)
    for place in (module, "torch", "torch.nn.functional", "torch.functional", "torch._C"):
        for key, value in list(vars(sys.modules[place]).items()) if place in sys.modules else ():
            if value is target:
                yield place, key


def home_of(target: Any) -> str | None:
    """Return the name of the module that a callable says it is defined in; None if it does not say."""
    owner = getattr(target, "__objclass__", target)
    module = getattr(owner, "__module__", None)
    return module if isinstance(module, str) else None


def _find_function(module: str, path: str, allow: tuple[str, ...]) -> Callable[..., Any]:
    """Import a module and return the callable at a dotted path in it.

    Raise LookupError if there is none, or if `_refuse_unless_allowed` refuses the module, or the one that defines the
    callable. Of the builtins only those in `BUILTINS` are allowed, and of `operator` all but `_GETTERS`, unless `allow`
    has it.
    """
    place = _import(module, allow)
    match = _walk(place, path)
    if match is None:
        raise LookupError(f"{module} has no {path}")
    if not callable(match):
        raise LookupError(f"{module}:{path} cannot be called")
    # the callable may have been imported from another module
    home = home_of(match)
    if home is not None and home != module:
        _refuse_unless_allowed(home, allow)
    is_getter = home in ("operator", "_operator") and getattr(match, "__name__", None) in _GETTERS
    if is_getter and home not in allow:
        raise LookupError(f"{module}:{path} may take any attribute, which no traced graph does: it is not allowed")
    if home == "builtins" and getattr(match, "__name__", None) not in BUILTINS:
        raise LookupError(f"{module}:{path} is not one of the builtins that compute")
    return match  # type: ignore[no-any-return]


def _walk(start: Any, path: str) -> Any:
    """Return the object at a dotted path from a module, or None if there is none or `start` is None.

    The path may lead through classes and submodules, but not through instances or modules that were imported from
    elsewhere.
    """
    place = start
    for step in path.split("."):
        is_class = isinstance(place, type)
        if not step.isidentifier() or not (is_class or isinstance(place, ModuleType)):
            return None
        member = getattr(place, step, None)
        if isinstance(member, ModuleType) and (is_class or member.__name__ != f"{place.__name__}.{step}"):
            return None
        place = member
    return place


def _import(module: str, allow: Iterable[str]) -> ModuleType:
    """Import and return a module; raise LookupError if its name is malformed or not allowed, or its import fails.

    Allowed are the packages in `allow` with all their modules, `operator`, `math`, `builtins`, and torch's own modules
    except for those in `_LOADERS`.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise LookupError(f"{module!r} is not the name of a module")
    _refuse_unless_allowed(module, allow)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise LookupError(f"{module} cannot be imported here ({type(error).__name__}: {error})") from error


def is_torchs_own(module: str) -> bool:
    """Tell whether a module is `builtins`, `operator`, `math` or one of torch's; `_LOADERS` count too."""
    return module == "builtins" or any(is_within(module, root) for root in ROOTS)


def _refuse_unless_allowed(module: str, allow: Iterable[str]) -> None:
    """Raise LookupError if a graph may not use a module.

    A module of a package in `allow` may be used. So may `operator`, `math`, `builtins` and torch's own, except for
    those of torch in `_LOADERS`.
    """
    if any(is_within(module, package) for package in allow):
        return
    if any(is_within(module, loader) for loader in _LOADERS):
        raise LookupError(f"{module} runs code from elsewhere, which no traced graph does: it is not allowed")
    if not is_torchs_own(module):
        raise LookupError(f"{module} is not allowed: if you trust it, pass allow=({module.partition('.')[0]!r},)")


def is_within(module: str, package: str) -> bool:
    """Tell whether a module is a package or in it, by their names."""
    return module == package or module.startswith(f"{package}.")


def _find_packet(name: str) -> OpOverloadPacket:
    """Return the operator `namespace::name` with all its overloads; raise LookupError if none is registered."""
    namespace, _, operator = name.partition("::")
    packet = None
    if namespace.isidentifier() and operator.isidentifier():
        operators = getattr(torch.ops, namespace, None)
        packet = getattr(operators, operator, None) if isinstance(operators, _OpNamespace) else None
    if not isinstance(packet, OpOverloadPacket):
        raise LookupError(f"no operator {name} is registered here: first import the package that registers it")
    return packet


def _find_operator(name: str) -> OpOverload:
    """Return the operator of a name `namespace::name.overload`, or its overload `default` if the name is without one.

    Raise LookupError if the operator or the overload is not registered.
    """
    qualified, _, overload = name.partition(".")
    packet = _find_packet(qualified)
    operator = getattr(packet, overload or "default", None) if (overload or "default").isidentifier() else None
    if not isinstance(operator, OpOverload):
        raise LookupError(f"{qualified} has no overload {overload or 'default'} in this torch")
    return operator
