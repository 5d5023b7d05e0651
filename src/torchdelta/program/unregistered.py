"""State that a callable keeps outside of parameters and buffers, by path: attributes, containers, closures, classes.

One walk over everything that the callable reaches names each tensor, number, text and generator in it:

    attributes['steps']                     # an attribute of the module, a value in a closure, or a global
    attributes['layers.0.cache']['keys']    # a tensor in a dict of a submodule
    attributes['Decoder.calls']             # an attribute of the user's class

Two walks, before and after a run, show what the run has changed. Objects of installed packages are searched for tensors
and plain values, which are kept apart: many of these come and go (caches, loggers), but one that a run changes, such as
a learning rate in an optimizer, is state of the program.

Classes, and the globals that methods use, are not copied with a program: all sides share them. The walk remembers them
in a `SharedState`, which puts them back so that each run starts from the same values.

Start reading at `reached_by`; `_Walk._visit` decides what an object is.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import inspect
import pathlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from torchdelta._torch import modules, tensors
from torchdelta.compare.leaves import Container, Leaves, children_of, container_of, is_cache
from torchdelta.program import copies
from torchdelta.program.hidden_state import (
    GENERATORS,
    Parts,
    can_rewind,
    duplicate_of,
    hidden_state,
    is_unreadable,
    rewind,
)
from torchdelta.program.restore import refill

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, range, slice, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, pathlib.PurePath, uuid.UUID),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
)
"""Types of values that are leaves by themselves: equal ones are the same, and none can be changed in place."""
_PLAIN_KINDS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, property, classmethod, staticmethod)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_DATA = (
    *(*_CONTAINERS, Mapping, Set, collections.UserList, collections.UserString),
    *(SimpleNamespace, argparse.Namespace),
)
_LARGE = 1000
"""A container of so many plain values is one leaf: a path for each of them would take longer than a run."""
_LARGEST_COPY = 2**26
"""An array of so many bytes that all sides share is copied, to be put back if a run changes it."""
_MISSING: Any = object()


@dataclass(frozen=True)
class SharedState:
    """Values that all sides of a program share, as they were when they were remembered."""

    namespaces: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Classes and dicts of globals, each with the values that it had by name; `_MISSING` stands for none."""
    contents: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Containers and dicts of attributes below these values, by id, each with a shallow copy."""
    hidden: list[tuple[Any, Any]] = field(default_factory=list)
    """Arrays and objects without attributes to read, such as random generators, among these values, with copies."""
    slots: list[tuple[Any, MemberDescriptorType, Any]] = field(default_factory=list)
    """Objects of the user's classes among these values, with each slot and its value; `_MISSING` stands for none."""
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    """Cells of the closures of functions that all sides share, each with its value."""

    def put_back(self) -> None:
        """Give the classes, globals, containers, slots, closures, arrays and objects without attributes what they had.

        Attributes that a class got since are deleted, and so are remembered globals that did not exist then.
        """
        for holder, values in self.namespaces:
            now = vars(holder) if isinstance(holder, type) else holder
            added = set(_data_of(holder)) - values.keys() if isinstance(holder, type) else ()
            for name, value in [*values.items(), *((name, _MISSING) for name in added)]:
                if now.get(name, _MISSING) is not value:
                    _assign(holder, name, value)
        for container, before in self.contents.values():
            if not _has_same_items(container, before):
                refill(container, before)
        for value, before in self.hidden:
            rewind(value, before)
        for holder, slot, value in self.slots:
            if _read_slot(holder, slot) is not value:
                # not by `setattr`, which the user's class may refuse
                slot.__delete__(holder) if value is _MISSING else slot.__set__(holder, value)
        for cell, value in self.cells:
            cell.cell_contents = value


@dataclass(frozen=True)
class UnregisteredState:
    """What a callable reaches: the leaves of its unregistered state by path, and the state that all sides share."""

    leaves: Leaves = field(default_factory=dict)
    installed: Leaves = field(default_factory=dict)
    """The plain values below objects of installed packages, by path."""
    shared: SharedState = field(default_factory=SharedState)
    unread: dict[str, str] = field(default_factory=dict)
    """The classes of objects whose state cannot be read, or not be put back for the next side, by path."""


