"""The base of transforms: each turns a program into one that should compute the same, and counts transformed calls.

A transform is a subclass of `Transform` with one method, `apply`. Everything that a caller has to know about it
beforehand is one record, its `traits`. A transform that wraps another hands on the record of the one that it wraps, and
names with `dataclasses.replace` the traits that differ:

    class Cast(Transform):
        def __init__(self, dtype: str, options: Options) -> None:
            self.traits = Traits(lowered_to=dtype_named(dtype))

Start with `Traits` and `Transform`. To add a transform, copy `cast.py` and add one line to `transforms/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from torchdelta._torch.compile.dynamo import Witness, counted
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta._torch.graphs.export_sizes import Size
from torchdelta.errors import UsageError
from torchdelta.program.sides import Side
from torchdelta.records.comparison import Scalar

Options = Mapping[str, Scalar]


class OtherInputs(Enum):
    """What a transform's result is meant for beside the inputs of the program."""

    VALUES = "other values, which do not share memory with each other"
    SIZES = "other sizes"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a transform that a caller needs before it is applied. The defaults are those of a plain rewrite."""

    lowered_to: torch.dtype | None = None
    """The lower dtype that the candidate computes in on purpose."""
    keeps_names: bool = True
    """Whether the candidate's parameters and buffers have the reference's names; another implementation has its own."""
    reads_program: bool = True
    """Whether the candidate is built from the program's callable; another implementation takes only its inputs."""
    has_backward: bool = True
    """Whether the candidate has a backward; without one, only the outputs of the program are compared."""
    excused_clauses: frozenset[str] = frozenset()
    """Clauses of the contract that the transform breaks on purpose: a breach is reported and excused."""
    rounds_to_levels: bool = False
    """Whether the transform quantizes. Each layer then adds rounding steps of its own and is judged by itself."""
    is_compiler: bool = False
    """Whether a dispatch mode around the candidate would switch the transform off."""
    has_seam: bool = False
    """Whether the transform hands graphs to the seam; without them only modules can be compared."""
    other_inputs: OtherInputs | None = None
    """The inputs for which the result is meant too, so that it is run with them; None if for the program's own only."""


@dataclass(frozen=True, kw_only=True)
class TransformedSide:
    """A side that runs transformed, and the witness that counts how much of it does."""

    side: Side
    witness: Witness
    notes: list[str] = field(default_factory=list)

    @classmethod
    def counting_calls(cls, side: Side, *, captured: int = 0, changes: list[bool] | None = None) -> TransformedSide:
        """Return the side as a transformed one, with a witness that counts each of its calls as transformed.

        The witness starts with `captured`, the number of graphs, and with `changes`: for each graph, whether a pass
        changed it. None or an empty list means that it does not matter; what is added to an empty list later is lost.
        """
        witness = Witness(captured=captured, changes=changes or [])
        return cls(side=replace(side, call=counted(side.call, witness)), witness=witness)


class Transform(ABC):
    """Turns a side into a candidate. Subclasses check their options when they are built."""

    traits: Traits = Traits()

    @abstractmethod
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> AbstractContextManager[TransformedSide]:
        """Return a context manager that yields the transformed side, which runs while the context is open.

        The side is fresh, and the transform may change it. `draws_random` means that the reference drew random numbers,
        so the candidate must draw the same ones. `lifted` means that the side is in float64 and nothing may round below
        that: a compiler lifts the graphs that it captures; for every other transform the caller runs the side under a
        dispatch mode. Each graph that the transform changes passes the `seam`; a transform without graphs ignores it.
        """

    def open_sizes(self, side: Side) -> dict[str, list[Size | None]] | None:
        """Return the sizes of a side's inputs that the result leaves open, by the path of the input; here None.

        None means that the result can be made anew for any size, as by a compiler. A subclass that overrides this
        returns for each axis of an input its symbol, or None if the result is made for that size alone.
        """
        return None


def require_known(transform: str, options: Options, known: Iterable[str]) -> None:
    """Raise UsageError for the first option whose name is not in `known`; the message lists the known names.

    `transform` is the transform's name for the message.
    """
    names = sorted(known)
    for name in options:
        if name not in names:
            choices = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(f"transform {transform} has no option {name!r}: {choices}")


def flag(options: Options, name: str) -> bool | None:
    """Return the value of a yes-or-no option, or None if it is not given; UsageError if it is not a bool."""
    value = options.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise UsageError(f"option {name} is True or False, not {value!r}")


def accepts_unchanged(transform: str, options: Options) -> bool:
    """Tell whether the option `unchanged=ok` is given; UsageError if it has another value."""
    value = options.get("unchanged")
    if value not in (None, "ok"):
        raise UsageError(f"transform {transform}: option unchanged is ok, or left out, not {value!r}")
    return value == "ok"


def dtype_named(name: str) -> torch.dtype:
    """Return the floating-point dtype that torch has by that name, as in `bfloat16`; UsageError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"{name!r} is not a floating-point dtype: try bfloat16, float16, float32 or float64")
    return dtype
