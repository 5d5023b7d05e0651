"""A sequence of graphs, each made from the one before by a pass: which step introduces a difference?

Every graph is compared with the first one. If the graph before a step and the graph behind it are both equivalent to
the first, the step introduces nothing. Otherwise the two are compared with each other, with a truth of their own, so
that an inherited error neither counts against the step nor hides a new one.

Start with `Succession.judge_step`.
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
class PassStep:
    """The verdict on one step."""

    introduced: Verdict | None
    """The graph behind the step against the one before; None if that one does not run."""
    against_original: Verdict
    reason: str
    worst: Comparison | None = None
    """The worst comparison with the first graph."""
    culprit: Culprit | None = None
    failure: Failure | None = None
    note: str = ""


@dataclass(kw_only=True)
class Succession:
    """The first graph with its inputs; the graphs that are made from it come one by one."""

    original: GraphModule
    inputs: tuple[Any, ...]
    options: CheckOptions = field(default_factory=CheckOptions)
    """How two graphs are compared; the candidate is another one each time."""
    latest: list[tuple[Callable[..., Any], Report]] = field(default_factory=list)
    """The last two graphs with their reports, because a step needs two; older graphs may be freed."""

    @cached_property
    def check(self) -> Check:
        """A check of the first graph, whose reference, truth and noise all comparisons share."""
        return prepare(self.original, self.inputs, options=replace(self.options, candidate=self.original))

    def compare(self, graph: Callable[..., Any]) -> Report:
        """Return the report of a check of `graph` against the first graph.

        The reports on the last two graphs are kept, and returned for the same object.
        """
        report = next((report for known, report in self.latest if known is graph), None)
        if report is None:
            report = self._check_of(graph).run()
            self.latest = [*self.latest[-1:], (graph, report)]
        return report

    def judge_step(self, before: Callable[..., Any], after: Callable[..., Any]) -> PassStep:
        """Return the verdict on the step from the graph `before` to the graph `after`.

        `against_original`, `worst` and `failure` are about `after` against the first graph. If both are equivalent to
        the first graph, `introduced` is EQUIVALENT. Otherwise `after` is compared with `before`, the reference, and the
        culprit is looked for; `introduced` and `reason` are then about that. `introduced` is None if that cannot be
        done. ProgramError if the first graph fails.
        """
        verdict_before = Verdict.EQUIVALENT if before is self.original else self.compare(before).verdict
        report = self.compare(after)
        worst = max(report.comparisons, key=lambda comparison: comparison.rank, default=None)
        step = PassStep(
            introduced=report.verdict,
            against_original=report.verdict,
            reason=reason_of(report),
            worst=worst,
            failure=report.failure,
        )
        if verdict_before is Verdict.EQUIVALENT and report.verdict is Verdict.EQUIVALENT:
            return step
        return self._compare_neighbours(step, before, after, verdict_before)

    def _compare_neighbours(
        self, step: PassStep, before: Callable[..., Any], after: Callable[..., Any], verdict_before: Verdict
    ) -> PassStep:
        """Return the step with verdict, reason and first culprit of the graph `after` it against the graph `before` it.

        `verdict_before` is the verdict on `before` against the first graph. `introduced` is None, with a reason, if
        that is CRASHED or TIMED_OUT, if `before` is not a graph module, or if the comparison raises a TorchDeltaError.
        A note is added if `before` is equivalent to the first graph and `after` fails against it, although the step
        does not fail: several passes add up. A note is also added if the step fails and `after` is equivalent to the
        first graph.
        """
        if verdict_before in (Verdict.CRASHED, Verdict.TIMED_OUT):
            reason = "the graph before it does not run, so that there is nothing to compare it with"
            return replace(step, introduced=None, reason=reason)
        if not isinstance(before, GraphModule):
            return replace(step, introduced=None, reason="its input is not a graph")
        try:
            location = self._locate(before, after)
        except TorchDeltaError as error:
            return replace(step, introduced=None, reason=str(error).splitlines()[0])
        culprit = location.culprits[0] if location.culprits else None
        located = replace(step, introduced=location.verdict, reason=location.reason, culprit=culprit)
        was_equivalent = verdict_before is Verdict.EQUIVALENT
        if step.against_original.is_failure and not location.verdict.is_failure and was_equivalent:
            return replace(located, note="it is within noise of the graph before it: several passes add up")
        if location.verdict.is_failure and step.against_original is Verdict.EQUIVALENT:
            return replace(located, note="behind it the graph computes what the original does again")
        return located

    def _locate(self, before: GraphModule, after: Callable[..., Any]) -> Location:
        """Compare the graph `after` with the graph `before`, the reference; return the location of their difference.

        It has the verdict in any case. If `before` is the original, its reference run is shared with the other
        comparisons.
        """
        if before is self.original:
            check = self._check_of(after)
        else:
            check = prepare(before, self.inputs, options=replace(self.options, candidate=after))
        return Locator(check=check).run()

    def _check_of(self, graph: Callable[..., Any]) -> Check:
        """Return a new check of `graph` against the first graph; it shares reference, truth and noise with `check`."""
        return replace(self.check, transform=Replacement(graph), notes=[], candidate=CandidateRun())
