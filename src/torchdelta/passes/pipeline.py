"""A user's own list of passes, run over a copy of a graph: which of them is the first to change the numbers?

    td.check_pipeline(graph, inputs, [fold_constants, fuse_gelu])

Start with `check_pipeline`; how a pass is judged is in `succession.py`.
"""

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
from torchdelta.passes.succession import PassStep, Succession
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
    """Run passes over a copy of a graph; return a row for each, and as `first` the first that raises or makes it wrong.

    A pass takes a graph module and example inputs, a graph module, or a graph, as its signature says; it changes that
    in place or returns another. The graph behind each pass that changes it is compared with the original, and, unless
    both graphs around the pass are equivalent to that, with the graph before the pass. Passes behind one that raises,
    or that returns a callable other than a graph, are not run. The verdict is INCONCLUSIVE if no pass changes the
    graph. UsageError if `graph` is not a graph module, if there are no passes, or if one is not callable; ProgramError
    if the graph itself fails. Other arguments are those of `check`. Neither the graph nor the inputs are changed.
    """
    if not isinstance(graph, GraphModule):
        raise UsageError(
            f"passes work on a torch.fx.GraphModule, and {name_of(graph)} is not one: trace it with "
            "torch.fx.symbolic_trace, or take torch.export.export(model, inputs).module()"
        )
    if not passes:
        raise UsageError("no pass was given: there is nothing to compare with the graph")
    for each in passes:
        if not callable(each):
            raise UsageError(f"a pass is a function of a graph module and its inputs, not {type(each).__name__}")
    options = CheckOptions.read(
        policy=policy, stages=stages, ignore=ignore, strict=strict, seed=seed, semantic=semantic
    )
    with runtime.preserved():
        original = graphs.copy_graph(graph)
        assign_handles(original)
        run = _PipelineRun(
            name=type(graph).__name__, succession=Succession(original=original, inputs=tuple(inputs), options=options)
        )
        return run.answer(passes)


@dataclass(kw_only=True)
class _PipelineRun:
    """One run of a list of passes."""

    name: str
    succession: Succession
    notes: list[str] = field(default_factory=list)

    def answer(self, passes: Sequence[Pass]) -> Pipeline:
        """Run the passes; return a row for each, and the worst verdict on the passes that changed the graph or raised.

        A pass whose effect could not be compared counts as INCONCLUSIVE, and the last changed graph against the
        original counts too. If no pass changed the graph, the verdict is INCONCLUSIVE and a note says so. Raise before
        the first pass runs if the original graph fails.
        """
        began = time.perf_counter()
        # raises before any pass runs if the graph itself fails or has no truth
        check = self.succession.check
        _ = check.baseline.reference
        rows = tuple(self._rows(passes))
        changed = [row for row in rows if row.changed or row.failure is not None]
        if not changed:
            self.notes.append(NOTHING_CHANGED)
        verdicts = [Verdict.INCONCLUSIVE if row.introduced is None else row.introduced for row in changed]
        # small errors may add up over several passes, although no single one introduces a difference
        verdicts += [row.against_original for row in changed[-1:] if row.against_original is not None]
        return Pipeline(
            verdict=worst_of(verdicts),
            environment=versions.environment(),
            case=replace(check.case, program=self.name, transform=", ".join(row.name for row in rows)),
            rows=rows,
            notes=tuple(dict.fromkeys((*self.notes, *check.baseline.notes))),
            seconds=time.perf_counter() - began,
        )

    def _rows(self, passes: Sequence[Pass]) -> Iterator[PassRow]:
        """Run each pass on a copy of the graph that the pass before it left, and yield a row for each pass.

        A pass that leaves the graph as it was is not compared: its row says EQUIVALENT, and has the earlier verdict
        against the original. Behind a pass that raised or did not return a graph, passes are not run, and their rows
        say why.
        """
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
                after = self._run_pass(each, graphs.copy_graph(before))
            except errors.caught_from_user_code() as error:
                yield _crash_row(name, error)
                stopped = f"{name} raised before it"
                continue
            if isinstance(after, GraphModule) and _key_of(after) == _key_of(before):
                yield PassRow(name=name, introduced=Verdict.EQUIVALENT, against_original=against, reason=UNCHANGED)
                continue
            step = self.succession.judge_step(before, after)
            yield _row(name, step)
            before, against = after, step.against_original

    def _run_pass(self, each: Pass, graph: GraphModule) -> Callable[..., Any]:
        """Run a pass on a graph that it may change in place; return the graph or callable that it leaves, ready to run.

        The given graph is returned if the pass returns None, a bool or an int; of torch's `PassResult` the module is
        taken. Raise TypeError for anything else that is neither callable nor a `Graph`.
        """
        result = each(*_arguments(each, graph, self.succession.inputs))
        result = getattr(result, "graph_module", result)  # torch's own passes return it with a flag
        if isinstance(result, Graph):
            result = graph if result is graph.graph else GraphModule(graph, result)
        # a pass that returns a count or a bool has changed the graph in place
        return graphs.as_callable(None if isinstance(result, (bool, int)) else result, graph)


