"""Take two values apart into leaves and pair them by path: nothing is zipped, nothing is dropped.

The kind of a container counts: a list that became a tuple is a difference. Whatever has attributes and is no leaf
itself (caches, distributions, user classes) is taken apart by its attributes, so that a tensor inside it is found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from torchdelta._torch import tensors
from torchdelta.records.comparison import Unmatched

_ATOMS = (torch.Tensor, np.ndarray, np.generic, str, bytes, bool, int, float, complex, type(None))
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)

Child = tuple[str, Any]
Leaves = dict[str, Any]
"""Every leaf of a value by its path, in order, with a `Container` for each container on the way."""


@dataclass(frozen=True)
class Pair:
    """Two leaves of the same path, and the truth's leaf there; None where no truth was computed."""

    path: str
    reference: Any
    candidate: Any
    truth: Any = None


@dataclass(frozen=True)
class Container:
    """Stands for a container at its path: two of the same kind are equal."""

    kind: str

    def __str__(self) -> str:
        return self.kind


def leaves_of(value: Any, path: str = "value") -> Leaves:
    """Take a value apart."""
    found: Leaves = {}
    _walk(value, path, found, frozenset())
    return found


def align(reference: Leaves, candidate: Leaves, truth: Leaves | None = None) -> tuple[list[Pair], list[Unmatched]]:
    """Pair leaves by path, with the truth's leaf where there is one; name those without partner.

    Containers of the same kind are structure and no evidence: only those that differ are among the pairs.
    """
    truth = truth or {}
    pairs = [
        Pair(path, value, candidate[path], truth.get(path))
        for path, value in reference.items()
        if path in candidate and not (isinstance(value, Container) and value == candidate[path])
    ]
    return pairs, [*_alone("reference", reference, candidate), *_alone("candidate", candidate, reference)]


def _alone(side: str, leaves: Leaves, others: Leaves) -> list[Unmatched]:
    return [
        Unmatched(path=path, side=side, what=describe(value)) for path, value in leaves.items() if path not in others
    ]


def describe(value: Any) -> str:
    """Say what a leaf is in a few words."""
    if isinstance(value, torch.Tensor):
        return f"{tensors.dtype_name(value)} tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of shape {value.shape}"
    text = str(value) if isinstance(value, Container) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _walk(value: Any, path: str, found: Leaves, above: frozenset[int]) -> None:
    children = _children(value)
    if children is None:
        found[path] = value
        return
    found[path] = Container(_kind(value))
    if id(value) in above:  # a value inside itself was taken apart further up
        return
    for step, child in children:
        _walk(child, path + step, found, above | {id(value)})


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} of {tensors.dtype_name(value)}, {tensors.layout_name(value)}"
    return type(value).__qualname__


def _children(value: Any) -> list[Child] | None:
    """Return what a container holds, each with its step in the path; None of a leaf."""
    if isinstance(value, torch.Tensor):
        return tensors.components(value)
    if isinstance(value, (*_ATOMS, *_OPAQUE, *_NAMES)):
        return None
    if isinstance(value, (torch.nn.ParameterDict, Mapping)):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, Set):
        # a set has no order to pair by: a stable one is made from the items' text
        return [(f"{{{index}}}", item) for index, item in enumerate(sorted(value, key=repr))]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, (torch.nn.ParameterList, torch.nn.ModuleList, Sequence)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return _attributes(value)


def _attributes(value: Any) -> list[Child] | None:
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    children = [(f".{name}", getattr(value, name)) for name in dict.fromkeys(names) if hasattr(value, name)]
    return children or None
