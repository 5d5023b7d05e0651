"""Transforms around other transforms.

A wrapper changes one thing and hands on the traits of the transform that it wraps:

- `AppliedOnce` runs on other inputs the callable that a transform built for the first ones.
- `PrecompiledTransform` runs code that a backend has already compiled.
- `ObservedTransform` puts a seam of its own before the transform, so that an observer gets every graph.
- `ObservedAfterAot` puts the seam behind AOTAutograd, and may stop the compiler there.
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
from torchdelta.transforms.base import Traits, Transform, TransformedSide


class AppliedOnce(Transform):
    """The callable that another transform built for one side. Every other side gives only its inputs.

    Assumptions that the transform made about the first inputs may not hold for the others: a check shows that.
    """

    def __init__(self, inner: Transform, transformed: TransformedSide) -> None:
        """Take the result of applying `inner` to the first side; the traits are those of `inner`, without a seam."""
        self.transformed = transformed
        # the graphs have passed the seam already, when the first side was transformed
        self.traits = replace(inner.traits, has_seam=False)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield this side with the first side's callable, witness and notes; TypeError if it is `lifted`.

        Nothing is transformed again, so `draws_random` and `seam` are not used.
        """
        if lifted:
            raise TypeError("a callable that was built for one side cannot be built in another precision")
        yield replace(self.transformed, side=replace(side, call=self.transformed.side.call))


@contextmanager
def applied_once(inner: Transform, side: Side, *, draws_random: bool) -> Iterator[AppliedOnce]:
    """Apply a transform to a side without state; yield a transform that runs the result on other sides' inputs."""
    with inner.apply(side, draws_random=draws_random) as transformed:
        yield AppliedOnce(inner, transformed)


Run = Callable[..., Any]
SAME_RANDOM = (
    "the graph draws random numbers: it was compiled a second time with fallback_random, so that it draws the same "
    "ones, and the check is of the second; the first is the one that runs"
)


class PrecompiledTransform(Transform):
    """A callable that a backend built from a graph, and that takes the graph's inputs.

    `compile_again` builds another one for inputs like those that it is called with.
    """

    traits = Traits(is_compiler=True)

    def __init__(self, call: Run, compile_again: Callable[[Sequence[Any]], Run]) -> None:
        self.call = call
        self.compile_again = compile_again

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with the callable as its call, counted as one graph; TypeError if it is `lifted`.

        If `draws_random`, the call is instead one that `compile_again` builds with inductor's `fallback_random`, so
        that it draws the numbers of eager, and a note says so. `seam` is not used.
        """
        if lifted:
            raise TypeError("a graph that is compiled already cannot be compiled in another precision")
        if not draws_random:
            yield TransformedSide.counting_calls(replace(side, call=self.call), captured=1)
            return
        with drawing_as_eager():
            call = self.compile_again(side.args)
            yield replace(TransformedSide.counting_calls(replace(side, call=call), captured=1), notes=[SAME_RANDOM])


class ObservedTransform(Transform):
    """The same transform with a seam of its own, which gets every graph first."""

    def __init__(self, inner: Transform, seam: Seam) -> None:
        self.inner = inner
        self.seam = seam
        self.traits = inner.traits

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Apply the inner transform, and yield its transformed side; each graph passes this object's seam first.

        Then it passes the `seam` of the caller.
        """
        both = chain_seams(self.seam, seam)
        with self.inner.apply(side, draws_random=draws_random, lifted=lifted, seam=both) as transformed:
            yield transformed


def innermost(transform: Transform) -> Transform:
    """Return the transform that is observed, or the transform itself if it is not an observed one."""
    while isinstance(transform, ObservedTransform):
        transform = transform.inner
    return transform


class ObservedAfterAot(ObservedTransform):
    """A compiler whose own seam gets the forward and backward graphs that AOTAutograd makes.

    Without `decompose` and `compile_graphs` the compiler stops on its way to its backend.
    """

    def __init__(
        self, inner: Transform, seam: Seam = hand_on, *, decompose: bool = True, compile_graphs: bool = True
    ) -> None:
        """Take the compiler, and the seam behind AOTAutograd.

        Without `decompose` the backend's decompositions are left out; without `compile_graphs` the graphs run
        uncompiled.
        """
        super().__init__(inner, seam)
        self.decompose = decompose
        self.compile_graphs = compile_graphs
        self.interception = aot.Interception()
        """The record of the last application of the transform."""

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Apply the compiler with its own seam behind AOTAutograd, and yield its transformed side.

        The caller's `seam` gets dynamo's graphs. `self.interception` is replaced by the record of this application.
        """
        intercepting = aot.intercepting(self.seam, decompose=self.decompose, compile_graphs=self.compile_graphs)
        with (
            intercepting as self.interception,
            self.inner.apply(side, draws_random=draws_random, lifted=lifted, seam=seam) as transformed,
        ):
            yield transformed
