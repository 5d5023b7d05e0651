"""Copy a program so that two copies share nothing and each keeps its own aliasing, strides and requires_grad.

`copy.deepcopy` does the walking; its memo is filled beforehand with what it would get wrong: tensors (it refuses
non-leaf ones, and a parameter loses what it shares with another) and functions (it does not copy them, so both copies
would close over the same tensors).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
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
    memo: dict[int, Any] = {}
    try:
        _copy_tensors([value for value in found if isinstance(value, torch.Tensor)], memo, convert)
        for function, shell in _function_shells(found, memo):
            _fill(function, shell, memo)
        return copy.deepcopy(values, memo)
    except Exception as error:
        raise ProgramError(
            f"{name} cannot be copied ({type(error).__name__}: {error}), and a reference and a candidate that share "
            "state cannot be told apart: keep what cannot be copied out of the module, its arguments and its closure"
        ) from error


def _refuse_shared(found: list[Any], name: str) -> None:
    # a class is never copied, so a parameter that its methods read from module level would be trained by both sides
    trained = [path for path, tensor in reach.shared_globals(found).items() if tensor.requires_grad]
    if trained:
        raise ProgramError(
            f"{name}: a method uses the module-level {', '.join(sorted(trained))}, which both sides would share; "
            "make it an attribute of the module"
        )


@contextmanager
def shared_state_unchanged(value: Any, *, name: str) -> Iterator[None]:
    """Raise ProgramError when what runs inside changes a module-level tensor that every copy of the value shares."""
    before = {path: (tensor, tensors.version(tensor)) for path, tensor in _shared_by(value).items()}
    yield
    changed = [path for path, (tensor, version) in before.items() if tensors.version(tensor) != version]
    if changed:
        raise ProgramError(
            f"{name}: a method changes the module-level {', '.join(sorted(changed))}, which both sides share; "
            "make it a buffer of the module"
        )


def _shared_by(value: Any) -> dict[str, torch.Tensor]:
    return reach.shared_globals(reach.everything_in(value))


def _copy_tensors(originals: list[torch.Tensor], memo: dict[int, Any], convert: Convert) -> None:
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for tensor in originals:
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensors.has_own_buffer(tensor)
        if not ordinary or tensor.is_conj() or tensor.is_neg():
            memo[id(tensor)] = _copy_special(tensor, convert)
            continue
        duplicate = torch.empty(0, dtype=convert(tensor.dtype), device=tensor.device)
        if key := tensors.storage_key(tensor):
            if (key, tensor.dtype) not in storages:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                storages[key, tensor.dtype] = whole.to(convert(tensor.dtype), copy=True)
            storage = storages[key, tensor.dtype].untyped_storage()
            duplicate.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        else:
            duplicate = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=convert(tensor.dtype), device=tensor.device
            )
        memo[id(tensor)] = _dressed_as(tensor, duplicate)
    for tensor in originals:
        if vars(tensor):
            memo[id(tensor)].__dict__.update(copy.deepcopy(vars(tensor), memo))


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
    """Make an empty double of each function that reaches state; functions of one module share its doubled globals."""
    doubles: dict[int, dict[str, Any]] = {}
    shells = []
    for function in found:
        if not isinstance(function, FunctionType) or not _reaches_state(function):
            continue
        namespace = function.__globals__
        if any(_is_state(value) for value in reach.used_globals(function).values()):
            namespace = doubles.setdefault(id(namespace), dict(namespace))
        cells = tuple(CellType() for _ in function.__closure__ or ())
        shell = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        memo[id(function)] = shell
        shells.append((function, shell))
    return shells


def _reaches_state(function: FunctionType) -> bool:
    return any(isinstance(value, (torch.Tensor, torch.nn.Module)) for value in reach.everything_in(function))


def _is_state(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return _reaches_state(value)
    return any(isinstance(inner, (torch.Tensor, torch.nn.Module)) for inner in reach.everything_in(value))


def _fill(function: FunctionType, shell: FunctionType, memo: dict[int, Any]) -> None:
    for original, cell in zip(function.__closure__ or (), shell.__closure__ or (), strict=True):
        if not reach.is_empty(original):
            cell.cell_contents = copy.deepcopy(original.cell_contents, memo)
    shell.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    shell.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    shell.__qualname__, shell.__doc__, shell.__module__ = function.__qualname__, function.__doc__, function.__module__
    shell.__dict__.update(copy.deepcopy(vars(function), memo))
    if shell.__globals__ is not function.__globals__:
        used: Mapping[str, Any] = reach.used_globals(function)
        shell.__globals__.update({name: copy.deepcopy(value, memo) for name, value in used.items() if _is_state(value)})
