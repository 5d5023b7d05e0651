"""What a callable reaches: the tensors, modules and functions that running it can read or change.

A function is opaque to `copy.deepcopy`, so its closure, its defaults and the module-level names it uses are followed
here. Only the user's own code is followed into its globals: what an installed package keeps at module level is the
package's business.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator, Mapping, Set
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def everything_in(value: Any) -> list[Any]:
    """Return every object that can be reached from the value, itself first, each once."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen[id(current)] = current
        waiting.extend(child for _, child in children(current))
    return list(seen.values())


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the value holds directly, by name."""
    if (
        isinstance(value, (torch.Tensor, str, bytes, int, float, complex, type, ModuleType, torch.dtype))
        or value is None
    ):
        return
    if isinstance(value, FunctionType):
        yield from captured_by(value)
    elif isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args[{index}]", item) for index, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple, Set)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    if hasattr(value, "__dict__") and not isinstance(value, (FunctionType, MethodType)):
        yield from vars(value).items()


def captured_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function carries besides its arguments: closure, defaults, attributes and the globals it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if (content := cell_content(cell)) is not _EMPTY:
            yield name, content
    yield from ((f"default[{index}]", item) for index, item in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    yield from used_globals(function).items()


def used_globals(function: FunctionType) -> dict[str, Any]:
    """Return the module-level names that a function of the user's own code mentions, with their values."""
    if is_installed(function):
        return {}
    return {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}


def is_installed(function: FunctionType) -> bool:
    """Tell whether the function belongs to an installed package or to Python itself."""
    return function.__code__.co_filename.startswith(_INSTALLED)


_EMPTY = object()


def cell_content(cell: Any) -> Any:
    """Return what a closure's cell holds; `_EMPTY` of one that was not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def is_empty(cell: Any) -> bool:
    """Tell whether a closure's cell was not filled yet."""
    return cell_content(cell) is _EMPTY


def shared_globals(values: list[Any]) -> dict[str, torch.Tensor]:
    """Return the module-level tensors that methods of the user's classes use: a class is never copied."""
    found: dict[str, torch.Tensor] = {}
    for kind in {kind for value in values for kind in type(value).__mro__}:
        for member in vars(kind).values():
            function = getattr(member, "__func__", member)
            if not isinstance(function, FunctionType) or is_installed(function):
                continue
            for name, value in used_globals(function).items():
                if isinstance(value, torch.nn.Module):
                    found.update({f"{name}.{inner}": tensor for inner, tensor in value.named_parameters()})
                elif isinstance(value, torch.Tensor):
                    found[name] = value
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
