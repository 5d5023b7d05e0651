"""What becomes of each compile in a run: it is guarded, or counted as not guarded, and its passes are watched."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdelta._torch.compile.backends import guarding_every
from torchdelta.errors import Refused, UsageError
from torchdelta.records.guard import GuardSummary
from torchdelta.records.passes import PassSummary

if TYPE_CHECKING:
    from torchdelta._torch.compile.dynamo import Backend
    from torchdelta.guard.findings import GuardFindings

ALL = "all"


@dataclass(kw_only=True)
class GuardedCompiles:
    """Those of one run. Nothing here imports torch before somebody compiles: when that happens is the script's."""

    out: Path | None = None
    """Where findings are written; None is a new directory, made when there is one."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """Those of a guard."""
    wanted: str | None = ALL
    """The backend that is guarded; `all` of them, or None."""
    is_watching: bool = False
    """Whether passes are watched."""

    def __post_init__(self) -> None:
        self._others: Counter[str] = Counter()
        self._notes: list[str] = []
        self._ledger: GuardFindings | None = None
        self._watched: PassSummary | None = None
        self._lock = threading.Lock()
        self._undo = ExitStack()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Attend to whatever is compiled inside."""
        with self._undo, guarding_every(self._attend):
            yield

    def finish(self, tell: Callable[[str], None]) -> None:
        """Look into what was found, now that the script has ended; whatever goes wrong there is a note."""
        if self._ledger is None:
            return
        try:
            self._ledger.finish(tell=tell)
        except KeyboardInterrupt:
            self._notes.append(
                "interrupted while culprits were named: `torchdelta locate` on a report's place does that"
            )
        except Exception as error:  # the script has ended, and its status stands
            self._notes.append(f"naming culprits failed ({type(error).__name__}: {error})")

    def summary(self) -> GuardSummary:
        """Return what guards saw, and how many graphs had none."""
        seen = self._ledger.summary() if self._ledger is not None else GuardSummary(graphs=0, checked=0)
        unguarded = {f"not guarded, its backend is {name}": many for name, many in self._others.items()}
        notes = (*seen.notes, *self._notes)
        if unguarded and not seen.graphs:
            notes = (*notes, f"--guard {self.wanted}: nothing that was compiled has that backend")
        return replace(
            seen,
            graphs=seen.graphs + self._others.total(),
            unchecked={**seen.unchecked, **unguarded},
            notes=notes,
        )

    def watched(self) -> PassSummary | None:
        """Return what came of watching passes; None where nobody asked for it."""
        return (self._watched or PassSummary()) if self.is_watching else None

    def _attend(self, backend: Backend, name: str) -> Backend:
        try:
            if self.is_watching:
                self._begin_watching()
            return backend if self.wanted is None else self._guarded(backend, name)
        except UsageError as error:
            raise Refused(str(error)) from error

    def _guarded(self, backend: Backend, name: str) -> Backend:
        with _quietly():
            from torchdelta._torch.compile.dynamo import origin_of
            from torchdelta.guard.backend import Guard
            from torchdelta.guard.config import GuardConfig
            from torchdelta.guard.findings import GuardFindings

        origin = origin_of(backend)
        if isinstance(origin.backend, Guard):
            raise UsageError(
                f"the script guards {origin.name} by itself, and --guard would do so again: leave one of them out"
            )
        if self.wanted not in (ALL, name, origin.name):
            return self._counted(backend, name)
        vigilance = GuardConfig(**self.words)
        with self._lock:
            if self._ledger is None:
                self._ledger = GuardFindings(out=self.out, command="diagnose" if vigilance.minify else "locate")
        return Guard(backend, vigilance, self._ledger)

    def _counted(self, backend: Backend, name: str) -> Backend:
        def counting_backend(graph_module: Any, example_inputs: Any, **options: Any) -> Any:
            with self._lock:
                self._others[name] += 1
            return backend(graph_module, example_inputs, **options)

        return counting_backend

    def _begin_watching(self) -> None:
        with _quietly():
            from torchdelta.passes.watch import watch_passes

        with self._lock:
            if self._watched is None:
                policy = self.words.get("policy", "noise")
                self._watched = self._undo.enter_context(watch_passes(policy=policy))


@contextmanager
def _quietly() -> Iterator[None]:
    """Import what is ours in the middle of the script, which may have made warnings errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