def reached_by(call: Callable[..., Any], registered: Mapping[str, torch.Tensor]) -> UnregisteredState:
    """Return the unregistered state that a callable reaches, by path, and what it shares with other sides.

    `registered` has the parameters and buffers by path: where one of them is met again, a `Container` that names it
    stands for it. Tensors and arrays are the callable's own, not copies. Objects that keep their state where Python
    cannot read it are in `unread`; other objects of the standard library without attributes to read are left out,
    unless `hidden_state` knows them.
    """
    walk = _Walk({id(tensor): path for path, tensor in registered.items()})
    walk.run(call)
    return UnregisteredState(walk.leaves, walk.installed_values, walk.shared, walk.unread)


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user's code gave to a plain tensor or parameter, such as `main_grad`, by name.

    Those of a compiler are left out. Tensors of other classes have none.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return {}
    return {name: value for name, value in vars(tensor).items() if not modules.is_of_compiler(name)}


def is_attribute(path: str) -> bool:
    """Tell whether a path is one of unregistered state, as `_Place.path` makes them."""
    return path.startswith("attributes[")


def name_of(path: str) -> str:
    """Return the start of a path up to the end of its first key: `attributes['cache']` of `attributes['cache'][0]`."""
    return path[: _end_of_key(path) + 1]


def _end_of_key(path: str) -> int:
    """Return the index of the bracket that ends the first key of a path; the key is the `repr` of a text."""
    quote = path[path.index("[") + 1]
    index = path.index("[") + 2
    while path[index] != quote:
        index += 2 if path[index] == "\\" else 1
    return index + 1


@dataclass(frozen=True)
class _Place:
    """An object on the way of the walk: its name in the program, and the steps from there."""

    name: str
    steps: str
    value: Any
    is_installed: bool = False
    """Whether it belongs to an object of an installed package."""
    is_shared: bool = False
    """Whether all sides share it."""
    above: tuple[Any, ...] = ()
    """The containers that it is in; they are kept, because another object may get the id of one that is gone."""

    @property
    def path(self) -> str:
        """The path of the object in the results, as in `attributes['cache'][0]`."""
        return f"attributes[{self.name!r}]{self.steps}"

    def child(self, step: str, value: Any) -> _Place:
        """Return the place of an item or attribute of this object."""
        return dataclasses.replace(self, steps=self.steps + step, value=value, above=(*self.above, self.value))

    def member(self, name: str, value: Any) -> _Place:
        """Return the place of an attribute of a module or another named holder: its name goes on with a dot."""
        own = f"{self.name}{self.steps}"
        return dataclasses.replace(self, name=f"{own}.{name}" if own else name, steps="", value=value, above=())

    def at(self, name: str, value: Any, **changes: Any) -> _Place:
        """Return the place of a value that has a name of its own, such as one in a closure.

        `changes` are other fields of the place.
        """
        return dataclasses.replace(self, name=name, steps="", value=value, above=(), **changes)


