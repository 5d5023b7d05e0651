"""Take two values apart into leaves and pair them by path; no leaf is dropped.

The kind of a container counts: a list that became a tuple is a difference, and so is a dict in another order. An object
with attributes that is not a leaf itself (a cache, a distribution, a user's class) is taken apart by its attributes, so
that tensors inside it are found.

    leaves_of([tensor], "outputs")      # {"outputs": Container("list"), "outputs[0]": tensor}

Start with `leaves_of` and `align`.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributions.utils import lazy_property

from torchdelta._torch import tensors
from torchdelta.records.comparison import UnmatchedLeaf

_NAMED = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    Enum,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    np.generic,
)
"""Types whose equal values have equal texts, so that a path can hold them."""
_LEAST_ADDRESS = 2**22
"""No object of a process lies below this address: programs are loaded at 0x400000 or above."""
_ATOMS = (
    *_NAMED,
    *(bytearray, range, slice, os.PathLike, torch.memory_format, ModuleType, FunctionType, BuiltinFunctionType),
)
_BUILT_IN = (dict, list, tuple, set, frozenset, deque)
_CACHES = (functools.cached_property, lazy_property)
_TRANSPARENT: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__)
"""Constructors of classes that keep all state in attributes; an extension may keep it where Python cannot read it."""

Child = tuple[str, Any]
Leaves = dict[str, Any]
"""Every leaf of a value by its path, in order, with a `Container` for each container on the way."""


class Pair(NamedTuple):
    """Two leaves of the same path, the truth's leaf there (None without a truth), and those of noisy runs."""

    path: str
    reference: Any
    candidate: Any
    truth: Any = None
    noisy: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Container:
    """Stands for a container at its path: two of the same kind, with their common keys in one order, are the same."""

    kind: str
    keys: tuple[str, ...] = ()
    """The steps to the items of a mapping, in its order; other containers have none."""

    def is_same_as(self, other: object) -> bool:
        """Tell whether the other is a container of the same kind whose common keys are in the same order.

        The other may be any object; an array would answer `==` with an array.
        """
        return isinstance(other, Container) and self.kind == other.kind and self.has_order_of(other)

    def has_order_of(self, other: Container) -> bool:
        """Tell whether the keys that both containers have are in the same order."""
        if self.keys == other.keys:
            return True
        own, others = set(self.keys), set(other.keys)
        return [key for key in self.keys if key in others] == [key for key in other.keys if key in own]

    def __str__(self) -> str:
        """Return the kind."""
        return self.kind


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that raised when it was taken apart."""

    kind: str
    error: str

    def __str__(self) -> str:
        """Return in words the kind of the value, and the error that it raised."""
        return f"a {self.kind} that cannot be taken apart ({self.error})"


def leaves_of(value: Any, path: str = "value") -> Leaves:
    """Return every leaf of a value by its path, which starts with `path`; each container on the way is a `Container`.

    A value that is a leaf itself is the only entry, unless it is a tensor subclass with attributes, which are leaves
    beside it. A value that raises when it is taken apart becomes an `Unreadable`. A container inside of itself becomes
    a `Container` that names the outer one's path. Of two leaves with one path, the later one gets a `′` at its end.
    """
    leaves: Leaves = {}
    waiting: list[tuple[str, Any, dict[int, Child]]] = [(path, value, {})]
    while waiting:
        path, value, above = waiting.pop()
        while path in leaves:  # an attribute may be called `a.b`
            path += "′"
        try:
            children = children_of(value)
        except Exception as error:
            leaves[path] = Unreadable(type(value).__qualname__, brief(f"{type(error).__name__}: {error}"))
            continue
        if children is None:
            leaves[path] = value
            is_new_tensor = isinstance(value, torch.Tensor) and id(value) not in above
            children = tensors.attributes(value) if is_new_tensor else []
        elif id(value) in above:
            leaves[path] = Container(f"the {_kind(value)} that is {above[id(value)][0]}")
            children = []
        else:
            leaves[path] = container_of(value, children)
        if children:
            # the value itself is kept too, because another value may get the id of one that is gone
            within = {**above, id(value): (path, value)}
            waiting.extend((path + step, child, within) for step, child in reversed(children))
    return leaves


def align(
    reference: Leaves, candidate: Leaves, truth: Leaves | None = None, noisy: Sequence[Leaves] = ()
) -> tuple[list[Pair], list[UnmatchedLeaf]]:
    """Return the pairs of leaves of the same path, with truth and noisy runs, and the leaves without a partner.

    Containers of the same kind and order are not among the pairs, because they are structure and not evidence. A pair's
    truth is None if the truth does not have the path, and noisy runs without the path are left out of it.
    """
    truth = truth or {}
    pairs = [
        Pair(path, value, candidate[path], truth.get(path), tuple(run[path] for run in noisy if path in run))
        for path, value in reference.items()
        if path in candidate and not (isinstance(value, Container) and value.is_same_as(candidate[path]))
    ]
    if reference.keys() == candidate.keys():
        return pairs, []
    return pairs, [*_unmatched("reference", reference, candidate), *_unmatched("candidate", candidate, reference)]


def describe(value: Any) -> str:
    """Return in a few words what a leaf is: dtype, class and shape of a tensor or array, `repr` of any other object.

    A `Container` or `Unreadable` is described by its `str`, an object whose `repr` raises by its class. Texts are cut
    to one line of 60 characters.
    """
    if isinstance(value, torch.Tensor):
        return f"{tensors.dtype_name(value.dtype)} {tensors.describe(value)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of shape {value.shape}"
    if isinstance(value, (Container, Unreadable)):
        return brief(str(value), 60)
    try:
        return brief(repr(value), 60)
    except Exception:
        return f"a {type(value).__qualname__} that cannot be printed"


def brief(text: str, limit: int = 200) -> str:
    """Return the first line of a text; a longer one than the limit is cut and ends in `…`."""
    line = text.partition("\n")[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _unmatched(side: str, leaves: Leaves, others: Leaves) -> list[UnmatchedLeaf]:
    """Return the leaves of one side whose paths the other side does not have."""
    return [
        UnmatchedLeaf(path=path, side=side, what=describe(value))
        for path, value in leaves.items()
        if path not in others
    ]


def container_of(value: Any, children: Sequence[Child]) -> Container:
    """Return what stands for a container with these children: its kind and, of a mapping, the order of its keys."""
    is_ordered = isinstance(value, (torch.nn.ParameterDict, Mapping))
    keys = tuple(step for step, _ in children if step.startswith("[")) if is_ordered else ()
    return Container(_kind(value), keys)


def _kind(value: Any) -> str:
    """Return the kind of a container in words: its class, and for a tensor or array also such facts as its shape."""
    if isinstance(value, torch.Tensor):
        return tensors.describe(value)
    if isinstance(value, np.ndarray):
        return f"{type(value).__qualname__} of {value.dtype}, shape {value.shape}"
    if isinstance(value, deque) and value.maxlen is not None:
        return f"{type(value).__qualname__} of at most {value.maxlen}"
    return type(value).__qualname__


def children_of(value: Any) -> list[Child] | None:
    """Return the children of a container, each as its step in the path and its value, or None for a leaf.

    A tensor that is sparse, nested, quantized or a wrapper has its components, a collection or array of objects its
    items, and another object its attributes; a subclass of a built-in collection has both. Ordinary tensors and arrays,
    atoms such as numbers, strings and functions, and objects that may keep state outside of attributes are leaves.
    """
    if isinstance(value, torch.Tensor):
        return tensors.components(value)
    if isinstance(value, _ATOMS):
        return None
    if isinstance(value, np.ndarray):
        return _array_items(value)
    items = _items(value)
    if items is None:
        state = _state(value)
        return None if state is None else [(f".{name}", item) for name, item in state.items()]
    if isinstance(value, _BUILT_IN):
        items = [*items, *_attributes_beside(value)]
    return items


def _items(value: Any) -> list[Child] | None:
    """Return the items of a mapping, set, sequence, partial or method by their steps, or None for any other object.

    The step is `[key]` in a mapping, `.field` in a named tuple, `[index]` in a sequence, and `{index}` in a set, which
    is sorted. A partial or a method has its parts, such as `.func`. Texts and bytes count as sequences, so the caller
    has to handle them before.
    """
    if isinstance(value, (torch.nn.ParameterDict, Mapping)):
        return list(_entries(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, Set):
        return [(f"{{{index}}}", item) for index, item in enumerate(sorted(value, key=_order))]
    if isinstance(value, (torch.nn.ParameterList, torch.nn.ModuleList, Sequence)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    return None


def _entries(mapping: Any) -> Iterator[Child]:
    """Yield the values of a mapping as (`step_to` it, value) in its order.

    A key that names no step is yielded as a child of its own, at `.keys()[index]`, before its value.
    """
    for index, (key, item) in enumerate(mapping.items()):
        if not _is_name(key):
            yield f".keys()[{index}]", key
        yield step_to(key, index), item


def step_to(key: Any, index: int) -> str:
    """Return the step to the value of a mapping's key, the one at this index: `[key]`, or `.values()[index]`.

    It is the latter for keys whose text does not identify them, or not in another run: objects, tensors, and integers
    that may be the `id` of an object.
    """
    return f"[{key!r}]" if _is_name(key) else f".values()[{index}]"


def _is_name(key: Any) -> bool:
    """Tell whether a key, or each part of one that is a tuple, has a text that identifies it in every run."""
    return all(
        isinstance(part, _NAMED) and not (isinstance(part, (int, np.integer)) and part >= _LEAST_ADDRESS)
        for part in (key if isinstance(key, tuple) else (key,))
    )


def _order(item: Any) -> tuple[int, Any]:
    """Return the key by which the items of a set are sorted: numbers first, by size, then others by their `repr`."""
    # a set has no order: numbers are paired by size, so that rounding moves none, and other items by their text
    return (0, item) if isinstance(item, (int, float)) else (1, repr(item))


def _array_items(array: np.ndarray[Any, Any]) -> list[Child] | None:
    """Return the children of a masked array or of an array of objects, or None for any other array.

    Those of a masked array are `.data`, with zeros where it is masked, and `.mask`. Those of an array of objects are
    its elements, by their indices such as `[0, 1]`.
    """
    if isinstance(array, np.ma.MaskedArray):
        return [
            (".data", np.where(array.mask, np.zeros((), array.dtype), array.data)),
            (".mask", np.asarray(array.mask)),
        ]
    if array.dtype.hasobject:
        return [(str(list(index)), item) for index, item in np.ndenumerate(array)]
    return None


def _attributes_beside(value: Any) -> list[Child]:
    """Return the attributes of a container's subclass, except those that are None or mirror an item of a mapping."""
    items: Any = value if isinstance(value, Mapping) else {}
    state = getattr(value, "__dict__", {}).items()
    return [(f".{name}", item) for name, item in state if item is not None and items.get(name) is not item]


