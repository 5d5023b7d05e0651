"""The semantic question, asked graph by graph: is each graph that a compiler captured the same function in float64?

If the whole program cannot be asked, each of its graphs can, with the inputs of several calls. Parts that run between
the graphs are eager on both sides, but round in float64 as they do natively. A program that branches on its dtype is
captured natively here, and its graphs are lifted afterwards. If every graph is the same function and all else runs as
the reference does, the program is too.

    answer = ask_graphs(baseline, transform)
    answer.are_same                         # whether every graph was asked, and is the same function
    answer.add_to(stages)                   # the stages with a comparison for each value that is another function

Start with `ask_graphs`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.graphs.graphs import under_autocast
from torchdelta._torch.graphs.lift_graph import form_of, lift_graph
from torchdelta.check import semantic
from torchdelta.check.baseline import Baseline
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.graphs import CapturedGraph, capture_graphs
from torchdelta.compare.protocol import Answers
from torchdelta.errors import TorchDeltaError
from torchdelta.program.programs import Program
from torchdelta.records.comparison import Comparison, Scalar
from torchdelta.records.report import ASKED, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.fx_pass import FxPass
from torchdelta.transforms.wrappers import innermost


@dataclass(frozen=True, kw_only=True)
class GraphwiseAnswer:
    """What float64 says about the graphs of a program."""

    answers: dict[str, list[Comparison]]
    """The comparisons of all graphs, by stage; a path begins with the number of its graph."""
    count: int
    """Graphs that were asked."""
    unasked: tuple[str, ...] = ()
    """Why some graphs were not asked."""

    @property
    def question(self) -> str:
        """The text `asked` if there are graphs and every one was asked, or else why not.

        If some were not asked, the text has their number and the reason of the first one.
        """
        if not self.unasked:
            return ASKED if self.count else "not asked: there is no graph"
        return f"not asked of {len(self.unasked)} of {self.count + len(self.unasked)} graphs: {self.unasked[0]}"

    @property
    def are_same(self) -> bool:
        """Whether every graph was asked, and every answer is equivalent."""
        answers = [each.verdict for stage in self.answers.values() for each in stage]
        return self.question == ASKED and all(verdict is Verdict.EQUIVALENT for verdict in answers)

    def add_to(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return the stages, each with one more comparison for each value of a graph that diverged there in float64.

        Steps are taken by gradients: without a stage `gradients` those of the graphs belong to the stage `steps`. If
        `are_same`, the leaves of a stage get the largest error, noise and resolution of any graph, in any stage, in
        their details, as those of an answer in float64. A stage without comparisons is returned unchanged.
        """
        names = {stage.name for stage in stages}
        return [
            self._add_to(stage, "gradients" if stage.name == "steps" and "gradients" not in names else stage.name)
            for stage in stages
        ]

    def _add_to(self, stage: Stage, name: str) -> Stage:
        """Return a stage with the comparisons of the graphs' stage `name` that diverged, as `add_to` does."""
        if not stage.comparisons:
            return stage
        diverged = [each for each in self.answers.get(name, []) if each.verdict is Verdict.DIVERGED]
        comparisons = tuple(replace(each, details={**each.details, **self._details()}) for each in stage.comparisons)
        return Stage.of(stage.name, (*comparisons, *diverged), stage.reason)

    def _details(self) -> dict[str, Scalar]:
        """Return the largest error, noise and resolution of all graphs by name; an empty dict unless `are_same`."""
        comparisons = [comparison for stage in self.answers.values() for comparison in stage]
        if not self.are_same:
            return {}
        return {
            "semantic_error": max((each.error or 0.0 for each in comparisons), default=0.0),
            "semantic_noise": max((each.noise or 0.0 for each in comparisons), default=0.0),
            "semantic_resolution": max((each.resolution or 0.0 for each in comparisons), default=0.0),
        }


