"""What a callable reaches: the tensors, modules and functions that running it can read or change.

A function is opaque to `copy.deepcopy`, so its closure, its defaults and the module-level names it uses are followed
here. Only the user's own code is followed into its globals: what an installed package keeps at module level is the
package's business.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Set
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_STATE = (torch.Tensor, torch.nn.Module, torch.Generator, np.ndarray)
_CONTAINERS = (list, dict, set, collections.deque)


def everything_in(value: Any) -> list[Any]:
    """Return every object that can be reached from the value, itself first, each once; plain values are left out."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) not in seen:
            seen[id(current)] = current
            waiting.extend(child for _, child in children(current) if not isinstance(child, _ATOMS))
    return list(seen.values())


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the value holds directly, by name."""
    if isinstance(value, (*_ATOMS, torch.Tensor, type, ModuleType)):
        return
    if isinstance(value, FunctionType):
        yield from captured_by(value)
        return
    if isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
        return
    if isinstance(value, BuiltinMethodType):
        yield "__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args[{index}]", item) for index, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple, Set, collections.deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def has_tensors(value: Any) -> bool:
    """Tell whether anything that a program computes with can be reached from the value."""
    return any(isinstance(inner, _STATE) for inner in everything_in(value))


def has_state(value: Any) -> bool:
    """Tell whether two runs that share the value could get in each other's way: it holds tensors, or fills up."""
    return isinstance(value, _CONTAINERS) or has_tensors(value)


def captured_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function carries besides its arguments: closure, defaults, attributes and the globals it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if is_filled(cell):
            yield name, cell.cell_contents
    yield from ((f"default[{index}]", item) for index, item in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    yield from used_globals(function).items()


def is_filled(cell: CellType) -> bool:
    """Tell whether a cell of a closure was given its value already."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def used_globals(function: FunctionType) -> dict[str, Any]:
    """Return the module-level names that a function of the user's own code mentions, with their values."""
    if is_installed(function):
        return {}
    return {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}


def is_installed(function: FunctionType) -> bool:
    """Tell whether the function belongs to an installed package or to Python itself."""
    return function.__code__.co_filename.startswith(_INSTALLED)


def shared_state(values: list[Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that code among the values uses and that a copy of them would not have for itself.

    Classes and modules are never copied: what their attributes hold, and what their methods read from module level,
    is the same for every copy.
    """
    found: dict[str, torch.Tensor] = {}
    for kind in {kind for value in values for kind in type(value).__mro__ if not _is_installed_class(kind)}:
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                if name != "__init__":
                    for used, value in used_globals(function).items():
                        found.update(_tensors_in(value, used))
            elif not isinstance(member, type):
                found.update(_tensors_in(member, f"{kind.__qualname__}.{name}"))
    for function in values:
        if isinstance(function, FunctionType):
            found.update(_foreign_state(function))
    return found


def _foreign_state(function: FunctionType) -> dict[str, torch.Tensor]:
    """Return the tensors that a function takes from another module of the user's, as in `other.model`."""
    found: dict[str, torch.Tensor] = {}
    attributes = set(function.__code__.co_names)
    for name, module in used_globals(function).items():
        if isinstance(module, ModuleType) and not is_installed_module(module):
            for attribute in attributes & vars(module).keys():
                found.update(_tensors_in(vars(module)[attribute], f"{name}.{attribute}"))
    return found


def _tensors_in(value: Any, name: str) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return {f"{name}.{inner}": parameter for inner, parameter in value.named_parameters()}
    tensors = (inner for inner in everything_in(value) if isinstance(inner, torch.Tensor))
    return {name if index == 0 else f"{name} ({index})": tensor for index, tensor in enumerate(tensors)}


def _is_installed_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is not None and is_installed_module(module)


def is_installed_module(module: ModuleType) -> bool:
    """Tell whether a module belongs to an installed package or to Python itself."""
    # what has no file is built in
    return (getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED) and module.__name__ != "__main__"


def _names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        # an attribute has a name too, which may be that of an unrelated global
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
