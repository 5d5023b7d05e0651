"""A transform with somebody at its seam, or stopped on its way: everything else about it stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchdelta._torch import aot
from torchdelta._torch.seams import Seam, hand_on, one_behind_the_other
from torchdelta.execute.sides import Side
from torchdelta.transforms.base import Transform, Transformed


class Watched(Transform):
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
        both = one_behind_the_other(self.seam, seam)
        with self.inner.applied(side, draws_random=draws_random, lifted=lifted, seam=both) as transformed:
            yield transformed


class WatchedAfterAot(Watched):
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
