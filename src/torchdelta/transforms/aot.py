"""AOTAutograd's dispatch alone: the program is traced, functionalised and partitioned, and nothing is compiled.

A difference between this candidate and the reference is AOTAutograd's and not a backend's. Start with `Aot.apply`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torchdelta._torch.compile.aot_dispatch import PARTITIONERS, AotTrace
from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.errors import UsageError
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Options, Traits, Transform, TransformedSide, flag, require_known


class Aot(Transform):
    """Static shapes or `dynamic`, functionalised or not, by the `min-cut` or the `default` partitioner."""

    traits = Traits(is_compiler=True)

    def __init__(self, options: Options) -> None:
        """Read the options `dynamic` (by default False), `functionalised` (True) and `partitioner`.

        The partitioner is `min-cut` by default, or `default` if the graph is not functionalised. UsageError if an
        option is unknown or has a wrong value.
        """
        require_known("aot", options, ("dynamic", "functionalised", "partitioner"))
        self.dynamic = bool(flag(options, "dynamic"))
        self.functionalised = flag(options, "functionalised") is not False
        self.partitioner = str(options.get("partitioner", "min-cut" if self.functionalised else "default"))
        if self.partitioner not in PARTITIONERS:
            raise UsageError(f"unknown partitioner {self.partitioner!r}: it is {' or '.join(PARTITIONERS)}")
        if not self.functionalised and self.partitioner == "min-cut":
            raise UsageError("the min-cut partitioner needs a functionalised graph: write partitioner=default")

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with a call that runs traces of AOTAutograd, uncompiled, in place of the program.

        It is traced at the first call, and whenever no earlier trace fits. UsageError if `lifted`; `draws_random` and
        `seam` are not used.
        """
        if lifted:
            raise UsageError("AOTAutograd alone keeps the program's operations and rounds as they do")
        witness = Witness()
        call = AotTrace(
            side.call,
            dynamic=self.dynamic,
            functionalised=self.functionalised,
            partitioner=self.partitioner,
            witness=witness,
        )
        yield TransformedSide(side=replace(side, call=call), witness=witness)
