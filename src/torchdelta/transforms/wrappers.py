"""A transform that is applied once: what it made for the first inputs is run on others as well.

What it took for granted of the first inputs may not hold of the others.

What a backend has made of a graph already: the very code that a user's run is about to call.

A transform with somebody at its seam, or stopped on its way: everything else about it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torchdelta._torch.compile import aot
from torchdelta._torch.compile.dynamo import drawing_as_eager
from torchdelta._torch.compile.seams import Seam, chain_seams, hand_on
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Transform, Transformed


class AppliedOnce(Transform):
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
def applied_once(transform: Transform, side: Side, *, draws_random: bool) -> Iterator[AppliedOnce]:
    """Apply a transform to a side that keeps no state, and have it run on the inputs of others."""
    with transform.applied(side, draws_random=draws_random) as made:
        yield AppliedOnce(transform, made)


Run = Callable[..., Any]
SAME_RANDOM = (
    "the graph draws random numbers: it was compiled a second time with fallback_random, so that it draws the same "
    "ones, and that was checked; what runs is the first"
)


class PrecompiledTransform(Transform):
    """A callable that takes what the graph takes. `again` makes another one, for inputs like these."""

    is_compiler = True

    def __init__(self, call: Run, again: Callable[[Sequence[Any]], Run]) -> None:
        self.call = call
        self.again = again

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Run what was made; where eager's random numbers are needed, it is made again so that it draws them."""
        if lifted:
            raise TypeError("what was made of a graph cannot be made in another precision")
        if not draws_random:
            yield Transformed.whole(replace(side, call=self.call), captured=1)
            return
        with drawing_as_eager():
            made = Transformed.whole(replace(side, call=self.again(side.args)), captured=1)
            yield replace(made, notes=[SAME_RANDOM])


class ObservedTransform(Transform):
    """The same transform, whose graphs pass somebody on their way."""

    def __init__(self, inner: Transform, seam: Seam) -> None:
        self.inner = inner
        self.seam = seam
        self.lowered_to, self.is_compiler = inner.lowered_to, inner.is_compiler
        self.has_seam, self.has_backward = inner.has_seam, inner.has_backward
        self.rounds_to_levels, self.changes = inner.rounds_to_levels, inner.changes
        self.keeps_names, self.reads_program = inner.keeps_names, inner.reads_program

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Apply the transform with its own seam; somebody else's comes behind it."""
        both = chain_seams(self.seam, seam)
        with self.inner.applied(side, draws_random=draws_random, lifted=lifted, seam=both) as transformed:
            yield transformed


class ObservedAfterAot(ObservedTransform):
    """A compiler whose graphs pass somebody after AOTAutograd made forward and backward of them.

    Without `decompose` and `compile_graphs` it stops on its way to its backend.
    """

    def __init__(
        self, inner: Transform, seam: Seam = hand_on, *, decompose: bool = True, compile_graphs: bool = True
    ) -> None:
        super().__init__(inner, seam)
        self.decompose = decompose
        self.compile_graphs = compile_graphs
        self.seen = aot.Interception()
        """What passed when it was last applied."""

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Apply the compiler, and stand behind AOTAutograd."""
        watching = aot.intercepting(self.seam, decompose=self.decompose, compile_graphs=self.compile_graphs)
        with (
            watching as self.seen,
            self.inner.applied(side, draws_random=draws_random, lifted=lifted, seam=seam) as transformed,
        ):
            yield transformed
