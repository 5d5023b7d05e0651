"""What was made of a graph, held against the graph itself in one real call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch import graphs, runtime, versions
from torchdelta._torch.frames import is_refused_memory
from torchdelta.engine.candidate import failure_of, run_candidate
from torchdelta.engine.check import Check
from torchdelta.engine.ledger import Unchecked
from torchdelta.engine.prepare import prepare
from torchdelta.engine.real_calls import Original, Run, as_checked, called_alike, inputs_of, written_midway
from torchdelta.engine.vigilance import Vigilance
from torchdelta.errors import ProgramError
from torchdelta.execute.sides import Side
from torchdelta.records.failure import Failure
from torchdelta.records.guarded import Seen
from torchdelta.records.report import Report, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.made import Made

NO_ERROR = "only errors were looked for, and there was none"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A graph, what was made of it or what making it raised, and how closely to look."""

    vigilance: Vigilance
    seen: Seen
    original: GraphModule
    make: Callable[[GraphModule, Sequence[Any]], Run]
    """Makes something callable of a graph, as the backend did."""
    run: Run
    error: Exception | None

    def report(self, args: Sequence[Any]) -> Report:
        """Say what came of it; Unchecked or ProgramError where nothing can be said."""
        is_trained = self.seen.level == "dynamo" and torch.is_grad_enabled()
        try:
            return self._held_against_eager(args, None if is_trained else ("forward",))
        except ProgramError as error:
            if not is_trained:
                raise
            # what has no backward has a forward still
            report = self._held_against_eager(args, ("forward",))
            return replace(report, notes=(*report.notes, f"gradients were not compared: {error}"))

    def _held_against_eager(self, args: Sequence[Any], stages: tuple[str, ...] | None) -> Report:
        check = self._check(args, stages)
        if self.error is not None:
            with runtime.preserved():
                _ = check.baseline.reference  # what fails eagerly too is no failure of the compiler
            return _crashed(check, failure_of(self.error, "transform"))
        if self.vigilance.check == "errors":
            with runtime.preserved():
                if _rehearsed(check) is None:
                    raise Unchecked(NO_ERROR)
        report = check.run()
        if report.failure is not None and is_refused_memory(report.failure.type, report.failure.message):
            raise Unchecked("there was not enough memory for a check, which holds both sides and the truth")
        return report

    def _check(self, args: Sequence[Any], stages: tuple[str, ...] | None) -> Check:
        midway = written_midway(self.original, args)

        def alike(run: Run) -> Run:
            return called_alike(run, self.original, self.seen.level, midway)

        check = prepare(
            Original(as_checked(self.original, midway)),
            inputs_of(args),
            transform=Made(
                alike(self.run), lambda given: alike(self.make(graphs.with_own_nodes(self.original), list(given)))
            ),
            stages=stages,
            policy=self.vigilance.policy,
            seed=self.vigilance.seed,
            semantic=False,
        )
        baseline = replace(check.baseline, program=replace(check.baseline.program, name=self.seen.name))
        case = replace(check.case, program=self.seen.name, transform=self.seen.backend)
        return replace(check, case=case, baseline=baseline)


def _rehearsed(check: Check) -> Failure | None:
    """Run what was made on a copy of the inputs, so that what fails has changed nothing."""
    baseline = check.baseline
    run = run_candidate(
        check.transform,
        Side.copied_from(baseline.program),
        baseline.plan,
        original=baseline.original,
        scope=baseline.scope,
        draws_random=False,
    )
    return run.failure


def _crashed(check: Check, failure: Failure) -> Report:
    stage = Stage(name="forward", verdict=Verdict.CRASHED, reason=f"{failure.type}: {failure.message}")
    return Report(
        verdict=Verdict.CRASHED,
        environment=versions.environment(),
        case=check.case,
        stages=(stage,),
        failure=failure,
    )