def _row(name: str, step: PassStep) -> PassRow:
    """Return the row of a pass `name` that changed the graph, with all that `step` says about it.

    `error` and `noise` are those of the worst comparison with the original, or None if nothing was compared.
    """
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


def _crash_row(name: str, error: BaseException) -> PassRow:
    """Return the row of a pass that raised: CRASHED, with the failure and the first line of its message."""
    text = "".join(traceback.format_exception(error))
    failure = Failure.of(error, stage="transform", traceback=text, where=place_of(error))
    words = f"{failure.type}: {failure.message}".splitlines()[0]
    return PassRow(name=name, introduced=Verdict.CRASHED, reason=f"the pass itself raised {words}", failure=failure)


def _arguments(each: Pass, graph: GraphModule, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments to call a pass with, by its signature: a graph module or a graph, and perhaps the inputs.

    Copies of the inputs come second, as one list, if the second parameter has no default or is named in `_INPUT_NAMES`,
    if there is a `*args`, or if the signature cannot be read or is empty.
    """
    try:
        parameters = list(inspect.signature(each).parameters.values())
    except (TypeError, ValueError):  # builtins and C++ functions have no signature
        parameters = []
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    first = graph.graph if positional and _wants_graph(positional[0]) else graph
    if not parameters or any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return first, list(copy_together(inputs, name="the inputs"))
    if len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name in _INPUT_NAMES):
        return first, list(copy_together(inputs, name="the inputs"))
    return (first,)


def _wants_graph(parameter: inspect.Parameter) -> bool:
    """Tell whether a parameter is a `Graph` and not a `GraphModule`, by its annotation, or without one by its name."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return parameter.name in _GRAPH_NAMES
    words = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "GraphModule" not in words and "Graph" in words


def _name_of(each: Pass) -> str:
    while isinstance(each, functools.partial):
        each = each.func
    return name_of(each).rpartition("<locals>.")[2]


def _key_of(graph: GraphModule) -> str:
    return graph_versions.key_of(graph, _describe_attribute)


def _describe_attribute(value: Any) -> str:
    """Return a text that two attributes share if their content is the same, so that a changed weight is a change.

    A tensor whose values cannot be read, such as a sparse or fake one, counts by its identity, so that even its copy is
    another. Values other than tensors and modules count by their `repr`.
    """
    if isinstance(value, torch.Tensor):
        if not tensors.has_own_buffer(value):
            return f"{id(value)}"
        flat = value.detach().contiguous().reshape(-1).cpu()
        content = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()
        return repr((tuple(value.shape), value.stride(), value.dtype, value.requires_grad, content))
    if isinstance(value, torch.nn.Module):
        state = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        plain = [
            (type(module), sorted((name, repr(each)) for name, each in vars(module).items() if name not in state))
            for module in value.modules()
        ]
        return f"{value!r} {plain} {[(name, _describe_attribute(tensor)) for name, tensor in state.items()]}"
    return repr(value)
