"""One kind of registry for everything that a user can name: transforms, metrics, optimizers, faults.

    METRICS: Registry[Metric] = Registry("metric")
    METRICS.add("sqnr", sqnr)
    METRICS.get("sqrn")                  # UsageError: unknown metric 'sqrn': did you mean sqnr?

An installed package adds a metric by an entry point of the group `torchdelta.metrics`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from torchdelta.errors import EnvironmentUnfit, UsageError

T = TypeVar("T")

_MOST_NAMES = 40
"""How many names an error lists at most."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the text `did you mean …?` with up to three known names near a wrong name, or else `there are …` with all.

    Of more than `_MOST_NAMES` names only the first ones are listed, and the others counted.
    """
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(near)}?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"there are {', '.join(names[:_MOST_NAMES])}{more}."


class Registry(Generic[T]):
    """Named things of one kind: ours first, then those of installed packages (entry points `torchdelta.KINDs`)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, T] = {}

    def add(self, name: str, thing: T) -> T:
        """Register a thing under a name and return it; UsageError if the registry holds a thing of that name already.

        The thing of an installed package counts only once `get` has imported it; before that, the new thing hides it.
        """
        if name in self._known:
            raise UsageError(f"two {self.kind}s are called {name!r}")
        self._known[name] = thing
        return thing

    def get(self, name: str) -> T:
        """Return the thing of that name; UsageError with the nearest names if there is none.

        A thing of an installed package is imported when it is first asked for, and kept. EnvironmentUnfit if it cannot
        be imported.
        """
        if name not in self:
            raise UsageError(f"unknown {self.kind} {name!r}: {nearest(name, self)}")
        if name not in self._known:
            self._known[name] = self._load(self._installed[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._installed

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over all names, sorted, those of installed packages included."""
        return iter(sorted({*self._known, *self._installed}))

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages by name; nothing of them is imported yet."""
        return {entry.name: entry for entry in entry_points(group=f"torchdelta.{self.kind}s")}

    def _load(self, entry: EntryPoint) -> T:
        """Return the thing that an installed package registered; EnvironmentUnfit if it cannot be imported."""
        try:
            thing: T = entry.load()
        except Exception as error:
            raise EnvironmentUnfit(
                f"the {self.kind} {entry.name!r} of an installed package does not load from {entry.value} "
                f"({type(error).__name__}: {error}): mend or remove that package"
            ) from error
        return thing
