"""Graphs made of one another: each is held against the first, and against the one that it was made of where needed.

As long as a graph is equivalent to the first, so is what was made of it exactly when the step between introduces
nothing. Where it is not, the step is held against the graph before it, with that one's own truth: what was wrong
already is inherited, and hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from torchdelta.check.candidate import CandidateRun
from torchdelta.check.check import Check
from torchdelta.check.prepare import prepare
from torchdelta.errors import TorchDeltaError
from torchdelta.locate.locator import Locator
from torchdelta.records.case import CheckOptions
from torchdelta.records.comparison import Comparison
from torchdelta.records.failure import Failure
from torchdelta.records.location import Location
from torchdelta.records.report import Culprit, Report, reason_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.replacement import Replacement


@dataclass(frozen=True, kw_only=True)
class GraphVersion:
    """What became of a graph in one step."""

    introduced: Verdict | None
    """None where the graph before it does not run, so that nothing can be held against it."""
    against_original: Verdict
    reason: str
    worst: Comparison | None = None
    """Against the original."""
    culprit: Culprit | None = None
    failure: Failure | None = None
    note: str = ""


@dataclass(kw_only=True)
class Succession:
    """The first graph with its inputs, and whatever is made of it."""

    original: GraphModule
    inputs: tuple[Any, ...]
    options: CheckOptions = field(default_factory=CheckOptions)
    """How two graphs are compared; the candidate is another one each time."""
    latest: list[tuple[Callable[..., Any], Report]] = field(default_factory=list)
    """What was held last: a step asks for two graphs, and older ones may be freed."""

    @cached_property
    def check(self) -> Check:
        """A check whose reference, truth and noise all share."""
        return prepare(self.original, self.inputs, options=replace(self.options, candidate=self.original))

    def held(self, graph: Callable[..., Any]) -> Report:
        """Hold a graph against the first."""
        report = next((report for known, report in self.latest if known is graph), None)
        if report is None:
            report = self._against(graph).run()
            self.latest = [*self.latest[-1:], (graph, report)]
        return report

    def step(self, before: Callable[..., Any], after: Callable[..., Any]) -> GraphVersion:
        """Tell what the step from one graph to the next introduced."""
        was = Verdict.EQUIVALENT if before is self.original else self.held(before).verdict
        report = self.held(after)
        worst = max(report.comparisons, key=lambda seen: seen.rank, default=None)
        step = GraphVersion(
            introduced=report.verdict,
            against_original=report.verdict,
            reason=reason_of(report),
            worst=worst,
            failure=report.failure,
        )
        if was is Verdict.EQUIVALENT and report.verdict is Verdict.EQUIVALENT:
            return step
        return self._looked_into(step, before, after, was)

    def _looked_into(
        self, step: GraphVersion, before: Callable[..., Any], after: Callable[..., Any], was: Verdict
    ) -> GraphVersion:
        if was in (Verdict.CRASHED, Verdict.TIMED_OUT):
            reason = "the graph before it does not run, so that there is nothing to hold it against"
            return replace(step, introduced=None, reason=reason)
        if not isinstance(before, GraphModule):
            return replace(step, introduced=None, reason="what it was given is no graph")
        try:
            location = self._located(before, after)
        except TorchDeltaError as error:
            return replace(step, introduced=None, reason=str(error).splitlines()[0])
        culprit = location.culprits[0] if location.culprits else None
        made = replace(step, introduced=location.verdict, reason=location.reason, culprit=culprit)
        if step.against_original.is_failure and not location.verdict.is_failure and was is Verdict.EQUIVALENT:
            return replace(made, note="it is within noise of the graph before it: several passes add up")
        if location.verdict.is_failure and step.against_original is Verdict.EQUIVALENT:
            return replace(made, note="behind it the graph computes what the original does again")
        return made

    def _located(self, before: GraphModule, after: Callable[..., Any]) -> Location:
        if before is self.original:
            check = self._against(after)
        else:
            check = prepare(before, self.inputs, options=replace(self.options, candidate=after))
        return Locator(check=check).run()

    def _against(self, graph: Callable[..., Any]) -> Check:
        return replace(self.check, transform=Replacement(graph), notes=[], candidate=CandidateRun())