class _Walk:
    """One walk over a callable; `leaves`, `installed_values`, `shared` and `unread` are its results."""

    def __init__(self, registered: Mapping[int, str]) -> None:
        """Take the paths of the registered tensors by id; nothing is visited yet."""
        self.registered = registered
        self.leaves: Leaves = {}
        self.installed_values: Leaves = {}
        self.shared = SharedState()
        self.unread: dict[str, str] = {}
        # objects are kept too, because another object may get the id of one that is gone
        self.visited: dict[int, tuple[Any, str]] = {}
        self.installed: dict[type, bool] = {}
        self.globals: set[tuple[int, str]] = set()
        """The globals that were met, each by the id of its namespace and its name: several methods may use one."""

    def run(self, call: Callable[..., Any]) -> None:
        """Visit the callable and everything that it reaches, and fill the results."""
        waiting = [_Place("", "", call)]
        while waiting:
            waiting.extend(reversed(list(self._visit(waiting.pop()))))
        self._name_ids()

    def _name_ids(self) -> None:
        """Replace the leaves that are the `id` of an object that was met by a `Container` that names its path.

        An id is another number in each copy of a program, or by chance the same.
        """
        paths = {**self.registered, **{key: path for key, (_, path) in self.visited.items() if path}}
        for path, leaf in self.leaves.items():
            if type(leaf) is int and leaf in paths:
                self.leaves[path] = Container(f"the id of {paths[leaf]}")

    def _visit(self, place: _Place) -> Iterator[_Place]:
        """Record the leaf at a place, if it is one, and yield the places that it reaches.

        Below an object of an installed package, plain values are recorded in `installed_values`, and objects whose
        state is hidden are not recorded, except for random generators; Python modules are skipped. An object with
        hidden state that all sides share is added to `shared.hidden` too.
        """
        value = place.value
        if isinstance(value, torch.Tensor):
            self._record(place, self._tensor_leaf(value))
            yield from self._attributes_of(place, value)
        elif isinstance(value, PLAIN):
            self._record(place, value)
        elif isinstance(value, (bytearray, np.ndarray)) and not getattr(value, "dtype", np.dtype(int)).hasobject:
            self._record(place, self._array_leaf(place, value))
        elif isinstance(value, GENERATORS):
            yield from self._visit_hidden(place, hidden_state(value) or [])
        elif is_unreadable(value) or (place.is_shared and not can_rewind(value)):
            if not place.is_installed:
                self.unread[place.path] = type(value).__name__
        elif (state := hidden_state(value)) is not None:
            if not place.is_installed and self._is_new(value, place):
                yield from self._visit_hidden(place, state)
        elif isinstance(value, threading.local):
            yield dataclasses.replace(place, value=vars(value))
        elif isinstance(value, type):
            yield from self._visit_class(value)
        elif isinstance(value, torch.nn.Module):
            yield from self._visit_module(place, value)
        elif isinstance(value, _FUNCTIONS):
            self._record_function(place, value)
            yield from self._visit_function(place, value)
        elif isinstance(value, (*copies.BOUND_BUILTINS, MethodDescriptorType)):
            self._record_function(place, value)
            if isinstance(value, copies.BOUND_BUILTINS) and copies.has_state(value.__self__):
                yield dataclasses.replace(place, value=value.__self__)
        elif not isinstance(value, ModuleType):
            yield from self._visit_object(place, value)

    def _visit_hidden(self, place: _Place, state: Parts) -> Iterator[_Place]:
        """Record the leaves of an object's hidden state, and yield the places of what an iterator is made of.

        A state that all sides share is added to `shared.hidden`, with a copy, or to `unread` if it cannot be copied.
        """
        value = place.value
        if place.is_shared:
            try:
                self.shared.hidden.append((value, duplicate_of(value)))
            except Exception:  # a source of randomness of the system, for example
                self.unread[place.path] = type(value).__name__
                return
        for step, part in state:
            if isinstance(part, tuple):
                yield place.child(step, part)
            else:
                self._record(place.child(step, part), part)

    def _record(self, place: _Place, leaf: Any) -> None:
        """Add a leaf to `leaves` by its path, or to `installed_values` if it is plain and below an installed object.

        If the path is taken, primes (′) are appended to it until it is free.
        """
        path = place.path
        while path in self.leaves or path in self.installed_values:
            path += "′"
        leaves = self.installed_values if place.is_installed and isinstance(leaf, PLAIN) else self.leaves
        leaves[path] = leaf

    def _record_function(self, place: _Place, function: Any) -> None:
        """Record a `Container` that names a function, which a run may replace by another; not the callable itself.

        Another implementation defines functions of its own elsewhere, so the user's go by their plain name. Bound
        methods and partials are recorded by what they are made of. Nothing is recorded for functions of classes and
        globals, or below an object of an installed package.
        """
        is_compound = isinstance(function, (MethodType, functools.partial))
        if not place.name or place.is_shared or place.is_installed or is_compound:
            return
        is_own = isinstance(function, FunctionType) and not copies.is_installed(function)
        name = function.__name__ if is_own else f"{getattr(function, '__module__', None)}.{function.__qualname__}"
        self._record(place, Container(f"the function {name}"))

    def _attributes_of(self, place: _Place, tensor: torch.Tensor) -> Iterator[_Place]:
        """Yield the places of a tensor's attributes and gradient hooks, unless the tensor was met before."""
        attributes, hooks = attributes_of(tensor), tensors.hooks_of(tensor)
        if (attributes or hooks) and self._is_new(vars(tensor)):
            yield from (place.child(f".{name}", value) for name, value in attributes.items())
            yield from (place.child(f".hooks[{index}]", hook) for index, hook in enumerate(hooks))

    def _tensor_leaf(self, tensor: torch.Tensor) -> Any:
        """Return the tensor itself, or a `Container` that names its path if it is a registered one."""
        path = self.registered.get(id(tensor))
        return tensor if path is None else Container(f"the tensor that is {path}")

    def _array_leaf(self, place: _Place, value: bytearray | np.ndarray[Any, Any]) -> Any:
        """Return what stands for an array: bytes for a `bytearray`, and otherwise the array itself.

        Of an array that all sides share it is a copy, because the next run writes to the same one; both are added to
        `shared.hidden`. A read-only one stays itself. So does one beyond `_LARGEST_COPY`, which is added to `unread`,
        because it is not put back.
        """
        leaf = bytes(value) if isinstance(value, bytearray) else value
        is_copied = place.is_shared and (isinstance(value, bytearray) or value.flags.writeable)
        if not is_copied:
            return leaf
        if (len(value) if isinstance(value, bytearray) else value.nbytes) > _LARGEST_COPY:
            self.unread[place.path] = type(value).__name__
            return leaf
        leaf = leaf if isinstance(leaf, bytes) else leaf.copy()
        self.shared.hidden.append((value, leaf))
        return leaf

    def _is_new(self, value: Any, place: _Place | None = None) -> bool:
        """Tell whether an object is met for the first time; from then on it is not.

        If it was met before, a `Container` that names its first place is recorded at `place`; nothing is recorded
        without a place or a name, or below an object of an installed package.
        """
        if id(value) not in self.visited:
            self.visited[id(value)] = value, place.path if place else ""
            return True
        if place and place.name and not place.is_installed:
            self._record(place, Container(f"the {type(value).__qualname__} that is {self.visited[id(value)][1]}"))
        return False

    def _is_installed(self, kind: type) -> bool:
        """Tell whether a class belongs to an installed package or to Python itself; answers are kept."""
        if kind not in self.installed:
            self.installed[kind] = copies.is_installed_class(kind)
        return self.installed[kind]

    def _visit_module(self, place: _Place, module: torch.nn.Module) -> Iterator[_Place]:
        """Yield the attributes, submodules, hooks and unregistered tensors of a module, and the values of its class.

        Attributes of the user's on registered tensors are yielded too. Attributes that are caches (`is_cache`) are left
        out. A module that was met before yields nothing. The attributes of one that all sides share are added to
        `shared`, and so is which parameters, buffers and submodules it has.
        """
        if not self._is_new(module, place):
            return
        if place.is_shared:
            self._remember(module)
            for registry in modules.registries_of(module):
                self.shared.contents[id(registry)] = (registry, registry.copy())
        yield from self._visit_class(type(module))
        place = dataclasses.replace(place, is_installed=False)
        for name, value in modules.own_attributes(module).items():
            if not is_cache(type(module), name):
                yield place.member(name, value)
        if isinstance(module, torch.jit.ScriptModule):
            for name, value in modules.script_attributes(module).items():
                yield place.member(name, value)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) not in self.registered:
                yield place.member(name, tensor)
            else:
                yield from self._attributes_of(place.member(name, tensor), tensor)
        for name, child in module.named_children():
            yield place.member(name, child)
        for index, hook in enumerate(modules.hooks_of(module)):
            yield place.member(f"hooks[{index}]", hook)

    def _visit_function(self, place: _Place, function: Any) -> Iterator[_Place]:
        """Yield what a function captures, each by its own name, and what a method or a partial is made of.

        A function or partial that was met before yields nothing. Attributes of the user's functions, and the closure of
        a function that all sides share, are added to `shared`.
        """
        if isinstance(function, MethodType):
            yield dataclasses.replace(place, value=function.__self__)
            yield dataclasses.replace(place, value=function.__func__)
            return
        if not self._is_new(function):
            return
        if isinstance(function, functools.partial):
            yield dataclasses.replace(place, value=function.func)
            yield from (place.child(f".args[{index}]", item) for index, item in enumerate(function.args))
            yield from (place.at(name, item) for name, item in function.keywords.items())
            return
        is_installed = copies.is_installed(function)
        if vars(function) and not is_installed:  # a function may count its calls in an attribute of its own
            self._remember(function)
        if place.is_shared:
            self._remember_cells(function)
        for name, value in copies.captured_by(function, with_globals=False):
            if not modules.is_of_compiler(name):
                yield place.at(name, value, is_installed=is_installed)
        yield from self._visit_globals(function)

    def _visit_globals(self, function: FunctionType) -> Iterator[_Place]:
        """Yield the values of the globals that a function uses; an installed function has none.

        For a module of the user's, what the function reads from it is yielded (`_visit_own_module`); installed modules
        are left out. Used globals that are data, and the names that the function writes, go to `shared.namespaces`.
        """
        if copies.is_installed(function):
            return
        used = copies.used_globals(function)
        written = {name: function.__globals__.get(name, _MISSING) for name in copies.written_globals(function)}
        data = {name: value for name, value in used.items() if not isinstance(value, _CODE)}
        self.shared.namespaces.append((function.__globals__, {**written, **data}))
        for name, value in used.items():
            if isinstance(value, ModuleType) and not copies.is_installed_module(value):
                yield from self._visit_own_module(function, name, value)
            elif not isinstance(value, ModuleType) and self._is_new_global(function.__globals__, name):
                yield _Place(name, "", value, is_shared=True)

    def _visit_own_module(self, function: FunctionType, name: str, module: ModuleType) -> Iterator[_Place]:
        """Yield what a function may read as `module.value` from a module of the user's: functions and data.

        Each name in the function's code that the module also has counts, however it is used. Installed functions, and
        code other than functions, are left out. A function's place is `name` alone. Data goes to `shared.namespaces`.
        """
        names = sorted(set(function.__code__.co_names) & vars(module).keys())
        functions = [vars(module)[key] for key in names if isinstance(vars(module)[key], FunctionType)]
        yield from (_Place(name, "", each, is_shared=True) for each in functions if not copies.is_installed(each))
        used = {key: vars(module)[key] for key in names if not isinstance(vars(module)[key], _CODE)}
        self.shared.namespaces.append((vars(module), used))
        new = {key: value for key, value in used.items() if self._is_new_global(vars(module), key)}
        yield from (_Place(f"{name}.{key}", "", value, is_shared=True) for key, value in new.items())

    def _is_new_global(self, namespace: dict[str, Any], name: str) -> bool:
        """Tell whether a name of a namespace is met for the first time; from then on it is not."""
        key = id(namespace), name
        is_new = key not in self.globals
        self.globals.add(key)
        return is_new

    def _visit_class(self, kind: type) -> Iterator[_Place]:
        """Yield the values that a class and its bases keep, and those that their methods capture or use as globals.

        Only the user's classes count, each once, and not the method `__init__`. The values and the closures of the
        methods are added to `shared`.
        """
        for base in kind.__mro__:
            if self._is_installed(base) or not self._is_new(base):
                continue
            data = _data_of(base)
            self.shared.namespaces.append((base, data))
            yield from (_Place(f"{base.__name__}.{name}", "", value, is_shared=True) for name, value in data.items())
            for name, member in vars(base).items():
                for function in _functions_in(member) if name != "__init__" else ():
                    if self._is_new(function):
                        self._remember_cells(function)
                        captured = copies.captured_by(function, with_globals=False)
                        yield from (_Place(inner, "", value, is_shared=True) for inner, value in captured)
                        yield from self._visit_globals(function)

    def _visit_object(self, place: _Place, value: Any) -> Iterator[_Place]:
        """Record a `Container` for an object or container, and yield the places of its attributes or items.

        An installed object that is neither a container nor a dataclass is not recorded, nor are large containers of
        plain values below it; one of the standard library is left out. Of the callable itself only the attributes are
        yielded. A large container of plain values becomes a few leaves. An object that was met before yields nothing,
        and a plain container inside of itself neither. A value that all sides share is added to `shared`.
        """
        kind = type(value)
        is_container = isinstance(value, _DATA)
        is_own = not self._is_installed(kind)
        if is_own:
            yield from self._visit_class(kind)
            place = dataclasses.replace(place, is_installed=False)
        elif not is_container:
            if _is_of_standard_library(kind):
                return
            is_data = dataclasses.is_dataclass(value)
            place = dataclasses.replace(place, is_installed=place.is_installed or not is_data)
        if is_container and not is_own:
            if any(value is container for container in place.above):
                return
        elif not self._is_new(value, place):
            return
        if place.is_shared:
            self._remember(value)
        if not place.name and not is_container:  # the callable itself: its attributes have their own names
            yield from (place.member(step.lstrip("."), child) for step, child in _children(value))
            return
        if leaves := _large_leaves(value):
            if not place.is_installed:
                for step, leaf in leaves:
                    self._record(place.child(step, leaf), leaf)
            return
        children = _children(value)
        if not place.is_installed:
            self._record(place, container_of(value, children))
        yield from (place.child(step, child) for step, child in children)

    def _remember_cells(self, function: FunctionType) -> None:
        """Add the filled cells of a function's closure, with their values, to `shared.cells`.

        Nothing is added for an installed function.
        """
        if not copies.is_installed(function):
            cells = [cell for cell in function.__closure__ or () if copies.is_filled(cell)]
            self.shared.cells.extend((cell, cell.cell_contents) for cell in cells)

    def _remember(self, value: Any) -> None:
        """Add a container, and the dict of an object's attributes, with shallow copies to `shared.contents`, once.

        Of a `UserDict` or `UserList`, what it wraps is such a container. The slots that the user's classes define are
        added to `shared.slots`.
        """
        items = value.data if isinstance(value, (collections.UserList, collections.UserDict)) else value
        containers: tuple[Any, Any] = items, getattr(value, "__dict__", None)
        for container in containers:
            is_plain = isinstance(container, (list, dict, set, collections.deque))
            if is_plain and id(container) not in self.shared.contents:
                self.shared.contents[id(container)] = (container, container.copy())
        for kind in type(value).__mro__:
            if not self._is_installed(kind):
                slots = [member for member in vars(kind).values() if isinstance(member, MemberDescriptorType)]
                self.shared.slots.extend((value, slot, _read_slot(value, slot)) for slot in slots)