def ask_graphs(baseline: Baseline, transform: Transform) -> GraphwiseAnswer:
    """Capture the graphs that the transform is given, and ask of each whether it is the same function in float64.

    Return the answers. The inputs of a graph are those of its recorded calls, lifted. Graphs that compute nothing are
    left out. A graph that cannot be asked has its reason in `unasked`. If no graph can be captured, none is asked,
    and `unasked` has that reason alone.
    """
    answers: dict[str, list[Comparison]] = {}
    unasked: list[str] = []
    count = 0
    with baseline.timed("semantic"):
        try:
            captured = _calls_by_graph(capture_graphs(baseline, transform))
        except TorchDeltaError as error:
            return GraphwiseAnswer(answers={}, count=0, unasked=(str(error),))
        for number, calls in enumerate(captured):
            asked, of_graph = _ask_graph(calls, number, baseline, transform)
            if asked != ASKED:
                unasked.append(asked.removeprefix("not asked: "))
                continue
            count += 1
            for stage, comparisons in of_graph.items():
                answers.setdefault(stage, []).extend(
                    replace(
                        each,
                        path=f"graphs[{number}].{each.path}",
                        details={**each.details, "question": "semantic"},
                    )
                    for each in comparisons.values()
                )
    return GraphwiseAnswer(answers=answers, count=count, unasked=tuple(unasked))


def _ask_graph(
    calls: Sequence[CapturedGraph], number: int, baseline: Baseline, transform: Transform
) -> tuple[str, Answers]:
    """Return the text `asked`, or why one graph was not asked, and its answers by stage and path.

    The graph is a program of its own, with the inputs of its recorded `calls`, of which each but the first is an
    iteration. In place of the stage `steps` gradients are asked about. If the check of the graph raises a
    TorchDeltaError, that is the reason, without answers.
    """
    first, *others = calls
    graph = under_autocast(first.graph, *first.autocast) if first.autocast is not None else first.graph
    stages = ("forward",) if baseline.plan.stages == ("forward",) else ("forward", "gradients")
    whole = Baseline(
        program=Program(
            name=f"graph {number} of {baseline.program.name}",
            call=graph,
            args=first.inputs,
            lifted_call=lift_graph(copy.deepcopy(graph)),
        ),
        plan=replace(
            baseline.plan,
            stages=stages,
            iterations=1,
            further=tuple((other.inputs, {}) for other in others),
            loss=None,
            cotangent_dtypes=None,
        ),
        deterministic=baseline.deterministic,
        anomaly=baseline.anomaly,
    )
    try:
        lifted = semantic.run_lifted(whole, transform, _native_run(whole, transform))
        return semantic.judge_lifted(lifted, whole, keeps_names=True)
    except TorchDeltaError as error:
        return f"not asked: {error}", {}


def _native_run(whole: Baseline, transform: Transform) -> CandidateRun | None:
    """Return the native run of a pass on one graph, or None for a transform that is not a pass, or fails there.

    A pass that does natively what it does not do in float64 has to be noticed.
    """
    if not isinstance(innermost(transform), FxPass):
        return None
    run = whole.run(transform)
    # eager is only that a graph of dynamo writes its code when it is first called
    return replace(run, is_partly_eager=False) if run.failure is None else None


def _calls_by_graph(captured: Sequence[CapturedGraph]) -> list[list[CapturedGraph]]:
    """Return the recorded calls of each graph that computes something, without those of other sizes than the first.

    A fault may show with the values of a later call alone. For other sizes a compiler makes another graph.
    """
    by_graph: dict[int, list[CapturedGraph]] = {}
    for each in captured:
        if form_of(each.graph):
            calls = by_graph.setdefault(id(each.graph), [])
            if not calls or _layout_of(each) == _layout_of(calls[0]):
                calls.append(each)
    return list(by_graph.values())


def _layout_of(call: CapturedGraph) -> list[Any]:
    """Return all that a call of a graph depends on, but for the values of tensors: layouts, plain inputs, autocast."""

    def layout(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        strides = value.stride() if tensors.has_own_buffer(value) else value.layout
        return value.shape, strides, value.dtype, value.requires_grad

    return [call.autocast, *map(layout, call.inputs)]
