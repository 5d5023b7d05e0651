"""One kind of registry for everything a user can name: transforms, metrics, optimizers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from torchdelta.errors import UsageError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known names a user may have meant; all of them where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}."


class Registry(Generic[T]):
    """Named things of one kind: ours, and those of installed packages (entry points `torchdelta.KIND`)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, T] = {}
        self._discovered = False

    def add(self, name: str, thing: T) -> T:
        """Register under a name; a second thing of the same name is a mistake."""
        if name in self._known:
            raise UsageError(f"two {self.kind}s are called {name!r}")
        self._known[name] = thing
        return thing

    def get(self, name: str) -> T:
        """Return the thing of that name, or raise with the nearest names there are."""
        if name in self:
            return self._known[name]
        raise UsageError(f"unknown {self.kind} {name!r}: {nearest(name, self)}")

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._known))

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        for entry in entry_points(group=f"torchdelta.{self.kind}s"):
            if entry.name not in self._known:
                self._known[entry.name] = entry.load()
