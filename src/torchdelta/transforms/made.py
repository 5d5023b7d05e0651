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

    def __init__(self, call: Run, again: Callable[[Sequence[Any]], Run], returns: type) -> None:
        self.call = call
        self.again = again
        self.returns = returns
        """What the graph returns its values in: who calls it takes a tuple and a list for the same."""

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Run what was made; where eager's random numbers are needed, it is made again so that it draws them."""
        if lifted:
            raise TypeError("what was made of a graph cannot be made in another precision")
        if not draws_random:
            yield self._transformed(side, self.call)
            return
        with drawing_as_eager():
            yield replace(self._transformed(side, self.again(side.args)), notes=[SAME_RANDOM])

    def _transformed(self, side: Side, call: Run) -> Transformed:
        def returning(*args: Any) -> Any:
            values = call(*args)
            return self.returns(values) if isinstance(values, (tuple, list)) else values

        return Transformed.whole(replace(side, call=returning), captured=1)
