"""Copy a program so that two copies share nothing and each keeps its own aliasing, strides and requires_grad.

`copy.deepcopy` does the walking; its memo is filled beforehand with what it would get wrong: tensors (it refuses
non-leaf ones, and a parameter loses what it shares with another) and functions (it does not copy them, so both copies
would close over the same tensors).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.errors import ProgramError
from torchdelta.execute import reach

Convert = Callable[[torch.dtype], torch.dtype]


def copy_together(values: Any, *, name: str, convert: Convert = lambda dtype: dtype) -> Any:
    """Copy a value of any kind; dtypes of tensors go through `convert`. What two parts share, their copies share."""
    found = reach.everything_in(values)
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
    trained = [path for path, tensor in reach.shared_state(found).items() if tensor.requires_grad]
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
    return reach.shared_state(reach.everything_in(value))


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
        if any(reach.has_state(value) for value in reach.used_globals(function).values()):
            namespace = doubles.setdefault(id(namespace), dict(namespace))
        cells = tuple(CellType() for _ in function.__closure__ or ())
        shell = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        memo[id(function)] = shell
        shells.append((function, shell))
    return shells


def _keeps_state(function: FunctionType) -> bool:
    # what a closure holds may be counted up or replaced, whatever it is
    has_own_closure = bool(function.__closure__) and not reach.is_installed(function)
    return has_own_closure or any(reach.has_state(value) for _, value in reach.captured_by(function))


def _fill(function: FunctionType, shell: FunctionType, memo: dict[int, Any]) -> None:
    for original, cell in zip(function.__closure__ or (), shell.__closure__ or (), strict=True):
        if reach.is_filled(original):
            cell.cell_contents = _copied(original.cell_contents, memo)
    shell.__defaults__ = tuple(_copied(value, memo) for value in function.__defaults__ or ()) or None
    shell.__kwdefaults__ = {name: _copied(value, memo) for name, value in (function.__kwdefaults__ or {}).items()}
    shell.__qualname__, shell.__doc__, shell.__module__ = function.__qualname__, function.__doc__, function.__module__
    shell.__dict__.update({name: _copied(value, memo) for name, value in vars(function).items()})
    if shell.__globals__ is not function.__globals__:
        used = reach.used_globals(function)
        shell.__globals__.update({name: _copied(value, memo) for name, value in used.items()})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy what a function carries as far as runs could meet in it: a logger or a lock is nobody's state."""
    if isinstance(value, FunctionType):
        return memo.get(id(value), value)
    if not reach.has_state(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        if reach.has_tensors(value):
            raise
        return value


def _rebound(duplicate: Any, memo: dict[int, Any]) -> Any:
    """Give bound methods their copied functions: deepcopy copies what a method is bound to, and not its function."""
    for holder in reach.everything_in(duplicate):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, MethodType) and id(value.__func__) in memo:
                vars(holder)[name] = MethodType(memo[id(value.__func__)], value.__self__)
    return duplicate
