"""Everything that a script compiles in one run: guarded or counted as not guarded, and its passes watched.

`torchdelta run` opens `GuardedCompiles.guard_all` around the script, and asks for the summaries when it has ended.
"""

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
    """The compilations of one run. Torch is imported only when the script compiles, because the script decides when."""

    out: Path | None = None
    """Where findings are written; None is a new directory, made when there is one."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The options of each guard."""
    wanted: str | None = ALL
    """The backend to guard; `all` of them, or None."""
    is_watching: bool = False
    """Whether passes are watched."""
    workplace: Path = field(default_factory=Path.cwd)
    """The working directory at the start, which the script may leave or delete."""

    def __post_init__(self) -> None:
        """Begin without findings, notes and counts."""
        self._unguarded: Counter[str] = Counter()
        self._notes: list[str] = []
        self._findings: GuardFindings | None = None
        self._passes: PassSummary | None = None
        self._lock = threading.Lock()
        self._undo = ExitStack()

    @contextmanager
    def guard_all(self) -> Iterator[None]:
        """Guard what is compiled inside with the backend `wanted`, or with each one if it is `all`; count other graphs.

        Neither is done for the backend "eager" and for those that torch uses inside, nor for any backend if `wanted` is
        None. With `is_watching`, inductor's passes are watched from the first compilation until the context is left.
        """
        with self._undo, guarding_every(self._handle):
            yield

    def finish(self, tell: Callable[[str], None]) -> None:
        """Look into the failures of the script as `GuardFindings.finish` does, and wait for the answers.

        `tell` gets a line before each command. Nothing is done if no guard was made. An Exception or a Ctrl-C here
        becomes a note and is not raised; the failures that are left then keep their records. A Ctrl-C also ends the
        command that is under way.
        """
        if self._findings is None:
            return
        try:
            self._findings.finish(tell=tell)
        except KeyboardInterrupt:
            self._findings.followup.interrupt()
            self._notes.append(
                "interrupted while culprits were named: `torchdelta locate` on a report's place does that"
            )
        except Exception as error:  # the script has ended, and its status stands
            self._notes.append(f"naming culprits failed ({type(error).__name__}: {error})")

    def summary(self) -> GuardSummary:
        """Return the summary of all guards; graphs of backends that are not guarded count in it as unchecked.

        A note is added if graphs were compiled and none had the backend to guard.
        """
        guarded = self._findings.summary() if self._findings is not None else GuardSummary(graphs=0, checked=0)
        unguarded = {f"not guarded, its backend is {name}": many for name, many in self._unguarded.items()}
        notes = (*guarded.notes, *self._notes)
        if unguarded and not guarded.graphs:
            notes = (*notes, f"--guard {self.wanted}: nothing that was compiled has that backend")
        return replace(
            guarded,
            graphs=guarded.graphs + self._unguarded.total(),
            unchecked={**guarded.unchecked, **unguarded},
            notes=notes,
        )

    def pass_summary(self) -> PassSummary | None:
        """Return the summary of the passes, or None if they are not watched; an empty one if nothing was compiled."""
        return (self._passes or PassSummary()) if self.is_watching else None

    def _handle(self, backend: Backend, name: str) -> Backend:
        """Return the backend to use in place of one that the script names; begin to watch passes if that is wanted.

        The backend itself is returned if no guard is wanted. A UsageError, for example because the script guards the
        backend by itself, becomes Refused.
        """
        try:
            if self.is_watching:
                self._begin_watching()
            return backend if self.wanted is None else self._guard(backend, name)
        except UsageError as error:
            raise Refused(str(error)) from error

    def _guard(self, backend: Backend, name: str) -> Backend:
        """Return the backend with a guard around it, or with a counter of its graphs if it is not the `wanted` one.

        `name` is the backend's name for torch.compile. All guards share one `GuardFindings`, which the first one makes.
        UsageError if the backend is a guard already, `wanted` or not, if an option of the guard has a wrong value, or
        if `out` cannot be made.
        """
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
            return self._count(backend, name)
        config = GuardConfig(**self.words)
        with self._lock:
            if self._findings is None:
                command = "diagnose" if config.minify else "locate"
                self._findings = GuardFindings(out=self.out, workplace=self.workplace, command=command)
        return Guard(backend, config, self._findings)

    def _count(self, backend: Backend, name: str) -> Backend:
        """Return a backend that compiles with this one, and counts each graph as not guarded under `name`."""

        def counting_backend(graph_module: Any, example_inputs: Any, **options: Any) -> Any:
            with self._lock:
                self._unguarded[name] += 1
            return backend(graph_module, example_inputs, **options)

        return counting_backend

    def _begin_watching(self) -> None:
        """Watch inductor's passes until `guard_all` is left, with the guards' policy; do nothing the second time.

        UsageError if the script watches passes by itself, or if the policy is wrong.
        """
        with _quietly():
            from torchdelta.passes.watch import watch_passes

        with self._lock:
            if self._passes is None:
                policy = self.words.get("policy", "noise")
                self._passes = self._undo.enter_context(watch_passes(policy=policy))


@contextmanager
def _quietly() -> Iterator[None]:
    """Ignore warnings while our modules are imported, because the script may have turned warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
