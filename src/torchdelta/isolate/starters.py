"""How a worker comes to be, whichever way it does: what an overseer needs of it, and what a pool of the way itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torchdelta.isolate.place import tail_of
from torchdelta.isolate.worker import Order

_LOG_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What every worker finds done: the parent's import path, modules imported, and a compiler warmed up."""

    path: list[str]
    preload: list[str] = field(default_factory=list)
    warm: str = ""
    """The backend of torch.compile that has compiled something before."""


class Worker(Protocol):
    """A process that carries out one order."""

    @property
    def group(self) -> int | None:
        """The process group; None where there are none."""

    def wait(self, seconds: float) -> int | None:
        """Return the status once the worker and its group are gone, negative for a signal; None if it takes longer."""

    def end(self) -> None:
        """End the worker with its group, soon."""

    def dismiss(self) -> bool:
        """Leave it to others to see off a worker that has answered; False if there are none, and one has to wait."""

    def is_lost(self) -> bool:
        """Tell whether it ended because its zygote did, and through no fault that is known to be its own."""


class Starter(Protocol):
    """A way to start workers."""

    def start(self, order: Order) -> Worker:
        """Start a worker on an order; CancelledError once it is closed."""

    def abandon(self) -> None:
        """Give up on whoever does not end workers when asked to."""

    def close(self) -> None:
        """End whom nobody oversees, and start none from now on."""


def log_of(directory: Path) -> Path:
    """Return where zygotes and workers print to before their first order."""
    return directory / "start.log"


def why_not(directory: Path) -> str:
    """Return the last that was printed there: why something did not start."""
    return tail_of(log_of(directory), _LOG_BYTES)
