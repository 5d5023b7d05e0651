"""The program in another floating-point dtype: parameters, buffers and inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import Side, started_from
from torchdelta.transforms.base import Options, Transform, Transformed, dtype_named, require_known


class Cast(Transform):
    """`cast:bfloat16`: every float tensor that the program starts from is rounded to the dtype."""

    def __init__(self, dtype: str, options: Options) -> None:
        require_known("cast", options, ())
        self.lowered_to = dtype_named(dtype)

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Cast the side."""
        target = self.lowered_to
        assert target is not None

        def convert(dtype: torch.dtype) -> torch.dtype:
            return target if dtype.is_floating_point else dtype

        made = Side.of(*copy_together((side.call, side.args, side.kwargs), name="cast", convert=convert))
        is_cast = any(tensor.dtype != convert(tensor.dtype) for tensor in started_from(side))
        yield Transformed.whole(made) if is_cast else Transformed(side=made, witness=Witness())
