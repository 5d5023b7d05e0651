"""One kind of registry for everything a user can name: transforms, metrics, optimizers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from torchdelta.errors import EnvironmentUnfit, UsageError

T = TypeVar("T")

_MOST_NAMES = 40


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known names a user may have meant; where none is near, which there are."""
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
        """Register under a name; a second thing of the same name is a mistake."""
        if name in self._known:
            raise UsageError(f"two {self.kind}s are called {name!r}")
        self._known[name] = thing
        return thing

    def get(self, name: str) -> T:
        """Return the thing of that name, or raise with the nearest names there are."""
        if name not in self:
            raise UsageError(f"unknown {self.kind} {name!r}: {nearest(name, self)}")
        if name not in self._known:
            self._known[name] = self._load(self._installed[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._known, *self._installed}))

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=f"torchdelta.{self.kind}s")}

    def _load(self, entry: EntryPoint) -> T:
        try:
            thing: T = entry.load()
        except Exception as error:
            raise EnvironmentUnfit(
                f"the {self.kind} {entry.name!r} of an installed package does not load from {entry.value} "
                f"({type(error).__name__}: {error}): mend or remove that package"
            ) from error
        return thing
