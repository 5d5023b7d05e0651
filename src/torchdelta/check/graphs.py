"""The graphs that a check's transform is given, with the inputs that they have in a real call.

`capture_graphs` runs the program with a seam that records each graph, and never applies the transform, so no code of
the candidate runs. A feature that runs such a program anyway puts a `GraphRecorder` at its seam instead. `write_graphs`
and `read_graphs` take recorded graphs from a worker to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta import errors
from torchdelta._torch.compile import settings
from torchdelta._torch.compile.seams import HandedGraph, Seam, hand_on
from torchdelta._torch.graphs import graphs
from torchdelta._torch.process import runtime
from torchdelta.check.baseline import Baseline
from torchdelta.errors import ProgramError, ReportUnreadable
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import Side
from torchdelta.records.case import DYNAMO
from torchdelta.records.strict_json import read_json, write_json
from torchdelta.storage.graphs import modules_named, read_graph, read_values, write_graph, write_values
from torchdelta.transforms.base import Transform, TransformedSide
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import export_side
from torchdelta.transforms.fx_pass import FxPass
from torchdelta.transforms.wrappers import ObservedAfterAot, ObservedTransform, innermost

CALLS = 4
"""How many calls of one graph are recorded: a failure may depend on the values."""
_INDEX = "graphs.json"


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A graph on its way to a transform, and the inputs of one of its calls."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    level: str = ""
    """The part of the compiler that handed it over; empty for an exported graph."""
    autocast: tuple[str, str] | None = None
    """Device and dtype of the autocast around the call, which the graph itself does not have; None without one."""


@dataclass(kw_only=True)
class GraphRecorder:
    """A seam that records every graph with its inputs, and runs the graph itself in place of a candidate."""

    with_gradients: bool = True
    """Whether tensors that are recorded with grad mode on keep their `requires_grad`."""
    calls: int | None = None
    """How many calls of the program are recorded; None records all."""
    is_paused: bool = False
    captured: list[CapturedGraph] = field(default_factory=list)

    def __call__(self, handed: HandedGraph) -> Callable[..., Any]:
        """Return a callable that runs the graph itself; its first `CALLS` calls are appended to `captured`.

        Each record has copies of the arguments, the level, and one copy of the graph, which all of them share. Calls
        while `is_paused` are not recorded or counted. Tensor arguments are detached without `with_gradients`, and if
        the call is made with grad mode off, as that of an optimizer is.
        """
        graph = graphs.copy_graph(handed.graph)
        calls = 0

        def run(*args: Any) -> Any:
            """Run the graph and return its result; record the call unless paused or after `CALLS` calls."""
            nonlocal calls
            calls += not self.is_paused
            if calls <= CALLS and not self.is_paused:
                inputs = copy_together(args, name="the inputs of a captured graph")
                if not (self.with_gradients and torch.is_grad_enabled()):
                    inputs = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in inputs)
                autocast = runtime.autocast()
                self.captured.append(CapturedGraph(graph=graph, inputs=inputs, level=handed.level, autocast=autocast))
            return handed.graph.forward(*args)

        return run


class RecordedTransform(ObservedTransform):
    """A transform whose graphs are recorded while the program is called, and not while a backward runs."""

    def __init__(self, inner: Transform, recorder: GraphRecorder) -> None:
        """Put the recorder before the inner transform, as its seam."""
        super().__init__(inner, recorder)
        self.recorder = recorder

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Apply the transform with the recorder at its seam, and give the transformed side.

        The recorder records during the side's first `recorder.calls` calls, or all if that is None. It is paused
        outside of them, such as in a backward. The caller's `seam` gets no graph.
        """
        recorder, calls = self.recorder, 0
        recorder.is_paused = True
        with super().apply(side, draws_random=draws_random, lifted=lifted, seam=seam) as transformed:
            plain = transformed.side.call

            def call(*args: Any, **kwargs: Any) -> Any:
                """Call the side, with the recorder paused unless this is one of the first `recorder.calls` calls."""
                nonlocal calls
                calls += 1
                recorder.is_paused = recorder.calls is not None and calls > recorder.calls
                try:
                    return plain(*args, **kwargs)
                finally:
                    recorder.is_paused = True

            yield replace(transformed, side=replace(transformed.side, call=call))


def capture_graphs(baseline: Baseline, transform: Transform, level: str = DYNAMO) -> list[CapturedGraph]:
    """Return the graphs that the transform would be given; ProgramError if torch makes none of the program.

    A compiler gets several. Each recorded call, with its inputs, is an entry of its own, so one graph comes up to
    `CALLS` times. At the level `aot` these are the forward and backward graphs that its own backend is given. Any other
    transform gets the whole program as one graph, whatever the level. The transform itself is not applied.
    """
    return _record(baseline, transform, level) if transform.traits.is_compiler else [_trace(baseline, transform)]


