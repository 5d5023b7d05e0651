"""AOTAutograd's dispatch alone: traced, functionalised and partitioned, and nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torchdelta._torch.compile.aot_dispatch import PARTITIONERS, AotTrace
from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.errors import UsageError
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.compiler import flag


class Aot(Transform):
    """Static shapes or `dynamic`, functionalised or not, by the `min-cut` or the `default` partitioner."""

    is_compiler = True

    def __init__(self, options: Options) -> None:
        require_known("aot", options, ("dynamic", "functionalised", "partitioner"))
        self.dynamic = bool(flag(options, "dynamic"))
        self.functionalised = flag(options, "functionalised") is not False
        self.partitioner = str(options.get("partitioner", "min-cut" if self.functionalised else "default"))
        if self.partitioner not in PARTITIONERS:
            raise UsageError(f"unknown partitioner {self.partitioner!r}: it is {' or '.join(PARTITIONERS)}")
        if not self.functionalised and self.partitioner == "min-cut":
            raise UsageError("the min-cut partitioner needs a graph that is functionalised: take partitioner=default")

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Trace the side when it is first called."""
        if lifted:
            raise UsageError("a trace by AOTAutograd alone has the operations of the program, and rounds as it does")
        witness = Witness()
        call = AotTrace(
            side.call,
            dynamic=self.dynamic,
            functionalised=self.functionalised,
            partitioner=self.partitioner,
            witness=witness,
        )
        yield Transformed(side=replace(side, call=call), witness=witness)
