"""What a callable reaches: the tensors, modules and functions that running it can read or change.

A function is opaque to `copy.deepcopy`, so its closure, its defaults and the module-level names it uses are followed
here. Only the user's own code is followed into its globals: what an installed package keeps at module level is the
package's business.

Copy a program so that two copies share nothing and each keeps its own aliasing, strides and requires_grad.

`copy.deepcopy` does the walking; its memo is filled beforehand with what it would get wrong: tensors (it refuses
non-leaf ones, and a parameter loses what it shares with another) and functions (it does not copy them, so both copies
would close over the same tensors).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Set
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from torchdelta._torch import tensors
from torchdelta.errors import ProgramError

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


Convert = Callable[[torch.dtype], torch.dtype]


def copy_together(values: Any, *, name: str, convert: Convert = lambda dtype: dtype) -> Any:
    """Copy a value of any kind; dtypes of tensors go through `convert`. What two parts share, their copies share."""
    found = everything_in(values)
    _refuse_shared(found, name)
    # an imported module is what it is: deepcopy would try to take it apart
    memo: dict[int, Any] = {id(value): value for value in found if isinstance(value, ModuleType)}
    memo.update({id(value): value.clone_state() for value in found if isinstance(value, torch.Generator)})
    try:
        _copy_tensors([value for value in found if isinstance(value, torch.Tensor)], memo, convert)
        for function, shell in _function_shells(found, memo):
            _fill(function, shell, memo)
        for tensor in (value for value in found if isinstance(value, torch.Tensor) and value.is_leaf):
            tensors.copy_hooks(tensor, memo[id(tensor)], lambda hook: copy.deepcopy(hook, memo))
        return _rebound(copy.deepcopy(values, memo), memo)
    except Exception as error:
        raise ProgramError(
            f"{name} cannot be copied ({type(error).__name__}: {error}), and a reference and a candidate that share "
            "state cannot be told apart: keep what cannot be copied out of the module, its arguments and its closure"
        ) from error


def _refuse_shared(found: list[Any], name: str) -> None:
    # classes and modules are never copied, so a parameter in one would be trained by both sides
    trained = [path for path, tensor in shared_state(found).items() if tensor.requires_grad]
    if trained:
        raise ProgramError(
            f"{name}: it uses {', '.join(sorted(trained))} of a module or class, which both sides would share; "
            "make it an attribute of the module that is checked, or an argument"
        )


@contextlib.contextmanager
def shared_state_unchanged(value: Any, *, name: str) -> Iterator[None]:
    """Raise ProgramError when what runs inside changes a tensor that every copy of the value shares."""
    before = {path: (tensor, tensors.version(tensor)) for path, tensor in _shared_by(value).items()}
    yield
    changed = [path for path, (tensor, version) in before.items() if tensors.version(tensor) != version]
    if changed:
        raise ProgramError(
            f"{name}: it changes {', '.join(sorted(changed))} of a module or class, which both sides share; "
            "make it a buffer of the module that is checked, or an argument"
        )


def _shared_by(value: Any) -> dict[str, torch.Tensor]:
    return shared_state(everything_in(value))


def _copy_tensors(originals: list[torch.Tensor], memo: dict[int, Any], convert: Convert) -> None:
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for tensor in sorted(originals, key=_is_plain_view):  # what they are views of comes first
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensors.has_own_buffer(tensor)
        if not ordinary or tensor.is_conj() or tensor.is_neg():
            memo[id(tensor)] = _copy_special(tensor, convert)
            continue
        duplicate = torch.empty(0, dtype=convert(tensor.dtype), device=tensor.device)
        if key := tensors.storage_key(tensor):
            if (key, tensor.dtype) not in storages:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                storages[key, tensor.dtype] = whole.to(convert(tensor.dtype), copy=True)
            whole = storages[key, tensor.dtype]
            if _is_plain_view(tensor):
                # a compiler asks two views of one tensor what they are views of
                base = memo.get(id(tensors.base_of(tensor)), whole)
                duplicate = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            else:
                duplicate.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        else:
            duplicate = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=convert(tensor.dtype), device=tensor.device
            )
        memo[id(tensor)] = _dressed_as(tensor, duplicate)
    for tensor in originals:
        duplicate = memo[id(tensor)]
        if tensor.is_leaf and tensor.grad is not None:
            duplicate.grad = tensor.grad.detach().clone().to(convert(tensor.grad.dtype))
        if vars(tensor):
            duplicate.__dict__.update(copy.deepcopy(vars(tensor), memo))


def _is_plain_view(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of another, and gradients are nobody's business."""
    base = tensors.base_of(tensor)
    return base is not None and base.dtype == tensor.dtype and not base.requires_grad and not tensor.requires_grad


def _dressed_as(tensor: torch.Tensor, duplicate: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(duplicate, requires_grad=tensor.requires_grad)
    return duplicate.requires_grad_(tensor.requires_grad)


def _copy_special(tensor: torch.Tensor, convert: Convert) -> torch.Tensor:
    duplicate = tensor.detach().clone()
    if convert(tensor.dtype) != tensor.dtype:
        duplicate = duplicate.to(convert(tensor.dtype))
    return _dressed_as(tensor, duplicate)


def _function_shells(found: list[Any], memo: dict[int, Any]) -> list[tuple[FunctionType, FunctionType]]:
    """Make an empty double of each function of the user's that reaches state; those of one module share its globals."""
    doubles: dict[int, dict[str, Any]] = {}
    shells = []
    for function in found:
        if not isinstance(function, FunctionType) or not _keeps_state(function):
            continue
        namespace = function.__globals__
        if any(has_state(value) for value in used_globals(function).values()):
            namespace = doubles.setdefault(id(namespace), dict(namespace))
        cells = tuple(CellType() for _ in function.__closure__ or ())
        shell = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        memo[id(function)] = shell
        shells.append((function, shell))
    return shells


def _keeps_state(function: FunctionType) -> bool:
    # what a closure holds may be counted up or replaced, whatever it is
    has_own_closure = bool(function.__closure__) and not is_installed(function)
    return has_own_closure or any(has_state(value) for _, value in captured_by(function))


def _fill(function: FunctionType, shell: FunctionType, memo: dict[int, Any]) -> None:
    for original, cell in zip(function.__closure__ or (), shell.__closure__ or (), strict=True):
        if is_filled(original):
            cell.cell_contents = _copied(original.cell_contents, memo)
    shell.__defaults__ = tuple(_copied(value, memo) for value in function.__defaults__ or ()) or None
    shell.__kwdefaults__ = {name: _copied(value, memo) for name, value in (function.__kwdefaults__ or {}).items()}
    shell.__qualname__, shell.__doc__, shell.__module__ = function.__qualname__, function.__doc__, function.__module__
    shell.__dict__.update({name: _copied(value, memo) for name, value in vars(function).items()})
    if shell.__globals__ is not function.__globals__:
        used = used_globals(function)
        shell.__globals__.update({name: _copied(value, memo) for name, value in used.items()})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy what a function carries as far as runs could meet in it: a logger or a lock is nobody's state."""
    if isinstance(value, FunctionType):
        return memo.get(id(value), value)
    if not has_state(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        if has_tensors(value):
            raise
        return value


def _rebound(duplicate: Any, memo: dict[int, Any]) -> Any:
    """Give bound methods their copied functions: deepcopy copies what a method is bound to, and not its function."""
    for holder in everything_in(duplicate):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, MethodType) and id(value.__func__) in memo:
                vars(holder)[name] = MethodType(memo[id(value.__func__)], value.__self__)
    return duplicate
