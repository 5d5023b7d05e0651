"""Copy a program so that two copies share nothing, and each keeps its aliasing, strides and `requires_grad`.

`copy.deepcopy` does the walking. Its memo is filled beforehand with the objects that it would get wrong:

- tensors: it refuses tensors that are not leaves, and loses which parameters share memory;
- functions: it does not copy them, so both copies would use the same closure.

A function is opaque to `deepcopy`, so this module finds by itself what a callable reaches: closure, defaults, and the
module-level names that it uses. Only the user's own code is followed into its globals, because the state of an
installed package is not part of the program.

Start reading at `copy_together`; `everything_in` lists the objects that a value reaches.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import functools
import math
import operator
import random
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from torchdelta._torch import modules, tensors
from torchdelta.compare.leaves import step_to
from torchdelta.errors import ProgramError
from torchdelta.program.hidden_state import GENERATORS_OF_PROCESS, has_hidden_state, hidden_state, is_builtin_iterator

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_STATE = (torch.Tensor, torch.nn.Module, torch.Generator, np.ndarray)
_CONTAINERS = (list, dict, set, collections.deque)
# not LOAD_ATTR: an attribute may have the name of an unrelated global
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_USES = frozenset({"LOAD_GLOBAL", "LOAD_NAME"}) | _WRITES


BOUND_BUILTINS = (BuiltinMethodType, MethodWrapperType)
"""Builtin functions, some of which are bound to an object, as `[].append` is."""

Convert = Callable[[torch.dtype], torch.dtype]
"""Returns the dtype that a copy has in place of the original's."""


def copy_together(
    values: Any, *, name: str, convert: Convert = lambda dtype: dtype, keeps_compiled: bool = False
) -> Any:
    """Return a copy of any value, which shares no state with it; `convert` may change the dtypes of its tensors.

    Objects that are shared within the original are shared within the copy, and so is memory of plain tensors of one
    dtype; tensors become autograd leaves. Python modules, classes, functions that reach no state, and captured values
    without state are not copied. A captured value that cannot be copied stays shared if it reaches no tensor. A module
    that was compiled in place, by its method `compile`, is not compiled in the copy unless `keeps_compiled`. `name` is
    for error messages. Raise ProgramError if the value cannot be copied, or if copies would share tensors that require
    grad.
    """
    objects = everything_in(values)
    # a hook of a tensor may close over state, which the two copies must not share
    objects = everything_in([values, [hook for tensor in objects for hook in _gradient_hooks(tensor)]])
    _refuse_shared(objects, name)
    # modules stay themselves: deepcopy would try to copy their contents
    memo: dict[int, Any] = {id(value): value for value in objects if isinstance(value, ModuleType)}
    # and the generators of the process too, which the seed of a run rules
    memo.update({id(value): value for value in GENERATORS_OF_PROCESS})
    memo.update({id(value): value.clone_state() for value in objects if isinstance(value, torch.Generator)})
    # this one draws from the system, and has no state
    memo.update({id(value): value for value in objects if isinstance(value, random.SystemRandom)})
    try:
        _copy_tensors([value for value in objects if isinstance(value, torch.Tensor)], memo, convert)
        for function, shell in _function_shells(objects, memo):
            _fill_shell(function, shell, memo)
        for tensor in (value for value in objects if isinstance(value, torch.Tensor) and value.is_leaf):
            tensors.copy_hooks(tensor, memo[id(tensor)], lambda hook: copy.deepcopy(hook, memo))
        _copy_scripted(objects, memo, convert)
        _copy_bound_builtins(objects, memo)
        duplicate = copy.deepcopy(values, memo)
        if keeps_compiled:
            _copy_compiled_calls(objects, memo)
        return _rebind(duplicate, memo, originals={id(value) for value in objects})
    except Exception as error:
        raise ProgramError(
            f"{name} cannot be copied ({type(error).__name__}: {error}), and a reference and a candidate that share "
            "state cannot be told apart: keep what cannot be copied out of the module, its arguments and its closure"
        ) from error


def _gradient_hooks(value: Any) -> list[Any]:
    """Return the gradient hooks of a value that is a tensor; empty for any other value."""
    return tensors.hooks_of(value) if isinstance(value, torch.Tensor) else []