def _state(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, those in slots included, by name, or None if its state may be elsewhere.

    It may be elsewhere if an extension constructs its class, or if it has neither `__dict__` nor a slot with a value.
    The value of a cached property is left out, unless an ordinary attribute has the same object.
    """
    kind = type(value)
    if not isinstance(kind.__new__, FunctionType) and kind.__new__ not in _TRANSPARENT:
        return None
    slots = dict(_slots(value))
    if not slots and not hasattr(value, "__dict__"):
        return None
    state = {**getattr(value, "__dict__", {}), **slots}
    cached = {name for name in state if is_cache(kind, name)}
    uncached = {id(item) for name, item in state.items() if name not in cached}
    # a cached attribute is computed from the others and may exist on one side only; but a distribution keeps a
    # parameter under such a name too
    return {name: item for name, item in state.items() if name not in cached or id(item) in uncached}


def is_cache(kind: type, name: str) -> bool:
    """Tell whether instances of a class keep the value of a cached property under this name."""
    entries = (vars(base)[name] for base in kind.__mro__ if name in vars(base))
    return isinstance(next(entries, None), _CACHES)


def _slots(value: Any) -> Iterator[Child]:
    """Yield name and value of the attributes that an object keeps in slots, its base classes' included.

    Slots without a value are left out. The name of a private slot is the mangled one.
    """
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_private = name.startswith("__") and not name.endswith("__")
            actual = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, actual):
                yield actual, getattr(value, actual)