def _record(baseline: Baseline, transform: Transform, level: str) -> list[CapturedGraph]:
    """Run the program with a recorder at the compiler's seam; return each recorded call: its graph, inputs and level.

    The transform's own backend does not run. At the level of dynamo, only the stage `forward` runs; at the level `aot`,
    all stages except `steps` do, and inputs are detached. Raise ProgramError if nothing was recorded.
    """
    is_dynamo = level == DYNAMO
    # at the level aot, each gradient is computed by a graph of its own
    recorder = GraphRecorder(with_gradients=is_dynamo)
    stages = ("forward",) if is_dynamo else tuple(each for each in baseline.plan.stages if each != "steps")
    run = baseline.run(
        ObservedTransform(_capturing_like(transform), recorder)
        if is_dynamo
        else ObservedAfterAot(transform, recorder, compile_graphs=False),
        plan=replace(baseline.plan, stages=stages, further=()),
        draws_random=False,
    )
    if not recorder.captured:
        why = f": {run.failure.message}" if run.failure is not None else ""
        source = "dynamo captures" if is_dynamo else "AOTAutograd makes"
        raise ProgramError(f"{baseline.program.name}: {source} no graph of it, so there is nothing to minify{why}")
    return recorder.captured


def _capturing_like(transform: Transform) -> Compiler:
    """Return a compiler that captures as this transform does, and changes nothing.

    ProgramError if the transform is neither a compiler nor a pass.
    """
    transform = innermost(transform)
    if isinstance(transform, Compiler):
        return transform.with_backend("eager")
    if isinstance(transform, FxPass):
        return Compiler("eager", transform.options)
    raise ProgramError(f"the graphs that {type(transform).__name__} is given cannot be captured")


def _trace(baseline: Baseline, transform: Transform) -> CapturedGraph:
    """Return the program as the one graph that the transform gets, with flat copied inputs.

    It is exported, unless a pass asks for another graph. ProgramError if torch cannot make it.
    """
    transform = innermost(transform)
    side = Side.copied_from(baseline.program)
    try:
        module, lowered = transform.trace(side) if isinstance(transform, FxPass) else export_side(side, strict=False)
    except Exception as error:
        words = str(error).splitlines()[0] if str(error) else ""
        name = baseline.program.name
        raise ProgramError(
            f"{name} cannot be exported, so there is no graph to minify: {type(error).__name__}: {words}"
        ) from error
    # `flatten_signature` removes the calling convention by which the inputs are flattened
    inputs = graphs.flat_inputs(module, lowered.args, lowered.kwargs)
    return CapturedGraph(graph=graphs.flatten_signature(module), inputs=tuple(inputs))


@dataclass(frozen=True, kw_only=True)
class ProgramGraphs:
    """The graphs of a program, with the global state under which they were captured."""

    graphs: tuple[CapturedGraph, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The compiler's settings that differ from torch's defaults, as far as JSON can carry them."""
    flags: Mapping[str, Any] | None = None
    """Torch's flags as `runtime.plain_flags` returns them; None are those of the process that asks."""

    @classmethod
    def captured_here(cls, graphs: Sequence[CapturedGraph]) -> ProgramGraphs:
        """Return graphs that were captured in this process, with its settings and flags."""
        plain = settings.plain_settings(settings.changed_settings())
        return cls(graphs=tuple(graphs), settings=plain, flags=runtime.plain_flags())


def write_graphs(captured: Sequence[CapturedGraph], directory: Path) -> None:
    """Write graphs and inputs into an existing directory, and then an index; UsageError if one cannot be written.

    The index has the compiler's settings and torch's flags of this process too, which the program may have set.
    """
    rows = []
    for number, each in enumerate(captured):
        write_graph(each.graph, directory / f"graph-{number}.json")
        write_values(each.inputs, directory / f"inputs-{number}.json")
        rows.append({"level": each.level, "modules": modules_named(each.graph)})
    state = ProgramGraphs.captured_here(())
    index = {"graphs": rows, "settings": state.settings, "flags": state.flags}
    write_json(directory / _INDEX, index)


def read_graphs(directory: Path) -> ProgramGraphs | None:
    """Return the graphs that `write_graphs` wrote; ReportUnreadable if one of the files is damaged.

    None if there is no index, which `write_graphs` writes last. A graph that calls the user's own functions or
    operators can be read only once their modules are imported here.
    """
    path = directory / _INDEX
    if not path.exists():
        return None
    index = read_json(path, remedy="capture the graphs again")
    try:
        rows = [(row["modules"], row["level"]) for row in index["graphs"]]
        settings, flags = index["settings"], index["flags"]
    except (KeyError, TypeError) as error:
        raise ReportUnreadable(f"{path} is damaged ({errors.describe(error)}): capture the graphs again") from error
    captured = [
        CapturedGraph(
            graph=read_graph(directory / f"graph-{number}.json", allow=modules),
            inputs=tuple(read_values(directory / f"inputs-{number}.json", allow=modules)),
            level=level,
        )
        for number, (modules, level) in enumerate(rows)
    ]
    return ProgramGraphs(graphs=tuple(captured), settings=settings, flags=flags)