def _refuse_shared(objects: list[Any], name: str) -> None:
    """Raise ProgramError if copies would share a tensor that requires grad, because both sides would train it.

    `objects` is everything that the program reaches, and `name` is for the message.
    """
    trained = [path for path, tensor in shared_state(objects).items() if tensor.requires_grad]
    if trained:
        raise ProgramError(
            f"{name}: it uses {', '.join(sorted(trained))} of a module or class, which both sides would share; "
            "make it an attribute of the module that is checked, or an argument"
        )


_LARGE = 2**26
"""So many bytes of tensors are copied, to be put back if they change."""


@contextlib.contextmanager
def shared_state_unchanged(value: Any, *, name: str) -> Iterator[None]:
    """Run the block, and raise ProgramError if it wrote in place to a tensor that every copy of the value shares.

    `shared_state` says which tensors these are. Only writes that torch counts are noticed, and nothing is put back. If
    the block raises, nothing is checked.
    """
    shared = shared_state(everything_in(value))
    before = {path: (tensor, tensors.version(tensor)) for path, tensor in shared.items()}
    yield
    changed = [path for path, (tensor, version) in before.items() if tensors.version(tensor) != version]
    if changed:
        raise ProgramError(
            f"{name}: it changes {', '.join(sorted(changed))} of a module or class, which both sides share; "
            "make it a buffer of the module that is checked, or an argument"
        )


@contextlib.contextmanager
def originals_unchanged(originals: Sequence[torch.Tensor], *, name: str) -> Iterator[None]:
    """Run the block on a copy of a program; raise ProgramError if it wrote to the program's own tensors, `originals`.

    A new gradient of one of them is such a write too. The tensors get their old values and gradients back before. If
    they have more than `_LARGE` bytes together, the values stay changed, and only writes that torch counts are noticed.
    Tensors without a plain buffer are not watched. If the block raises, nothing is checked or put back.
    """
    plain = [tensor for tensor in originals if tensors.has_own_buffer(tensor)]
    versions = [tensors.version(tensor) for tensor in plain]
    is_small = sum(tensor.nbytes for tensor in plain) <= _LARGE
    before = [tensor.detach().clone() for tensor in plain] if is_small else []
    gradients = [tensor.grad if tensor.is_leaf else None for tensor in plain]
    yield
    changed = [
        index
        for index, tensor in enumerate(plain)
        if tensors.version(tensor) != versions[index]
        or (is_small and not tensors.has_same_bits(tensor, before[index]))
        or (tensor.is_leaf and tensor.grad is not gradients[index])
    ]
    if not changed:
        return
    for index in changed:
        if plain[index].is_leaf:
            plain[index].grad = gradients[index]
    with torch.no_grad():
        for index in changed if is_small else ():
            if plain[index].shape == before[index].shape:
                plain[index].data.copy_(before[index])
            else:
                plain[index].data = before[index]
    raise ProgramError(
        f"{name}: a copy of it writes to {len(changed)} tensors of the original, so two sides cannot be told apart. A "
        "weak reference, a cached method or a partial may hold its module: let it take the module as an argument"
        + ("" if is_small else ". The original has been changed")
    )


def _copy_tensors(originals: list[torch.Tensor], memo: dict[int, Any], convert: Convert) -> None:
    """Add a copy of each tensor to the memo, by the id of the original.

    The copy has the converted dtype, is a leaf with the same `requires_grad`, and has copies of gradient and
    attributes. Of plain tensors, strides stay, and those of one storage and dtype share one copied storage. Subclasses,
    lazy conjugates and tensors without a plain buffer are cloned, each by itself.
    """
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for tensor in sorted(originals, key=_is_plain_view):  # a base comes before its views
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
                # compilers compare the bases of two views
                base = memo.get(id(tensors.base_of(tensor)), whole)
                duplicate = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            else:
                duplicate.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        else:
            duplicate = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=convert(tensor.dtype), device=tensor.device
            )
        memo[id(tensor)] = _match_kind(tensor, duplicate)
    for tensor in originals:
        duplicate = memo[id(tensor)]
        if tensor.is_leaf and tensor.grad is not None:
            duplicate.grad = tensor.grad.detach().clone().to(convert(tensor.grad.dtype))
        if vars(tensor):
            duplicate.__dict__.update(copy.deepcopy(vars(tensor), memo))


