"""What a backend has made of a graph already: the very code that a user's run is about to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torchdelta._torch.dynamo import drawing_as_eager
from torchdelta._torch.seams import Seam, hand_on
from torchdelta.execute.sides import Side
from torchdelta.transforms.base import Transform, Transformed

Run = Callable[..., Any]
SAME_RANDOM = (
    "the graph draws random numbers: it was compiled a second time with fallback_random, so that it draws the same "
    "ones, and that was checked; what runs is the first"
)


class Made(Transform):
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