def _read_slot(holder: Any, slot: MemberDescriptorType) -> Any:
    """Return the value of a slot of an object, or `_MISSING` if it has none."""
    try:
        return slot.__get__(holder)
    except AttributeError:
        return _MISSING


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the items or attributes of an object as (step, value); empty if there are none or they cannot be read."""
    try:
        return children_of(value) or []
    except Exception:  # a property or an iterator of the user's raised
        return []


def _large_leaves(value: Any) -> list[tuple[str, Any]]:
    """Return a container of at least `_LARGE` plain values as few leaves, (step, leaf); empty for any other value.

    Its floats are one array, which is judged as numbers are, and the rest is a copy in which the class `float` stands
    for each of them. A set has no order, and is one leaf with its floats.
    """
    if type(value) not in _CONTAINERS or len(value) < _LARGE:
        return []
    items = [*value, *value.values()] if isinstance(value, dict) else value
    if not set(map(type, items)) <= _PLAIN_KINDS:
        return []
    if isinstance(value, (set, frozenset)):
        return [("", frozenset(value))]
    values = list(value.values()) if isinstance(value, dict) else list(value)
    floats = np.array([each for each in values if type(each) is float])
    rest = tuple(float if type(each) is float else each for each in values)
    if len(floats) == len(values) and not isinstance(value, dict):
        return [("", floats)]
    copied = dict(zip(value, rest, strict=True)) if isinstance(value, dict) else rest
    return [("", copied), (".floats", floats)] if floats.size else [("", copied)]


def _functions_in(member: Any) -> list[FunctionType]:
    """Return the functions that an entry of a class is made of: a method, or the parts of a property.

    A function that a decorator wraps follows its wrapper; a wrapper of an installed package is left out. The list is
    empty for any other entry.
    """
    functions: list[FunctionType] = []
    for part in (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,):
        inner = getattr(part, "__func__", getattr(part, "func", part))
        while inner is not None and not any(inner is function for function in functions):
            # not of an object that makes up any attribute, such as a proxy: it would be unwrapped for ever
            is_wrapper = inspect.getattr_static(inner, "__wrapped__", None) is not None
            wrapped = getattr(inner, "__wrapped__", None) if is_wrapper else None
            if isinstance(inner, FunctionType) and (wrapped is None or not copies.is_installed(inner)):
                functions.append(inner)
            inner = wrapped
    return functions


def _data_of(kind: type) -> dict[str, Any]:
    """Return the entries of a class that are neither code nor descriptors, by name, without special ones."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") or name == "_abc_impl" or isinstance(value, _CODE))
        and (isinstance(value, PLAIN) or not hasattr(type(value), "__get__"))
    }


def _is_of_standard_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _assign(holder: Any, name: str, value: Any) -> None:
    """Set, or delete if the value is missing, an attribute of a class or an entry of a dict."""
    if isinstance(holder, type):
        if value is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, value)
    elif value is _MISSING:
        del holder[name]
    else:
        holder[name] = value


def _has_same_items(container: Any, before: Any) -> bool:
    """Tell whether a container has the very objects of `before` in their order; a set, equal items in any order."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(key is old_key and item is old for (key, item), (old_key, old) in pairs)
    if isinstance(container, set):
        return bool(container == before)
    return all(item is old for item, old in zip(container, before, strict=True))