def _is_plain_view(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of another of its dtype, and neither requires grad."""
    base = tensors.base_of(tensor)
    return base is not None and base.dtype == tensor.dtype and not base.requires_grad and not tensor.requires_grad


def _match_kind(tensor: torch.Tensor, duplicate: torch.Tensor) -> torch.Tensor:
    """Return the duplicate as a Parameter if the tensor is one, and with its `requires_grad`."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(duplicate, requires_grad=tensor.requires_grad)
    return duplicate.requires_grad_(tensor.requires_grad)


def _copy_special(tensor: torch.Tensor, convert: Convert) -> torch.Tensor:
    """Return a clone of a tensor as a leaf with the converted dtype; `requires_grad` stays, and a Parameter stays one.

    It is for subclasses, lazy conjugates and tensors without a plain buffer.
    """
    duplicate = tensor.detach().clone()
    if convert(tensor.dtype) != tensor.dtype:
        duplicate = duplicate.to(convert(tensor.dtype))
    return _match_kind(tensor, duplicate)


def _function_shells(objects: list[Any], memo: dict[int, Any]) -> list[tuple[FunctionType, FunctionType]]:
    """Return (function, shell) for each function to copy; a shell is a copy whose closure and defaults are still empty.

    These are the functions that reach state, and all that use globals of a module in which one of `objects` uses
    globals with state. The shells of such a module share one copy of its globals, because one function may read what
    another writes; any other shell has the original globals. The shells are added to the memo by the function's id.
    """
    functions = [function for function in objects if isinstance(function, FunctionType)]
    copied = {
        id(function.__globals__)
        for function in functions
        if any(has_state(value) for value in used_globals(function).values())
    }
    namespaces: dict[int, dict[str, Any]] = {}
    shells = []
    for function in functions:
        uses_copied = id(function.__globals__) in copied and bool(used_globals(function))
        if not uses_copied and not _reaches_state(function):
            continue
        namespace = function.__globals__
        if id(namespace) in copied:
            namespace = namespaces.setdefault(id(namespace), dict(namespace))
        cells = tuple(CellType() for _ in function.__closure__ or ())
        shell = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        memo[id(function)] = shell
        shells.append((function, shell))
    return shells


def _reaches_state(function: FunctionType) -> bool:
    """Tell whether a function uses a value with state (`captured_by`, `has_state`), or has a closure and is the user's.

    A function is the user's if it does not belong to an installed package.
    """
    # a call may replace any value in a closure, a counter for example
    has_own_closure = bool(function.__closure__) and not is_installed(function)
    return has_own_closure or any(has_state(value) for _, value in captured_by(function))


def _fill_shell(function: FunctionType, shell: FunctionType, memo: dict[int, Any]) -> None:
    """Give a function's copy, the shell, its own closure, defaults, attributes and used globals, in place.

    Values without state stay shared. Globals are replaced only if the shell has a copy of them.
    """
    for original, cell in zip(function.__closure__ or (), shell.__closure__ or (), strict=True):
        if is_filled(original):
            cell.cell_contents = _copy_captured(original.cell_contents, memo)
    shell.__defaults__ = tuple(_copy_captured(value, memo) for value in function.__defaults__ or ()) or None
    shell.__kwdefaults__ = {
        name: _copy_captured(value, memo) for name, value in (function.__kwdefaults__ or {}).items()
    }
    shell.__qualname__, shell.__doc__, shell.__module__ = function.__qualname__, function.__doc__, function.__module__
    shell.__dict__.update({name: _copy_captured(value, memo) for name, value in vars(function).items()})
    if shell.__globals__ is not function.__globals__:
        used = used_globals(function)
        shell.__globals__.update({name: _copy_captured(value, memo) for name, value in used.items()})


def _copy_captured(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a captured value, or the value itself if it has no state, such as a logger or a lock.

    Of a function, return its shell in the memo, or the function itself if it has none. A value that cannot be copied is
    returned itself, unless it reaches tensors: then the exception is raised.
    """
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


def _copy_scripted(objects: list[Any], memo: dict[int, Any], convert: Convert) -> None:
    """Add to the memo a copy of each module of TorchScript, and of those in it.

    The module's own copy has parameters that are computed from the original's, so that a backward would reach these.
    Here they are leaves, as the original's are, and a tensor that is in the memo already is the copy's too.
    """
    scripted = [value for value in objects if isinstance(value, torch.jit.ScriptModule)]
    inner = {id(child) for module in scripted for child in module.modules() if child is not module}
    for module in scripted:
        if id(module) in inner:
            continue
        with torch.no_grad():
            duplicate = copy.deepcopy(module, memo)
        for original, own in zip(module.modules(), duplicate.modules(), strict=True):
            memo[id(original)] = own
            if isinstance(original, torch.jit.ScriptModule):
                _copy_script_tensors(original, own, memo, convert)


def _copy_script_tensors(
    original: torch.jit.ScriptModule, duplicate: torch.nn.Module, memo: dict[int, Any], convert: Convert
) -> None:
    """Give the copy of one module of TorchScript its own tensors: those in the memo, or new ones, which join the memo.

    Submodules are left alone.
    """
    registered = (*original.named_parameters(recurse=False), *original.named_buffers(recurse=False))
    attributes = modules.script_attributes(original).items()
    for name, tensor in (*registered, *attributes):
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) not in memo:
            own = getattr(duplicate, name)
            own.data = own.data.to(convert(tensor.dtype))
            memo[id(tensor)] = own.requires_grad_(tensor.requires_grad)
        setattr(duplicate, name, memo[id(tensor)])


def _copy_compiled_calls(objects: list[Any], memo: dict[int, Any]) -> None:
    """Compile the copies in the memo of modules that were compiled in place, as the originals are.

    `deepcopy` leaves out what the method `compile` adds to a module, so that the copy would run eagerly.
    """
    for module in objects:
        compiled = modules.compiled_call_of(module) if isinstance(module, torch.nn.Module) else None
        if compiled is not None and (duplicate := memo.get(id(module), module)) is not module:
            modules.set_compiled_call(duplicate, _copy_captured(compiled, memo))


def _copy_bound_builtins(objects: list[Any], memo: dict[int, Any]) -> None:
    """Add to the memo, for each builtin method of an object with state, that method of the object's copy.

    `deepcopy` takes such a method for an atom, so that two copies would append to one list. A method of an object that
    cannot be copied stays shared, as `_copy_captured` says.
    """
    for method in objects:
        if not isinstance(method, BOUND_BUILTINS) or not has_state(method.__self__):
            continue
        # the object of a function that C++ exports knows nothing of it
        if getattr(method.__self__, method.__name__, None) == method:
            memo[id(method)] = getattr(_copy_captured(method.__self__, memo), method.__name__)


def _rebind(duplicate: Any, memo: dict[int, Any], originals: Set[int]) -> Any:
    """Replace, in place, what `deepcopy` took for an atom by what refers to the copies, and return the duplicate.

    These are bound methods of functions that were copied, weak references to objects that were copied, and cached
    functions that reach any: see `_rebound`. They are replaced in attributes, dicts, lists and closures of the
    duplicate; the `originals`, by id, are left alone where it still reaches them.
    """
    for holder in everything_in(duplicate):
        if id(holder) in originals:
            continue
        if isinstance(holder, FunctionType):
            for cell in holder.__closure__ or ():
                if is_filled(cell) and (value := _rebound(cell.cell_contents, memo)) is not cell.cell_contents:
                    cell.cell_contents = value
        for entries in (getattr(holder, "__dict__", None), holder):
            if isinstance(entries, (dict, list)):
                items = list(dict.items(entries) if isinstance(entries, dict) else enumerate(list.__iter__(entries)))
                # a subclass may refuse to be written to
                write: Any = dict.__setitem__ if isinstance(entries, dict) else list.__setitem__
                for key, entry in items:
                    if (value := _rebound(entry, memo)) is not entry:
                        write(entries, key, value)
    return duplicate


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return what refers to the copies in place of a bound method, weak reference or cached function, or the value.

    A cached function becomes a new one with an empty cache, and a plain tuple with such a value a new tuple.
    """
    if type(value) is tuple:
        parts = tuple(_rebound(part, memo) for part in value)
        return value if all(map(operator.is_, parts, value)) else parts
    if isinstance(value, MethodType) and id(value.__func__) in memo:
        return MethodType(memo[id(value.__func__)], value.__self__)
    if type(value) is weakref.ref and (referent := value()) is not None and id(referent) in memo:
        return weakref.ref(memo[id(referent)])
    if isinstance(value, functools._lru_cache_wrapper):
        duplicate = _copy_captured(value.__wrapped__, memo)
        if duplicate is not value.__wrapped__:
            parameters: Any = value.cache_parameters()
            return functools.lru_cache(**parameters)(duplicate)
    return value


def everything_in(value: Any, *, most: float = math.inf, skips_errors: bool = False) -> list[Any]:
    """Return the value and the objects that it reaches by `children`, each once, without plain ones such as numbers.

    Tensors, classes and Python modules are in the list, but what they hold is not. The search ends at `most` objects.
    Looking into an object may run code of its class, such as the `__getitem__` of a mapping. If that raises, the
    exception passes through; with `skips_errors` the object is in the list, but what it holds is not.
    """
    objects: dict[int, Any] = {}
    waiting = [value]
    while waiting and len(objects) < most:
        current = waiting.pop()
        if id(current) not in objects:
            objects[id(current)] = current
            with contextlib.suppress(*((Exception,) if skips_errors else ())):
                waiting.extend([child for _, child in children(current) if not isinstance(child, _ATOMS)])
    return list(objects.values())


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a value holds directly, each as (name, object): attributes, slots, items, captured values.

    Plain values, tensors, classes and Python modules yield nothing. A function yields what it captures, a bound method
    its object and its function, an iterator what it is made of. A mapping yields its values, and not its keys. A name
    is that of an attribute or a captured value, a key that is a text, or a step, such as `[0]` or `.values()[0]`.
    """
    if isinstance(value, (*_ATOMS, torch.Tensor, type, ModuleType)):
        return
    if isinstance(value, FunctionType):
        yield from captured_by(value)
        return
    if isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
        return
    if isinstance(value, BOUND_BUILTINS):
        yield "__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args[{index}]", item) for index, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        for index, (key, item) in enumerate(value.items()):
            yield key if isinstance(key, str) else step_to(key, index), item
    elif isinstance(value, (list, tuple, Set, collections.deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_builtin_iterator(value):
        yield from hidden_state(value) or ()
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def tensor_slots(value: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield (holder, key, tensor) for the places within a value where a tensor can be replaced by assigning to them.

    The holder is a cell of a closure (its key is None), a list, or a dict of items, attributes or used globals. Other
    places are left out: direct attributes of modules (but not the dicts and lists in them, such as `_parameters`),
    attributes and defaults of functions, tuples and slots.
    """
    for holder in everything_in(value):
        if isinstance(holder, FunctionType):
            for cell in holder.__closure__ or ():
                if is_filled(cell) and isinstance(cell.cell_contents, torch.Tensor):
                    yield cell, None, cell.cell_contents
            entries: Any = [(holder.__globals__, name, item) for name, item in used_globals(holder).items()]
        elif isinstance(holder, list):
            entries = [(holder, index, item) for index, item in enumerate(holder)]
        elif isinstance(holder, (torch.nn.Module, torch.Tensor, type, ModuleType)):
            entries = []
        else:
            holders = [holder] if isinstance(holder, dict) else []
            holders += [vars(holder)] if hasattr(holder, "__dict__") else []
            entries = [(each, key, item) for each in holders for key, item in each.items()]
        yield from (entry for entry in entries if isinstance(entry[2], torch.Tensor))


def has_tensors(value: Any) -> bool:
    """Tell whether the value is or reaches a tensor, `nn.Module`, torch generator or numpy array."""
    return any(isinstance(inner, _STATE) for inner in everything_in(value))


def has_state(value: Any) -> bool:
    """Tell whether two runs that share the value could affect each other.

    That is so if it is a list, dict, set, deque or SimpleNamespace, an object with a `hidden_state`, such as a random
    generator, an instance of a class of the user's that is not an Enum, or if `has_tensors` is true. A tuple,
    frozenset, bound method or partial has state if one of its parts has; parts that are functions do not count.
    """
    if isinstance(value, (*_CONTAINERS, SimpleNamespace)) or has_hidden_state(value):
        return True
    if isinstance(value, (tuple, frozenset, MethodType, functools.partial, *BOUND_BUILTINS)):
        return any(has_state(part) for _, part in children(value) if not isinstance(part, (*_ATOMS, FunctionType)))
    is_object = not isinstance(value, (*_ATOMS, type, ModuleType, FunctionType, Enum))
    return (is_object and not is_installed_class(type(value))) or has_tensors(value)


def captured_by(function: FunctionType, *, with_globals: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function uses besides its arguments: closure, defaults, attributes, used globals.

    Each comes as (name, value); a positional default is called `default[0]`. Cells without a value are left out, and
    so are all globals of a function that belongs to an installed package or to Python itself, and without
    `with_globals` those of any function.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if is_filled(cell):
            yield name, cell.cell_contents
    yield from ((f"default[{index}]", item) for index, item in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    if with_globals:
        yield from used_globals(function).items()


def is_filled(cell: CellType) -> bool:
    """Tell whether a cell of a closure has a value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def used_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function or one within it mentions, by name, as far as they exist.

    The dict is empty if the function belongs to an installed package or to Python itself.
    """
    if is_installed(function):
        return {}
    return {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}


def own_methods(kind: type) -> list[FunctionType]:
    """Return the functions in a class and its bases; those of installed classes are left out."""
    own = [base for base in kind.__mro__ if not is_installed_class(base)]
    return [member for base in own for member in vars(base).values() if isinstance(member, FunctionType)]


def written_globals(function: FunctionType) -> set[str]:
    """Return the names of globals that a function or one within it assigns or deletes, whether they exist or not."""
    return set(_names(function.__code__, _WRITES))


def is_installed(function: FunctionType) -> bool:
    """Tell whether the function belongs to an installed package or to Python itself."""
    return function.__code__.co_filename.startswith(_INSTALLED)


def shared_state(values: list[Any]) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, that every copy of the values would share; `values` is everything a program reaches.

    Classes and Python modules are never copied. So copies share the tensors in attributes of the values' own classes
    (those of the user's), those that their methods except `__init__` use as globals, and those that functions among the
    values read as `other.tensor` from another module of the user's. Of an `nn.Module` there, only parameters count.
    """
    shared: dict[str, torch.Tensor] = {}
    for kind in {kind for value in values for kind in type(value).__mro__ if not is_installed_class(kind)}:
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                if name != "__init__":
                    for used, value in used_globals(function).items():
                        shared.update(_tensors_in(value, used))
            elif not isinstance(member, type):
                shared.update(_tensors_in(member, f"{kind.__qualname__}.{name}"))
    for function in values:
        if isinstance(function, FunctionType):
            shared.update(_state_of_other_modules(function))
    return shared


def _state_of_other_modules(function: FunctionType) -> dict[str, torch.Tensor]:
    """Return the tensors that a function reads from another module of the user's, as in `other.model`, by that name.

    They are found by name alone: attributes that its code mentions, of modules among its globals. Of an `nn.Module`
    its parameters count. Installed modules do not count.
    """
    state: dict[str, torch.Tensor] = {}
    attributes = set(function.__code__.co_names)
    for name, module in used_globals(function).items():
        if isinstance(module, ModuleType) and not is_installed_module(module):
            for attribute in attributes & vars(module).keys():
                state.update(_tensors_in(vars(module)[attribute], f"{name}.{attribute}"))
    return state


def _tensors_in(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors that a value reaches, by names that begin with `name`; if it is a module, only parameters."""
    if isinstance(value, torch.nn.Module):
        return {f"{name}.{inner}": parameter for inner, parameter in value.named_parameters()}
    tensors = (inner for inner in everything_in(value) if isinstance(inner, torch.Tensor))
    return {name if index == 0 else f"{name} ({index})": tensor for index, tensor in enumerate(tensors)}


def is_installed_class(kind: type) -> bool:
    """Tell whether a class belongs to an installed package or to Python itself; False if its module is not loaded."""
    module = sys.modules.get(kind.__module__)
    return module is not None and is_installed_module(module)


def is_installed_module(module: ModuleType) -> bool:
    """Tell whether a module belongs to an installed package or to Python itself.

    A module without a file counts as built in; `__main__` never counts.
    """
    # a module without a file is built in
    return (getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED) and module.__name__ != "__main__"


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType, operations: frozenset[str] = _USES) -> tuple[str, ...]:
    """Return the names of the globals that code and its inner functions use, each once.

    `operations` are the bytecode operations that count as a use; by default those that read, write or delete a global.
    """
    names = [str(each.argval) for each in dis.get_instructions(code) if each.opname in operations]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names(constant, operations)
    return tuple(dict.fromkeys(names))
