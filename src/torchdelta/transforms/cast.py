"""The program in another floating-point dtype: its parameters, buffers and inputs are rounded to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import Side, started_from
from torchdelta.transforms.base import Options, Traits, Transform, TransformedSide, dtype_named, require_known


class Cast(Transform):
    """`cast:bfloat16`: every float tensor that the program starts from is rounded to the dtype."""

    def __init__(self, dtype: str, options: Options) -> None:
        """Read the dtype's name; UsageError if it is not a floating-point dtype, or if any option is given."""
        require_known("cast", options, ())
        self.dtype = dtype_named(dtype)
        self.traits = Traits(lowered_to=self.dtype)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield a copy of the side in which all float tensors of the callable and the inputs have the dtype.

        Its calls count as transformed only if some tensor changed its dtype. Complex and integer tensors keep theirs.
        ProgramError if the side cannot be copied. The keywords are not used.
        """

        def convert(dtype: torch.dtype) -> torch.dtype:
            return self.dtype if dtype.is_floating_point else dtype

        candidate = Side.of(*copy_together((side.call, side.args, side.kwargs), name="cast", convert=convert))
        is_cast = any(tensor.dtype != convert(tensor.dtype) for tensor in started_from(side))
        yield (
            TransformedSide.counting_calls(candidate) if is_cast else TransformedSide(side=candidate, witness=Witness())
        )
