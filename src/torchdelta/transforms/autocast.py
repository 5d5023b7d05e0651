"""The program under `torch.autocast`: the operations that torch deems safe run in a lower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.program.sides import Side, started_from
from torchdelta.transforms.base import Options, Traits, Transform, TransformedSide, dtype_named, require_known


class Autocast(Transform):
    """`autocast:bfloat16`, on the device of the program's tensors or on the one given as `device`."""

    def __init__(self, dtype: str, options: Options) -> None:
        """Read the dtype's name and the option `device`; UsageError if the dtype or an option is unknown.

        The device's name is not checked here.
        """
        require_known("autocast", options, ("device",))
        self.dtype = dtype_named(dtype)
        self.device = str(options.get("device", ""))
        self.traits = Traits(lowered_to=self.dtype)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with its call under autocast; the backward runs outside of it, as it does in training.

        The device is the option's, or that of the side's first tensor, or the CPU. A call counts as transformed only if
        autocast is on in it. The keywords are not used.
        """
        device = self.device or next((tensor.device.type for tensor in started_from(side)), "cpu")
        witness = Witness()

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=self.dtype):
                # torch only warns about a dtype that the device has no autocast for, and runs without it
                witness.calls += torch.is_autocast_enabled(device)
                return side.call(*args, **kwargs)

        yield TransformedSide(side=replace(side, call=call), witness=witness)
