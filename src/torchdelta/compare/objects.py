"""Compare leaves that are not tensors: numbers and numeric arrays become tensors, other objects are equal or not.

Start with `as_tensor` and `compare_objects`.
"""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any

import numpy as np
import torch

from torchdelta._torch import tensors
from torchdelta.compare.contract import Terms
from torchdelta.compare.leaves import Container, Pair, Unreadable, brief, describe
from torchdelta.records.comparison import Breach, Comparison, UnmatchedLeaf
from torchdelta.records.verdict import Verdict

_SINGLETONS = (Enum, type, torch.dtype, torch.layout, torch.memory_format)
"""Objects that are equal only to themselves, so that they can be compared although their class defines no equality."""


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, number, boolean or numeric array as a plain tensor, or None for any other object.

    Tensors and arrays are not copied unless torch requires it. A float becomes float64, and a complex number
    complex128. None is returned, too, for an integer that int64 does not hold, and for an array of a dtype that torch
    does not have.
    """
    if isinstance(value, torch.Tensor):
        return tensors.without_class(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_as_tensor(np.asarray(value))
    if isinstance(value, (bool, int)):
        return torch.tensor(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, (float, complex)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    return None


def is_same_class(reference: Any, candidate: Any) -> bool:
    """Tell whether two leaves are of one class; a parameter and a plain tensor count as one."""
    if type(reference) is type(candidate):
        return True
    both_tensors = isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor)
    return both_tensors and tensors.class_of(reference) is tensors.class_of(candidate)


def compare_objects(pair: Pair, terms: Terms) -> Comparison:
    """Return the comparison of two leaves that are of different classes, or do not both hold numbers.

    The first of these that fits decides. INCONCLUSIVE if a side could not be taken apart. Two containers of one kind
    are taken to have other orders: DIVERGED, or EQUIVALENT if the terms excuse that. DIVERGED, by a difference of
    structure, if classes or kinds of containers differ. INCONCLUSIVE if `==` raises. EQUIVALENT if they are the same
    object, equal, or both NaN. INCONCLUSIVE if their class does not define equality, except for enum members, classes
    and the like. Otherwise DIVERGED, or EQUIVALENT if the terms excuse the difference.
    """
    reference, candidate = pair.reference, pair.candidate
    if unreadable := next((side for side in (reference, candidate) if isinstance(side, Unreadable)), None):
        return _object(pair, Verdict.INCONCLUSIVE, str(unreadable))
    if isinstance(reference, Container) and isinstance(candidate, Container) and reference.kind == candidate.kind:
        return _differing_order(pair.path, reference, candidate, terms)
    if isinstance(reference, Container) or not is_same_class(reference, candidate):
        return differing_structure(pair.path, describe(reference), describe(candidate))
    try:
        breach = _difference(reference, candidate, terms)
    except Exception as error:
        reason = brief(f"two {type(reference).__name__} cannot be compared: {type(error).__name__}: {error}")
        return _object(pair, Verdict.INCONCLUSIVE, reason)
    if breach is None:
        return _object(pair, Verdict.EQUIVALENT, "equal")
    if not _defines_equality(type(reference)) and not isinstance(reference, _SINGLETONS):
        reason = f"two {type(reference).__name__} cannot be compared: the class does not say what equal means"
        return _object(pair, Verdict.INCONCLUSIVE, reason)
    verdict = Verdict.EQUIVALENT if breach.excused else Verdict.DIVERGED
    return _object(pair, verdict, f"ignored: {breach}" if breach.excused else str(breach), breach)


def compare_alone(leaf: UnmatchedLeaf) -> Comparison:
    """Return the comparison of a leaf without a partner: DIVERGED, by a difference of structure."""
    sides = {"reference": "nothing", "candidate": "nothing", leaf.side: leaf.what}
    return differing_structure(leaf.path, **sides)


def differing_structure(path: str, reference: str, candidate: str) -> Comparison:
    """Return the comparison, DIVERGED, of two leaves of different kinds, which are described in words."""
    breach = Breach(clause="structure", reference=reference, candidate=candidate)
    return Comparison(path=path, verdict=Verdict.DIVERGED, reason=str(breach), leaf="structure", contract=(breach,))


def _differing_order(path: str, reference: Container, candidate: Container, terms: Terms) -> Comparison:
    """Return the comparison of two mappings whose keys are in different orders: DIVERGED unless the terms excuse it."""
    breach = terms.breach("order", brief(" ".join(reference.keys), 60), brief(" ".join(candidate.keys), 60))
    verdict = Verdict.EQUIVALENT if breach.excused else Verdict.DIVERGED
    reason = f"ignored: {breach}" if breach.excused else str(breach)
    return Comparison(path=path, verdict=verdict, reason=reason, leaf="structure", contract=(breach,))


def _object(pair: Pair, verdict: Verdict, reason: str, *contract: Breach) -> Comparison:
    """Return the comparison of two leaves that are objects, with this verdict, reason and breaches."""
    return Comparison(path=pair.path, verdict=verdict, reason=reason, leaf="object", contract=contract)


def _defines_equality(kind: Any) -> bool:
    """Tell whether a class has another `__eq__` than that of `object`."""
    return kind.__eq__ is not object.__eq__


def _difference(reference: Any, candidate: Any, terms: Terms) -> Breach | None:
    """Return the breach by which two objects of one class differ, or None if they are the same, equal or both NaN.

    The clause is `dtype` for dtypes, `device` for devices, and otherwise `value`. The terms may excuse it, except
    between arrays. Raise what `==` raises.
    """
    if reference is candidate:
        return None
    if isinstance(reference, np.ndarray):
        return _difference_of_arrays(reference, candidate)
    # a NaN of numpy that is wider than float64 does not become a tensor; it equals any other NaN
    if reference == candidate or (reference != reference and candidate != candidate):
        return None
    if isinstance(reference, torch.dtype):
        return terms.breach_of_dtype(reference, candidate)
    clause = "device" if isinstance(reference, torch.device) else "value"
    return terms.breach(clause, describe(reference), describe(candidate))


def _difference_of_arrays(reference: np.ndarray[Any, Any], candidate: np.ndarray[Any, Any]) -> Breach | None:
    """Return the breach by which two arrays that torch cannot hold, such as text, differ, or None if they are equal.

    It has both dtypes and shapes if these differ, or else the first elements that differ. NaN equals NaN.
    """
    if (reference.dtype, reference.shape) != (candidate.dtype, candidate.shape):
        return Breach(clause="value", reference=describe(reference), candidate=describe(candidate))
    differs = np.asarray((reference != candidate) & ~((reference != reference) & (candidate != candidate)))
    if not differs.any():
        return None
    index = tuple(int(step) for step in np.argwhere(differs)[0])
    where = f"at {list(index)}, the first of {int(differs.sum())} that differ"
    return Breach(clause="value", reference=f"{reference[index]!r} {where}", candidate=repr(candidate[index]))


def _array_as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return an array as a tensor, or None if torch does not have its dtype.

    The tensor shares the array's memory unless torch does not have its strides or byte order.
    """
    with warnings.catch_warnings():
        # the tensor is only read, so a read-only array is fine
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        try:
            return torch.as_tensor(array)
        except TypeError:
            return None
        except ValueError:  # torch has neither negative strides nor the other byte order
            return torch.as_tensor(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
