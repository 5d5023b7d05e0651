"""The guard: a torch.compile backend around another, which sees every graph and checks it on real calls."""

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
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import source_line
from torchdelta.errors import TorchDeltaError, UsageError
from torchdelta.guard.config import PRESETS, GuardConfig
from torchdelta.guard.findings import GuardFindings
from torchdelta.guard.graph import GuardedGraph
from torchdelta.minify.queries import plain_settings, spec_of
from torchdelta.records.guard import GuardedGraphRecord, GuardSummary

_COMPILING = threading.local()
"""What a guard has handed on to its backend, in each thread."""


class Guard:
    """A backend that does what another does, and watches it."""

    def __init__(self, backend: str | dynamo.Backend, vigilance: GuardConfig, ledger: GuardFindings) -> None:
        self.origin = dynamo.origin_of(backend)
        if isinstance(self.origin.backend, Guard):
            raise UsageError(f"{self.origin.name} is guarded already: one guard is enough")
        self.backend = self.origin.backend if isinstance(backend, str) else backend
        self.is_inductor_by_name = backend == "inductor"
        """Whether nobody else turns modes and options into settings."""
        self.vigilance = vigilance
        self.ledger = ledger
        # torch.compile takes a backend's name for what it says about it
        self.__name__ = self.origin.name

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph; what comes back is checked when it is first called."""
        config = dict(self.origin.config)
        if self.is_inductor_by_name and options:
            config = dynamo.config_of(**options)
            options = {"config_patches": config}
        if graph_module is getattr(_COMPILING, "graph", None):
            raise UsageError(f"{self.__name__} is guarded already, by a guard around this one: one guard is enough")
        with _at_work_on(graph_module):
            return self._compiled(graph_module, example_inputs, options, config)

    def _compiled(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], config: dict[str, Any]
    ) -> Callable[..., Any]:
        if self.vigilance.graph == "dynamo":

            def make(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                return self.backend(graph, list(inputs), **options)

            return self._guarded(graph_module, example_inputs, make, "dynamo", config)
        with aot.intercepting(lambda handed: self._behind_aot(handed, config)) as passed:
            made = self.backend(graph_module, example_inputs, **options)
        if not passed.programs:
            self.ledger.note(f"{self.__name__} is not built on AOTAutograd: it has no ATen graphs, and was not guarded")
        return made

    def finish(self) -> GuardSummary:
        """Name the culprits of what was found, wait for what is under way, and return what came of it all."""
        self.ledger.finish()
        return self.ledger.summary()

    @property
    def summary(self) -> GuardSummary:
        """What came of it so far."""
        return self.ledger.summary()

    def _behind_aot(self, handed: HandedGraph, config: dict[str, Any]) -> Callable[..., Any]:
        return self._guarded(handed.graph, handed.example_inputs, handed.make, handed.level, config)

    def _guarded(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], make: Make, level: str, config: dict[str, Any]
    ) -> Callable[..., Any]:
        seen = self.ledger.enter(
            GuardedGraphRecord(
                number=0,
                name=_name_of(graph_module),
                backend=self.__name__,
                level=level,
                nodes=len(graph_module.graph.nodes),
            )
        )
        if not self.vigilance.concerns(graph_module):
            self.ledger.settle(replace(seen, unchecked="it is not one of those that were asked for"))
            return make(graph_module, example_inputs)
        try:
            guarded = GuardedGraph(
                vigilance=self.vigilance,
                ledger=self.ledger,
                seen=seen,
                original=graphs.copy_nodes(graph_module),
                make=make,
                run=graph_module.forward,
                transform=self._spec,
                options={f"config.{name}": value for name, value in plain_settings(config).items()},
            )
        except Exception as error:  # a mistake of ours must not cost the user the run
            self.ledger.settle(
                replace(seen, unchecked=f"its nodes could not be kept ({type(error).__name__}: {error})")
            )
            return make(graph_module, example_inputs)
        guarded.foresee_death(example_inputs)
        try:
            guarded.run = make(graph_module, example_inputs)
        except TorchDeltaError:
            raise
        except Exception as error:
            if dynamo.is_for_dynamo(error) or self.vigilance.check == "off":
                raise
            guarded.fail_to_compile(error, example_inputs)
            if self.vigilance.on_failure == "report":
                raise  # where it would be without a guard
        return (
            (lambda *args: guarded(*args))
            if level == "dynamo"
            else aot.mark_boxed(lambda args: guarded.call_boxed(args))
        )

    @property
    def _spec(self) -> str | None:
        origin = self.origin
        if origin.is_inductor or origin.name in dynamo.backend_names():
            return origin.name if origin.is_inductor else f"backend:{origin.name}"
        return spec_of(origin.backend)


class GuardFactory:
    """`torchdelta.guard`: makes guards."""

    def __call__(
        self,
        backend: str | dynamo.Backend = "inductor",
        *,
        out: str | os.PathLike[str] | None = None,
        **words: Any,
    ) -> Guard:
        """Return a torch.compile backend that watches another; the words are those of `Vigilance`.

        Each graph is checked on its first real call. What is found is written into `out`, by default a new directory.
        """
        vigilance = _vigilance(words)
        command = "diagnose" if vigilance.minify else "locate"
        return Guard(
            backend, vigilance, GuardFindings(out=Path(out).absolute() if out is not None else None, command=command)
        )

    def preset(self, level: int, backend: str | dynamo.Backend = "inductor", **words: Any) -> Guard:
        """Return the guard that does what one of PyTorch's four repro levels is for."""
        if level not in PRESETS:
            raise UsageError(f"there is no repro level {level!r}: they are {', '.join(map(str, PRESETS))}")
        return self(backend, **{**PRESETS[level], **words})


guard = GuardFactory()


@contextmanager
def _at_work_on(graph_module: GraphModule) -> Iterator[None]:
    before = getattr(_COMPILING, "graph", None)
    _COMPILING.graph = graph_module
    try:
        yield
    finally:
        _COMPILING.graph = before


def _vigilance(words: dict[str, Any]) -> GuardConfig:
    try:
        return GuardConfig(**words)
    except TypeError as error:
        raise UsageError(f"a guard does not know that word: {error}") from None


def _name_of(graph_module: GraphModule) -> str:
    """Return the user's first line that a graph comes from."""
    lines = (source_line(node) for node in graph_module.graph.nodes if node.op not in ("placeholder", "output"))
    return next(filter(None, lines), "a graph without source lines")
