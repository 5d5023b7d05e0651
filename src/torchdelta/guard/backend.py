"""The guard itself: a torch.compile backend around another, which gets every graph and checks it on real calls.

    model = torch.compile(model, backend=td.guard("inductor"))

Start with `Guard.__call__`, which torch.compile calls for each graph. It returns a callable around a `GuardedGraph`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch.compile import aot, dynamo
from torchdelta._torch.compile.seams import HandedGraph, Make
from torchdelta._torch.compile.settings import plain_settings
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import source_line
from torchdelta.errors import TorchDeltaError, UsageError
from torchdelta.guard.config import PRESETS, GuardConfig
from torchdelta.guard.findings import GuardFindings
from torchdelta.guard.graph import GuardedGraph
from torchdelta.minify.queries import spec_of
from torchdelta.records.guard import GuardedGraphRecord, GuardSummary

_COMPILING = threading.local()
"""The graph that a guard has handed to its backend, in each thread."""


class Guard:
    """A backend that compiles with another one, and checks what that one returns."""

    def __init__(self, backend: str | dynamo.Backend, config: GuardConfig, findings: GuardFindings) -> None:
        """Take the backend to compile with and to check: a function, or the name of a registered backend.

        UsageError if the name is unknown or the backend is a guard already. `self.origin` is the backend without the
        wrappers of torch.compile.
        """
        self.origin = dynamo.origin_of(backend)
        if isinstance(self.origin.backend, Guard):
            raise UsageError(f"{self.origin.name} is guarded already: one guard is enough")
        self.backend = self.origin.backend if isinstance(backend, str) else backend
        self.is_inductor_by_name = backend == "inductor"
        """Whether the guard has to turn modes and options into inductor's settings itself."""
        # not `config`, because that attribute of a backend holds inductor's settings
        self.guard_config = config
        self.findings = findings
        # torch.compile shows this name in its messages
        self.__name__ = self.origin.name

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph with the backend; return a callable that runs it and checks its calls as the config says.

        `options` are those that torch.compile passes to a backend, such as `mode`; for "inductor" by its name they
        become settings of inductor. UsageError if another guard is around this one.
        """
        settings = dict(self.origin.config)
        if self.is_inductor_by_name and options:
            settings = dynamo.config_of(**options)
            options = {"config_patches": settings}
        if graph_module is getattr(_COMPILING, "graph", None):
            raise UsageError(f"{self.__name__} is guarded already, by a guard around this one: one guard is enough")
        with _compiling(graph_module):
            return self._compile(graph_module, example_inputs, options, settings)

    def _compile(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        options: dict[str, Any],
        settings: dict[str, Any],
    ) -> Callable[..., Any]:
        """Compile a graph with the backend; return the callable, in which dynamo's or the ATen graphs are guarded.

        `GuardConfig.graph` says which of them. A backend that is not built on AOTAutograd has no ATen graphs: then
        nothing is guarded, and a note says so. The backend gets the `options`; `settings` are inductor's, and are only
        written into the recordings.
        """
        if self.guard_config.graph == "dynamo":

            def make(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                return self.backend(graph, list(inputs), **options)

            return self._guard_graph(graph_module, example_inputs, make, "dynamo", settings)
        with aot.intercepting(lambda handed: self._guard_handed(handed, settings)) as interception:
            compiled = self.backend(graph_module, example_inputs, **options)
        if not interception.programs:
            self.findings.note(
                f"{self.__name__} is not built on AOTAutograd: it has no ATen graphs, and was not guarded"
            )
        return compiled

    def finish(self) -> GuardSummary:
        """Run `locate`, or `diagnose` if the config says `minify`, on failures; wait for them, and return a summary.

        `diagnose` runs on every failure, `locate` only on a graph that diverged and has no culprit yet. The records are
        updated with the answers (see `GuardFindings.finish`).
        """
        self.findings.finish()
        return self.findings.summary()

    @property
    def summary(self) -> GuardSummary:
        """The summary of all graphs so far."""
        return self.findings.summary()

    def _guard_handed(self, handed: HandedGraph, settings: dict[str, Any]) -> Callable[..., Any]:
        """Compile a graph that AOTAutograd hands on, guarded by `_guard_graph`, and return the callable."""
        return self._guard_graph(handed.graph, handed.example_inputs, handed.make, handed.level, settings)

    def _guard_graph(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], make: Make, level: str, settings: dict[str, Any]
    ) -> Callable[..., Any]:
        """Compile one graph by `make`, and return the callable, guarded if that is wanted and possible.

        A record is added to the findings; it says why a graph is not guarded: `GuardConfig.only` excludes it, or its
        nodes cannot be copied. With `record="always"` a guarded graph is written to disk before it is compiled. An
        error of `make` for a guarded graph is kept for the first call, which raises or falls back. But it is raised at
        once with `check="off"`, with `on_failure="report"` (after it was reported), or if it is torchdelta's own or
        meant for dynamo. A guarded callable takes its arguments one by one at the `level` "dynamo", and in a list at
        all others. An unguarded one is what `make` returns.
        """
        record = self.findings.add(
            GuardedGraphRecord(
                number=0,
                name=_name_of(graph_module),
                backend=self.__name__,
                level=level,
                nodes=len(graph_module.graph.nodes),
            )
        )
        if not self.guard_config.concerns(graph_module):
            self.findings.update(replace(record, unchecked="it is not one of those that were asked for"))
            return make(graph_module, example_inputs)
        try:
            guarded = GuardedGraph(
                config=self.guard_config,
                findings=self.findings,
                record=record,
                original=graphs.copy_nodes(graph_module),
                make=make,
                run=graph_module.forward,
                transform=self._spec,
                options={f"config.{name}": value for name, value in plain_settings(settings).items()},
            )
        except Exception as error:  # a mistake of ours must not cost the user the run
            self.findings.update(
                replace(record, unchecked=f"its nodes could not be copied ({type(error).__name__}: {error})")
            )
            return make(graph_module, example_inputs)
        guarded.record_before_compiling(example_inputs)
        try:
            guarded.run = make(graph_module, example_inputs)
        except TorchDeltaError:
            raise
        except Exception as error:
            if dynamo.is_for_dynamo(error) or self.guard_config.check == "off":
                raise
            guarded.fail_to_compile(error, example_inputs)
            if self.guard_config.on_failure == "report":
                raise  # as it would without a guard
        return (
            (lambda *args: guarded(*args))
            if level == "dynamo"
            else aot.mark_boxed(lambda args: guarded.call_boxed(args))
        )

    @property
    def _spec(self) -> str | None:
        """The name by which another process finds the backend, or None if it cannot be imported."""
        origin = self.origin
        if origin.is_inductor or origin.name in dynamo.backend_names():
            return origin.name if origin.is_inductor else f"backend:{origin.name}"
        return spec_of(origin.backend)


class GuardFactory:
    """`torchdelta.guard`: builds guards."""

    def __call__(
        self,
        backend: str | dynamo.Backend = "inductor",
        *,
        out: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Guard:
        """Return a torch.compile backend that compiles with another one and checks it.

        `options` are the fields of `GuardConfig`. Findings are written into `out`; without it, into a new directory in
        the current one, made when there is something to write. UsageError if `out` cannot be made, the backend is
        unknown or guarded, or an option or its value does not exist.
        """
        config = _build_config(options)
        command = "diagnose" if config.minify else "locate"
        findings = GuardFindings(out=Path(out).absolute() if out is not None else None, command=command)
        return Guard(backend, config, findings)

    def preset(self, level: int, backend: str | dynamo.Backend = "inductor", **options: Any) -> Guard:
        """Return the guard that replaces one of PyTorch's four repro levels; `options` override those of `PRESETS`.

        UsageError if `level` is not from 1 to 4.
        """
        if level not in PRESETS:
            raise UsageError(f"there is no repro level {level!r}: they are {', '.join(map(str, PRESETS))}")
        return self(backend, **{**PRESETS[level], **options})


guard = GuardFactory()


@contextmanager
def _compiling(graph_module: GraphModule) -> Iterator[None]:
    """Mark a graph as being compiled by a guard in this thread, while the context is open.

    `Guard.__call__` refuses a marked graph, because then another guard is around this one.
    """
    before = getattr(_COMPILING, "graph", None)
    _COMPILING.graph = graph_module
    try:
        yield
    finally:
        _COMPILING.graph = before


def _build_config(options: dict[str, Any]) -> GuardConfig:
    """Return the config with these options; UsageError if one does not exist or has a value that it cannot have."""
    try:
        return GuardConfig(**options)
    except TypeError as error:
        raise UsageError(f"a guard does not have that option: {error}") from None


def _name_of(graph_module: GraphModule) -> str:
    """Return the first source line that a node of the graph has, or a text that says that there is none.

    Placeholders and the output do not count.
    """
    lines = (source_line(node) for node in graph_module.graph.nodes if node.op not in ("placeholder", "output"))
    return next(filter(None, lines), "a graph without source lines")
