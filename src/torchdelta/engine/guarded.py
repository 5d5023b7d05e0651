"""One graph under guard, from its compilation to its last call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch import dynamo, graphs, runtime, settings, versions
from torchdelta._torch.nodes import writes_to
from torchdelta.engine.asking import plain_settings
from torchdelta.engine.candidate import failure_of, run_candidate
from torchdelta.engine.check import Check
from torchdelta.engine.ledger import Ledger, Unchecked
from torchdelta.engine.prepare import prepare
from torchdelta.engine.real_calls import (
    Run,
    have_values,
    inputs_of,
    outside_inference_mode,
    require_checkable,
    sparing,
)
from torchdelta.engine.reasons import evidence_of, reason_of
from torchdelta.engine.vigilance import Vigilance
from torchdelta.errors import CompilerFailed, Diverged, TorchDeltaError
from torchdelta.execute import recorded
from torchdelta.execute.programs import own_path
from torchdelta.execute.sides import Side
from torchdelta.records.codec import write_report
from torchdelta.records.failure import Failure
from torchdelta.records.guarded import Seen
from torchdelta.records.recording import Autocast, Recording
from torchdelta.records.report import Report, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.made import Made

REPORT = "report.json"
WAITED_S = 180.0
"""How long a run that a failure ends waits for the culprit."""
NO_ERROR = "only errors were looked for, and there was none"


@dataclass(kw_only=True)
class Guarded:
    """What a backend made of a graph; calling it is calling that, and some calls are checked before they run."""

    vigilance: Vigilance
    ledger: Ledger
    seen: Seen
    original: GraphModule
    """The graph as it was handed over, over the attributes that it has now."""
    make: Callable[[GraphModule, Sequence[Any]], Run]
    """Makes something callable of a graph, as the backend did."""
    run: Run
    """What runs: what was made, or the graph itself once that has failed."""
    transform: str | None
    """By which another process finds the backend."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else it has to be told."""
    error: Exception | None = None
    """What compiling the graph raised."""
    calls: int = 0

    def __call__(self, *args: Any) -> Any:
        """Run a call, which is checked first if it is its turn."""
        self.calls += 1
        every = self.vigilance.every
        if self.calls == 1 or (every and self.calls % every == 0):
            self.look_at(args)
        try:
            return self.run(*args)
        except Exception as error:
            if not self._is_forgiven(error, args):
                raise
        return self.run(*args)

    def look_at(self, args: Sequence[Any]) -> None:
        """Check a call before it runs, on copies, and act on what is found."""
        seen = replace(self.seen, call=self.calls)
        try:
            if self.vigilance.record == "always":
                # what ends the process leaves this behind
                seen = self._recorded(seen, args)
            self._require_fit(args)
            with self.ledger.attention(), outside_inference_mode():
                report = self._report(inputs_of(args))
        except Unchecked as why:
            self._settle(replace(seen, unchecked=str(why)))
            return
        except TorchDeltaError as error:  # it fails eagerly, or cannot be copied: nobody could check it
            self._settle(replace(seen, unchecked=str(error).splitlines()[0]))
            return
        except Exception as error:  # a mistake of ours must not cost the user the run
            self.ledger.note(f"graph {seen.number}: torchdelta failed itself ({type(error).__name__}: {error})")
            self._settle(replace(seen, unchecked="a mistake of torchdelta's own"))
            return
        self._settle(replace(seen, verdict=report.verdict, unchecked="", reason=reason_of(report)))
        if report.verdict.is_failure:
            self._act_on(report, args)

    def foresee_death(self, example_inputs: Sequence[Any]) -> None:
        """Leave behind what a compiler that ends the process is about to be given."""
        given = [dynamo.hint_of(each) for each in example_inputs]
        # behind AOTAutograd there are none yet, and the first call brings them
        if self.vigilance.record != "always" or not have_values(given):
            return
        try:
            self._settle(self._recorded(self.seen, given))
        except Exception as error:  # the user's run is not to be lost for want of a recording
            self.ledger.note(f"graph {self.seen.number} could not be recorded: {error}")

    def _require_fit(self, args: Sequence[Any]) -> None:
        if self.vigilance.check == "off":
            raise Unchecked("checks are off")
        if self.vigilance.is_spent(self.ledger.seconds):
            raise Unchecked(f"the budget of {self.vigilance.budget_s:g} s was spent")
        require_checkable(self.original, args)

    def _report(self, inputs: tuple[Any, ...]) -> Report:
        check = self._check(inputs)
        if self.error is not None:
            with runtime.preserved():
                _ = check.baseline.reference  # what fails eagerly too is no failure of the compiler
            return _crashed(check, failure_of(self.error, "transform"))
        if self.vigilance.check == "errors":
            with runtime.preserved():
                if _rehearsed(check) is None:
                    raise Unchecked(NO_ERROR)
        return check.run()

    def _check(self, inputs: tuple[Any, ...]) -> Check:
        is_trained = self.seen.level == "dynamo" and torch.is_grad_enabled()
        returned = self.original.graph.output_node().args[0]
        check = prepare(
            self.original,
            inputs,
            transform=Made(
                sparing(self.run, self.original, self.seen.level),
                lambda given: sparing(
                    self.make(graphs.with_own_nodes(self.original), given), self.original, self.seen.level
                ),
                list if isinstance(returned, list) else tuple,
            ),
            stages=None if is_trained else ("forward",),
            policy=self.vigilance.policy,
            seed=self.vigilance.seed,
            semantic=False,
        )
        return replace(check, case=replace(check.case, program=self.seen.name, transform=self.seen.backend))

    def _act_on(self, report: Report, args: Sequence[Any]) -> None:
        try:
            seen = self.seen if self.seen.directory is not None else self._recorded(self.seen, args)
            assert seen.directory is not None
            write_report(report, Path(seen.directory) / REPORT)
            self._settle(seen)
        except (TorchDeltaError, OSError) as error:  # what was found stands, written or not
            self.ledger.note(f"what was found about graph {self.seen.number} could not be written: {error}")
        if self.vigilance.on_failure == "fallback":
            self.run = self.original.forward
            self.ledger.warn_once(f"{self.seen.name}: {self.seen.reason}; it runs eagerly from now on")
        if self.seen.directory is not None:
            self._look_into(report)
        if self.vigilance.on_failure == "raise":
            raised = Diverged if report.verdict is Verdict.DIVERGED else CompilerFailed
            raise raised(_evidence(self.seen, report), report=report) from self.error

    def _look_into(self, report: Report) -> None:
        if self.transform is None:
            self.ledger.note(
                f"{self.seen.backend} cannot be imported by another process, which is needed to name a culprit: "
                "let it be a function of a module"
            )
            return
        aftermath, vigilance = self.ledger.aftermath, self.vigilance
        if vigilance.on_failure == "raise" and report.verdict is Verdict.DIVERGED:
            self._settle(aftermath.learn(self.seen, "locate", patience_s=WAITED_S))
        if vigilance.minify == "wait":
            self._settle(aftermath.learn(self.seen, "diagnose"))
        elif vigilance.minify:
            aftermath.begin(self.seen, "diagnose")

    def _is_forgiven(self, error: Exception, args: Sequence[Any]) -> bool:
        """Tell whether the graph itself runs from now on, although what was made of it raised in this call."""
        is_known = error is self.error or isinstance(error, TorchDeltaError) or self.run == self.original.forward
        # what was written to is not what it was: nobody could tell what a second run of it would be about
        if is_known or any(map(writes_to, self.original.graph.nodes)):
            return False
        self.look_at(args)
        return self.run == self.original.forward

    def _settle(self, seen: Seen) -> None:
        """Keep what was learnt; that a later call was not checked is nothing new."""
        if seen.verdict is not None or self.seen.verdict is None:
            self.seen = seen
            self.ledger.settle(seen)

    def _recorded(self, seen: Seen, args: Sequence[Any]) -> Seen:
        directory = self.ledger.directory_for(seen)
        is_trained = seen.level == "dynamo" and torch.is_grad_enabled()
        cast = runtime.autocast()
        recording = Recording(
            name=seen.name,
            level=seen.level,
            transform=self.transform,
            options=self.options,
            stages=None if is_trained else ("forward",),
            policy=self.vigilance.policy,
            nodes=seen.nodes,
            settings=plain_settings(settings.changed_settings()),
            path=own_path(),
            is_grad_enabled=torch.is_grad_enabled(),
            autocast=Autocast(device=cast[0], dtype=cast[1]) if cast is not None else None,
        )
        for lacking in recorded.write(directory, self.original, args, recording).lacks:
            self.ledger.note(f"the recording of graph {seen.number}: {lacking}")
        return replace(seen, directory=str(directory))


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


def _evidence(seen: Seen, report: Report) -> str:
    lines = [evidence_of(report)]
    if seen.culprit is not None:
        lines.append(f"  first wrong: {seen.culprit.op} ({seen.culprit.node}) at {seen.culprit.source_line}")
    lines.append(f"  recorded: `torchdelta diagnose {seen.directory} -o {seen.directory}/diagnosis` makes it small")
    return "\n".join(lines)
