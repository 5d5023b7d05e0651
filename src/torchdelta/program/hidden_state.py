"""State of objects that have no attributes to read: random generators, iterators, arrays, texts in memory, ctypes.

`hidden_state` returns such state as parts, which a walk over a program compares like any other values:

    hidden_state(io.StringIO("log"))     # [(".text", "log"), (".position", 0)]
    hidden_state(itertools.count(3))     # [(".rest", (3,))]

An object whose state Python cannot read, such as a generator function that runs or a cache of results, is named by
`is_unreadable`, so that a report can say that it was not compared. `rewind` gives an object the state of an earlier
copy.
"""

from __future__ import annotations

import array
import collections.abc
import contextlib
import contextvars
import copy
import ctypes
import functools
import io
import itertools
import queue
import random
import types
import warnings
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
"""Random generators."""
GENERATORS_OF_PROCESS: tuple[Any, ...] = (vars(random)["_inst"], np.random.mtrand._rand)
"""The generators of `random` and `numpy.random`, which all programs share."""
_TEXTS = (io.StringIO, io.BytesIO)
# ctypes has no public name for the base of its arrays, structures and numbers
_C_DATA: Any = ctypes.c_int.__mro__[-2]
_ITERATOR_MODULES = ("builtins", "itertools")
_INDEXED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))
"""Iterators that can be set to an index."""
_UNREADABLE = (
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, io.IOBase),
    *(contextvars.ContextVar, queue.Queue, queue.SimpleQueue, functools._lru_cache_wrapper),
)

Parts = list[tuple[str, Any]]
"""The state of an object, as (step, value); a value is a leaf, or a tuple of objects that are read in their turn."""


def hidden_state(value: Any) -> Parts | None:
    """Return the state of an object that has no attributes to read, or None for any other object.

    Arrays of numbers become numpy arrays, other memory becomes bytes. Of an iterator the state is what it would be
    built from again. None, too, for the random generators of the process, which are no state of a program, and if
    Python cannot read the state: `is_unreadable` then tells whether there is any.
    """
    if _is_of_process(value):
        return None
    try:
        return _state_of(value)
    except Exception:  # memory that is in use or gone
        return None


def has_hidden_state(value: Any) -> bool:
    """Tell whether an object is of a class whose state `hidden_state` may return; nothing is read."""
    is_known = isinstance(value, (*GENERATORS, *_TEXTS, array.array, _C_DATA)) or is_builtin_iterator(value)
    return is_known and not _is_of_process(value)


def is_unreadable(value: Any) -> bool:
    """Tell whether an object has state that neither its attributes nor `hidden_state` show."""
    if isinstance(value, _C_DATA):
        return not _is_copyable(value)
    if is_builtin_iterator(value):
        return _reduced(value) is None
    try:
        return isinstance(value, _UNREADABLE) and not isinstance(value, _TEXTS) and not getattr(value, "closed", False)
    except ValueError:  # a file that was taken apart
        return True


def can_rewind(value: Any) -> bool:
    """Tell whether `rewind` can give an object with hidden state an earlier one."""
    return not is_builtin_iterator(value) or isinstance(value, _INDEXED)


def duplicate_of(value: Any) -> Any:
    """Return a copy of an object with hidden state, for `rewind`; it may raise. An iterator's has the same items."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.copy(value) if is_builtin_iterator(value) else copy.deepcopy(value)


def rewind(value: Any, before: Any) -> None:
    """Give an object or array the state of a copy that was made before.

    An iterator that cannot go back stays where it is.
    """
    if isinstance(value, torch.Generator):
        value.set_state(before.get_state())
    elif isinstance(value, random.Random):
        value.setstate(before.getstate())
    elif isinstance(value, np.random.RandomState):
        value.set_state(before.get_state())
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = before.bit_generator.state
    elif isinstance(value, _TEXTS):
        with contextlib.suppress(BufferError):  # its memory is in use
            value.seek(0)
            value.truncate()
            value.write(before.getvalue())
            value.seek(before.tell())
    elif isinstance(value, (array.array, bytearray)):
        with contextlib.suppress(BufferError):  # its memory is in use, and has another size
            value[:] = before
    elif isinstance(value, np.ndarray):
        with contextlib.suppress(ValueError):  # it has another size
            value[...] = before
    elif isinstance(value, _C_DATA):
        ctypes.memmove(ctypes.addressof(value), ctypes.addressof(before), ctypes.sizeof(before))
    elif isinstance(value, _INDEXED) and len(state := _reduced(before) or ()) == 2:
        # an iterator that has ended has no index any more, and stays at its end
        iterator: Any = value
        iterator.__setstate__(state[1])


def _is_of_process(value: Any) -> bool:
    """Tell whether a value is one of the generators of the process."""
    return any(value is generator for generator in GENERATORS_OF_PROCESS)


def _state_of(value: Any) -> Parts | None:
    """Return the state of an object without attributes to read, or None for any other; it may raise."""
    if isinstance(value, GENERATORS):
        return _state_of_generator(value)
    if isinstance(value, _TEXTS):
        return None if value.closed else [(".text", value.getvalue()), (".position", value.tell())]
    if isinstance(value, array.array):
        return [("", "".join(value) if value.typecode == "u" else np.array(value))]
    if isinstance(value, _C_DATA):
        return [("", np.frombuffer(value, np.uint8).copy())] if _is_copyable(value) else None
    if is_builtin_iterator(value):
        parts = _reduced(value)
        return None if parts is None else [(".rest", parts)]
    return None


def _state_of_generator(value: Any) -> Parts:
    """Return the state of a random generator."""
    if isinstance(value, torch.Generator):
        return [("", value.get_state())]
    if isinstance(value, random.Random):
        version, numbers, gauss = value.getstate()
        return [("", np.array(numbers, dtype=np.uint32)), (".gauss_next", gauss), (".version", version)]
    if isinstance(value, np.random.RandomState):
        name, keys, *rest = value.get_state(legacy=True)
        return [("", np.array(keys)), (".name", name), *((f".rest[{index}]", item) for index, item in enumerate(rest))]
    return [("", repr(value.bit_generator.state))]


def is_builtin_iterator(value: Any) -> bool:
    """Tell whether a value is an iterator of Python itself, such as that of a list, `zip` or `itertools.count`."""
    is_iterator = isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase)
    return is_iterator and type(value).__module__ in _ITERATOR_MODULES


def _reduced(value: Any) -> tuple[Any, ...] | None:
    """Return what a builtin iterator would be built from again, without its class; None if it cannot be."""
    if isinstance(value, itertools.tee(()).__class__):  # reading it would end the sharing of what was read ahead
        return None
    try:
        with warnings.catch_warnings():  # later Pythons announce that itertools will not be reducible
            warnings.simplefilter("ignore")
            _, arguments, *state = value.__reduce__()
    except Exception:  # not reducible, or an iterator of a dict that has changed
        return None
    return (*arguments, *(each for each in state if each is not None))


def _is_copyable(value: Any) -> bool:
    """Tell whether an object of ctypes has no pointers, whose addresses say nothing about what they point to."""
    try:
        value.__reduce__()
    except ValueError:
        return False
    return True
