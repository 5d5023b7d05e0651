"""A user's own list of passes, run over a copy of a graph: which of them is the first to change the numbers?"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from torchdelta import errors
from torchdelta._torch import tensors
from torchdelta._torch.compile import graph_versions
from torchdelta._torch.graphs import graphs
from torchdelta._torch.process import runtime, versions
from torchdelta._torch.process.exceptions import place_of
from torchdelta.errors import UsageError
from torchdelta.nodewise.matching import assign_handles
from torchdelta.passes.succession import GraphVersion, Succession
from torchdelta.program.copies import copy_together
from torchdelta.records.case import CheckOptions, name_of
from torchdelta.records.failure import Failure
from torchdelta.records.passes import PassRow, Pipeline
from torchdelta.records.verdict import Verdict, worst_of

Pass = Callable[..., Any]

_GRAPH_NAMES = ("graph", "g", "fx_graph")
_INPUT_NAMES = ("example_inputs", "inputs", "args", "example_args")
UNCHANGED = "the graph is as it was"
NOTHING_CHANGED = "no pass changed the graph, so nothing was compared"


def check_pipeline(
    graph: GraphModule,
    inputs: Sequence[Any],
    passes: Sequence[Pass],
    *,
    policy: str = "noise",
    stages: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] = (),
    strict: str | Sequence[str] = (),
    seed: int = 0,
    semantic: bool = True,
) -> Pipeline:
    """Run passes over a copy of a graph, and name the first behind which it computes something else.

    A pass takes a graph module and example inputs, a graph module, or a graph, as its signature says; it changes that
    in place or returns another. Behind each one that changes something, the graph is held against the original, and
    where they differ, against the graph before the pass: what a pass introduces is told from what it was given wrong.
    A list ends at a pass that raises. `policy` and what comes behind it is as for `check`.
    """
    if not isinstance(graph, GraphModule):
        raise UsageError(
            f"passes work on a torch.fx.GraphModule, and {name_of(graph)} is none: trace it with "
            "torch.fx.symbolic_trace, or take torch.export.export(model, inputs).module()"
        )
    if not passes:
        raise UsageError("no pass was given: there is nothing to hold against the graph")
    for each in passes:
        if not callable(each):
            raise UsageError(f"a pass is a function of a graph module and its inputs, not {type(each).__name__}")
    options = CheckOptions.read(
        policy=policy, stages=stages, ignore=ignore, strict=strict, seed=seed, semantic=semantic
    )
    with runtime.preserved():
        original = graphs.copied_graph(graph)
        assign_handles(original)
        run = _PipelineRun(
            name=type(graph).__name__, succession=Succession(original=original, inputs=tuple(inputs), options=options)
        )
        return run.answer(passes)


@dataclass(kw_only=True)
class _PipelineRun:
    name: str
    succession: Succession
    notes: list[str] = field(default_factory=list)

    def answer(self, passes: Sequence[Pass]) -> Pipeline:
        began = time.perf_counter()
        # what fails by itself, or has no truth, is said before any pass runs
        check = self.succession.check
        _ = check.baseline.reference
        rows = tuple(self._rows(passes))
        changed = [row for row in rows if row.changed or row.failure is not None]
        if not changed:
            self.notes.append(NOTHING_CHANGED)
        asked = [Verdict.INCONCLUSIVE if row.introduced is None else row.introduced for row in changed]
        # what adds up over several passes is introduced by none of them
        asked += [row.against_original for row in changed[-1:] if row.against_original is not None]
        return Pipeline(
            verdict=worst_of(asked),
            environment=versions.environment(),
            case=replace(check.case, program=self.name, transform=", ".join(row.name for row in rows)),
            rows=rows,
            notes=tuple(dict.fromkeys((*self.notes, *check.baseline.notes))),
            seconds=time.perf_counter() - began,
        )

    def _rows(self, passes: Sequence[Pass]) -> Iterator[PassRow]:
        before: Callable[..., Any] = self.succession.original
        against = Verdict.EQUIVALENT
        stopped = ""
        for each in passes:
            name = _name_of(each)
            if not stopped and not isinstance(before, GraphModule):
                stopped = "a pass before it returned something else than a graph"
            if stopped or not isinstance(before, GraphModule):
                yield PassRow(name=name, has_run=False, note=f"not run: {stopped}")
                continue
            try:
                after = self._applied(each, graphs.copied_graph(before))
            except errors.caught_from_user_code() as error:
                yield _crashed(name, error)
                stopped = f"{name} raised before it"
                continue
            if isinstance(after, GraphModule) and _state_of(after) == _state_of(before):
                yield PassRow(name=name, introduced=Verdict.EQUIVALENT, against_original=against, reason=UNCHANGED)
                continue
            step = self.succession.step(before, after)
            yield _row(name, step)
            before, against = after, step.against_original

    def _applied(self, each: Pass, graph: GraphModule) -> Callable[..., Any]:
        """Run a pass on a graph that is its own, and return what it made of it, ready to be called."""
        made = each(*_arguments(each, graph, self.succession.inputs))
        made = getattr(made, "graph_module", made)  # torch's own passes return it with a flag
        if isinstance(made, Graph):
            made = graph if made is graph.graph else GraphModule(graph, made)
        # a count, or whether anything was changed, says that it was changed in place
        return graphs.runnable(None if isinstance(made, (bool, int)) else made, graph)


def _row(name: str, step: GraphVersion) -> PassRow:
    return PassRow(
        name=name,
        changed=True,
        introduced=step.introduced,
        against_original=step.against_original,
        error=step.worst.error if step.worst is not None else None,
        noise=step.worst.noise if step.worst is not None else None,
        culprit=step.culprit,
        reason=step.reason,
        failure=step.failure,
        note=step.note,
    )


def _crashed(name: str, error: BaseException) -> PassRow:
    text = "".join(traceback.format_exception(error))
    failure = Failure.of(error, stage="transform", traceback=text, where=place_of(error))
    words = f"{failure.type}: {failure.message}".splitlines()[0]
    return PassRow(name=name, introduced=Verdict.CRASHED, reason=f"the pass itself raised {words}", failure=failure)


def _arguments(each: Pass, graph: GraphModule, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a pass is called with, by its signature."""
    try:
        taken = list(inspect.signature(each).parameters.values())
    except (TypeError, ValueError):  # builtins and C++ functions do not tell
        taken = []
    placed = [one for one in taken if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    first = graph.graph if placed and _wants_graph(placed[0]) else graph
    if not taken or any(one.kind is one.VAR_POSITIONAL for one in taken):
        return first, list(copy_together(inputs, name="the inputs"))
    if len(placed) > 1 and (placed[1].default is inspect.Parameter.empty or placed[1].name in _INPUT_NAMES):
        return first, list(copy_together(inputs, name="the inputs"))
    return (first,)


def _wants_graph(parameter: inspect.Parameter) -> bool:
    said = parameter.annotation
    if said is inspect.Parameter.empty:
        return parameter.name in _GRAPH_NAMES
    words = said if isinstance(said, str) else getattr(said, "__name__", str(said))
    return "GraphModule" not in words and "Graph" in words


def _name_of(each: Pass) -> str:
    while isinstance(each, functools.partial):
        each = each.func
    return name_of(each).rpartition("<locals>.")[2]


def _state_of(graph: GraphModule) -> str:
    return graph_versions.key_of(graph, _described)


def _described(held: Any) -> str:
    """Say what a graph holds, so that what is written into a weight is a change too; in doubt it is another."""
    if isinstance(held, torch.Tensor):
        if not tensors.has_own_buffer(held):
            return f"{id(held)}"
        flat = held.detach().contiguous().reshape(-1).cpu()
        content = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()
        return repr((tuple(held.shape), held.stride(), held.dtype, held.requires_grad, content))
    if isinstance(held, torch.nn.Module):
        inside = {**dict(held.named_parameters()), **dict(held.named_buffers())}
        plain = [
            (type(module), sorted((name, repr(value)) for name, value in vars(module).items() if name not in inside))
            for module in held.modules()
        ]
        return f"{held!r} {plain} {[(name, _described(tensor)) for name, tensor in inside.items()]}"
    return repr(held)
