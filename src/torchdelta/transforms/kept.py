"""A transform that is applied once: what it made for the first inputs is run on others as well.

What it took for granted of the first inputs may not hold of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torchdelta._torch.seams import Seam, hand_on
from torchdelta.execute.sides import Side
from torchdelta.transforms.base import Transform, Transformed


class Kept(Transform):
    """What another transform made of one side. Every other side brings its inputs only."""

    def __init__(self, transform: Transform, made: Transformed) -> None:
        self.made = made
        self.lowered_to = transform.lowered_to
        self.keeps_names = transform.keeps_names
        self.has_backward = transform.has_backward
        self.changes = transform.changes
        self.is_compiler = transform.is_compiler

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Give the inputs of this side to what was made of the first."""
        if lifted:
            raise TypeError("what was made for one side cannot be made in another precision")
        yield replace(self.made, side=replace(side, call=self.made.side.call))


@contextmanager
def kept(transform: Transform, side: Side, *, draws_random: bool) -> Iterator[Kept]:
    """Apply a transform to a side that keeps no state, and have it run on the inputs of others."""
    with transform.applied(side, draws_random=draws_random) as made:
        yield Kept(transform, made)
