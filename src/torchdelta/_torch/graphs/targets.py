"""What a node calls, by a name that another process can find it under: never by its code.

A name is one of `operator aten::add.Tensor`, `packet aten::add`, `higher_order cond torch._higher_order_ops.cond` and
`function torch.nn.functional:relu`. Finding one imports the module that is named, if it is allowed to, and looks
attributes up; it calls nothing. Torch, operator, math and the builtins that compute are always allowed, and nothing
else is unless the caller says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _higher_order_ops, _OpNamespace

_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "frozenset", "getattr"),
        *("hasattr", "hash", "int", "isinstance", "issubclass", "iter", "len", "list", "max", "min", "next", "pow"),
        *("print", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip"),
    }
)
"""Those that neither run text as code nor reach for files."""
_ROOTS = ("torch", "operator", "_operator", "math")
_LOADERS = (
    *("torch.hub", "torch.serialization", "torch.package", "torch.utils.cpp_extension", "torch.utils.model_zoo"),
    *("torch.jit", "torch.ops", "torch._ops"),
)
"""Modules of torch whose work is to run code from elsewhere: no graph that was traced calls them."""
_PROCESS_BOUND = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")
"""Operators whose arguments are places in a table of the process that traced them."""


def name_target(target: Any) -> str:
    """Return the name of a callable; ValueError says why it has none."""
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
    """Return the callable of that name; LookupError says why there is none, or why it may not be used."""
    kind, _, rest = name.partition(" ")
    if kind == "operator":
        return _find_operator(rest)
    if kind == "packet":
        return _find_packet(rest)
    if kind == "higher_order":
        operator, _, module = rest.partition(" ")
        if operator not in _higher_order_ops:
            _imported(module, allow)
        if operator not in _higher_order_ops:
            raise LookupError(f"this torch has no higher-order operator {operator}")
        return _higher_order_ops[operator]
    if kind == "function":
        module, _, path = rest.partition(":")
        return _find_function(module, path, tuple(allow))
    raise LookupError(f"{name!r} names nothing that can be called")


def _registered_name(target: OpOverload | HigherOrderOperator) -> str:
    return str(target.name())  # type: ignore[no-untyped-call]


def _name_function(target: Any) -> str:
    if not callable(target):
        raise ValueError(f"it is a {type(target).__name__}, which nothing can call")
    module = _module_of(target)
    path = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if module is None or path is None:
        raise ValueError(
            f"it is an object of {type(target).__name__} without a name of its own: call a function of a module"
        )
    if module == "__main__":
        raise ValueError(f"{path} is in __main__, which is another file in another process: move it to a module")
    for place, steps in _guesses(target, module, path):
        found = _walked(sys.modules.get(place), steps)
        if found is target or (isinstance(target, (MethodType, BuiltinMethodType)) and found == target):
            return f"{place}:{steps}"
    if "<lambda>" in path or "<locals>" in path:
        raise ValueError(f"{path} of {module} is inside of a function: define it at the top of a module")
    raise ValueError(f"{module} has something else under the name {path}")


def _guesses(target: Any, module: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield where a callable may be found: many of torch's say that they are elsewhere than they are."""
    yield module, path
    short = getattr(target, "__name__", path)
    yield module, short
    yield from (("torch", f"Tensor.{key}") for key, value in vars(torch.Tensor).items() if value is target)
    for place in (module, "torch", "torch.nn.functional", "torch.functional", "torch._C"):
        for key, value in list(vars(sys.modules[place]).items()) if place in sys.modules else ():
            if value is target:
                yield place, key


def _module_of(target: Any) -> str | None:
    owner = getattr(target, "__objclass__", target)
    module = getattr(owner, "__module__", None)
    return module if isinstance(module, str) else None


def _find_function(module: str, path: str, allow: tuple[str, ...]) -> Callable[..., Any]:
    place = _imported(module, allow)
    found = _walked(place, path)
    if found is None:
        raise LookupError(f"{module} has no {path}")
    if not callable(found):
        raise LookupError(f"{module}:{path} cannot be called")
    # a module may hold what it imported from another one
    home = _module_of(found)
    if home is not None and home != module:
        _refuse_unless_allowed(home, allow)
    if home == "builtins" and getattr(found, "__name__", None) not in _BUILTINS:
        raise LookupError(f"{module}:{path} is none of the builtins that compute")
    return found  # type: ignore[no-any-return]


def _walked(place: Any, path: str) -> Any:
    """Return what the path leads to, through classes and submodules only; None where it leads nowhere."""
    found = place
    for step in path.split("."):
        is_class = isinstance(found, type)
        if not step.isidentifier() or not (is_class or isinstance(found, ModuleType)):
            return None
        following = getattr(found, step, None)
        if isinstance(following, ModuleType) and (is_class or following.__name__ != f"{found.__name__}.{step}"):
            return None
        found = following
    return found


def _imported(module: str, allow: Iterable[str]) -> ModuleType:
    if not all(part.isidentifier() for part in module.split(".")):
        raise LookupError(f"{module!r} is no name of a module")
    _refuse_unless_allowed(module, allow)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise LookupError(f"{module} cannot be imported here ({type(error).__name__}: {error})") from error


def is_torchs_own(module: str) -> bool:
    """Tell whether a module is torch's or Python's own, and may be named by any graph."""
    return module == "builtins" or any(_is_within(module, root) for root in _ROOTS)


def _refuse_unless_allowed(module: str, allow: Iterable[str]) -> None:
    if any(_is_within(module, given) for given in allow):
        return
    if any(_is_within(module, loader) for loader in _LOADERS):
        raise LookupError(f"{module} runs code from elsewhere, which no traced graph does: it is not allowed")
    if not is_torchs_own(module):
        raise LookupError(f"{module} is not allowed: if you trust it, pass allow=({module.partition('.')[0]!r},)")


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _find_packet(name: str) -> OpOverloadPacket:
    namespace, _, operator = name.partition("::")
    packet = None
    if namespace.isidentifier() and operator.isidentifier():
        known = getattr(torch.ops, namespace, None)
        packet = getattr(known, operator, None) if isinstance(known, _OpNamespace) else None
    if not isinstance(packet, OpOverloadPacket):
        raise LookupError(f"no operator {name} is registered here: first import the package that registers it")
    return packet


def _find_operator(name: str) -> OpOverload:
    qualified, _, overload = name.partition(".")
    packet = _find_packet(qualified)
    found = getattr(packet, overload or "default", None) if (overload or "default").isidentifier() else None
    if not isinstance(found, OpOverload):
        raise LookupError(f"{qualified} has no overload {overload or 'default'} in this torch")
    return found
