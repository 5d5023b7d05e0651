"""A user's own list of passes, run over a copy of a graph: which of them is the first to change the numbers?

    td.check_pipeline(graph, inputs, [fold_constants, fuse_gelu])

Start with `check_pipeline`; how a pass is judged is in `succession.py`.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from torchdelta import errors
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.keys import content_key
from torchdelta._torch.graphs.user_passes import Pass, run_pass
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
    or that returns a callable other than a graph, are not run. The verdict is the worst on the passes that change the
    graph or raise and, unless a pass raises, on the last graph against the original; INCONCLUSIVE if no pass changes
    the graph or raises. UsageError if `graph` is not a graph module, if there are no passes, or if one is not callable;
    ProgramError if the graph itself fails. Other arguments are those of `check`. Neither the graph nor the inputs are
    changed.
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

        The verdict on a pass is that on its graph against the graph before it, INCONCLUSIVE if they could not be
        compared, and CRASHED if the pass raised. The last changed graph against the original counts too, unless a pass
        raised after it. If no pass changed the graph, the verdict is INCONCLUSIVE and a note says so. Raise before the
        first pass runs if the original graph fails.
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
                inputs = copy_together(self.succession.inputs, name="the inputs")
                after = run_pass(each, graphs.copy_graph(before), inputs)
            except errors.caught_from_user_code() as error:
                yield _crash_row(name, error)
                stopped = f"{name} raised before it"
                continue
            if isinstance(after, GraphModule) and content_key(after) == content_key(before):
                yield PassRow(name=name, introduced=Verdict.EQUIVALENT, against_original=against, reason=UNCHANGED)
                continue
            step = self.succession.judge_step(before, after)
            yield _row(name, step)
            before, against = after, step.against_original


def _row(name: str, step: PassStep) -> PassRow:
    """Return the row of a pass `name` that changed the graph, with the verdicts and the evidence of `step`.

    `error` and `noise` are those of the worst comparison with the original, or None if nothing was compared with it.
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
    """Return the row of a pass that raised `error`: CRASHED, with the failure, and its first line in the reason."""
    text = "".join(traceback.format_exception(error))
    failure = Failure.of(error, stage="transform", traceback=text, where=place_of(error))
    words = f"{failure}".splitlines()[0]
    return PassRow(name=name, introduced=Verdict.CRASHED, reason=f"the pass itself raised {words}", failure=failure)


def _name_of(each: Pass) -> str:
    """Return the name of a pass: that of the function inside of partials, without functions that it is defined in."""
    while isinstance(each, functools.partial):
        each = each.func
    return name_of(each).rpartition("<locals>.")[2]
