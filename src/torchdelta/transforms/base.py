"""What a transform is: a program goes in, one that should compute the same comes out, and someone counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from torchdelta._torch.compile.dynamo import Witness, counted
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.errors import UsageError
from torchdelta.program.sides import Side
from torchdelta.records.comparison import Scalar

Options = Mapping[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class Transformed:
    """A side that runs transformed, and the witness of how much of it does."""

    side: Side
    witness: Witness
    notes: list[str] = field(default_factory=list)

    @classmethod
    def whole(cls, side: Side, *, captured: int = 0) -> Transformed:
        """Wrap a side whose every call is transformed as a whole."""
        witness = Witness(captured=captured)
        return cls(side=replace(side, call=counted(side.call, witness)), witness=witness)


class Transform(ABC):
    """Turns a side into a candidate. Subclasses check their options when built."""

    lowered_to: torch.dtype | None = None
    """The lower dtype that this transform computes in on purpose."""

    keeps_names: bool = True
    """Whether the candidate's parameters and buffers have the reference's names; another implementation has its own."""

    reads_program: bool = True
    """Whether the candidate is made of the program's callable; another implementation takes its inputs only."""

    has_backward: bool = True
    """Whether what it makes has a backward; otherwise only what the program returns can be compared."""

    changes: frozenset[str] = frozenset()
    """Clauses of the contract that it breaks on purpose: a breach is reported, and excused."""

    rounds_to_levels: bool = False
    """Whether it quantizes: each layer is then off by its own steps, and must be judged by itself."""

    is_compiler: bool = False
    """Whether a dispatch mode around the candidate would switch the transform off."""

    has_seam: bool = False
    """Whether it makes something of graphs, which pass the seam; otherwise there are only modules to look at."""

    @abstractmethod
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> AbstractContextManager[Transformed]:
        """Transform a fresh side; it runs while the context is open.

        `draws_random` tells that the reference drew random numbers: the candidate must draw the same ones. `lifted`
        tells that the side is in float64 and nothing may round below that: a compiler rewrites what it captures;
        everything else is run under a mode by the caller, and need not care. At the `seam` stands whoever wants to see
        each graph that the transform changes; a transform that has none ignores it.
        """


def require_known(transform: str, options: Options, known: Iterable[str]) -> None:
    """Raise UsageError for an option that the transform does not have."""
    names = sorted(known)
    for name in options:
        if name not in names:
            there = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(f"transform {transform} has no option {name!r}: {there}")


def dtype_named(name: str) -> torch.dtype:
    """Return the floating-point dtype of that name; UsageError lists them."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"{name!r} is no floating-point dtype: try bfloat16, float16, float32 or float64")
    return dtype
