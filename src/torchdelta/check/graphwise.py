"""The semantic question, asked graph by graph: is each graph that a compiler captured the same function in float64?

If the whole program cannot be asked, each of its graphs can. Parts that run between the graphs are eager on both sides,
but round in float64 as they do natively. A program that branches on its dtype is captured natively here, and its graphs
are lifted afterwards. If every graph is the same function and all else runs as the reference does, the program is too.

    answer = ask_graphs(baseline, transform)
    answer.are_same                         # whether every graph was asked, and is the same function
    answer.add_to(stage)                    # the stage with a comparison for each value that is another function

Start with `ask_graphs`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

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

    def add_to(self, stage: Stage) -> Stage:
        """Return the stage with one more comparison for each value of a graph that diverged in that stage in float64.

        If `are_same`, the stage's own leaves get the largest error, noise and resolution of any graph, in any stage, in
        their details, as those of an answer in float64. A stage without comparisons is returned unchanged.
        """
        if not stage.comparisons:
            return stage
        diverged = [each for each in self.answers.get(stage.name, []) if each.verdict is Verdict.DIVERGED]
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

    Return the answers. The inputs of a graph are those of its first recorded call, lifted. Graphs that compute nothing
    are left out. A graph that cannot be asked has its reason in `unasked`. If no graph can be captured, none is asked,
    and `unasked` has that reason alone.
    """
    answers: dict[str, list[Comparison]] = {}
    unasked: list[str] = []
    count = 0
    with baseline.timed("semantic"):
        try:
            captured = list(_first_calls(capture_graphs(baseline, transform)))
        except TorchDeltaError as error:
            return GraphwiseAnswer(answers={}, count=0, unasked=(str(error),))
        for number, graph in enumerate(captured):
            asked, of_graph = _ask_graph(graph, number, baseline, transform)
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


def _ask_graph(graph: CapturedGraph, number: int, baseline: Baseline, transform: Transform) -> tuple[str, Answers]:
    """Return the text `asked`, or why one graph was not asked, and its answers by stage and path.

    The graph is a program of its own, with its recorded inputs; the stage `steps` is left out. If the check of it
    raises a TorchDeltaError, that is the reason, without answers.
    """
    stages = tuple(stage for stage in baseline.plan.stages if stage != "steps") or ("forward",)
    whole = Baseline(
        program=Program(
            name=f"graph {number} of {baseline.program.name}",
            call=graph.graph,
            args=graph.inputs,
            lifted_call=lift_graph(copy.deepcopy(graph.graph)),
        ),
        plan=replace(baseline.plan, stages=stages, iterations=1, further=(), loss=None, cotangent_dtypes=None),
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


def _first_calls(captured: list[CapturedGraph]) -> Iterator[CapturedGraph]:
    """Yield the first recorded call of each graph that computes something."""
    known: set[int] = set()
    for each in captured:
        if id(each.graph) not in known and form_of(each.graph):
            known.add(id(each.graph))
            yield each
