"""What was made of a graph, held against the graph itself in one real call.

One graph under guard, from its compilation to its last call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile import dynamo, settings
from torchdelta._torch.compile.seams import as_boxed
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import every_node, writes_to
from torchdelta._torch.modes import outside
from torchdelta._torch.process import runtime, versions
from torchdelta._torch.process.exceptions import is_refused_memory, without_frames
from torchdelta.check.candidate import failure_of, run_candidate
from torchdelta.check.check import Check
from torchdelta.check.prepare import prepare
from torchdelta.errors import CompilerFailed, Diverged, ProgramError, TorchDeltaError
from torchdelta.guard.config import GuardConfig
from torchdelta.guard.findings import GuardFindings
from torchdelta.minify.queries import plain_settings
from torchdelta.passes.real_calls import (
    RecordedCall,
    Run,
    UncheckedCall,
    as_checked,
    called_alike,
    have_values,
    inputs_of,
    require_checkable,
    written_midway,
)
from torchdelta.program import recordings
from torchdelta.program.programs import own_path
from torchdelta.program.sides import Side
from torchdelta.records.case import CheckOptions
from torchdelta.records.codec import write_report
from torchdelta.records.failure import Failure
from torchdelta.records.guard import GuardedGraphRecord
from torchdelta.records.recording import AutocastSetting, Recording
from torchdelta.records.report import Report, Stage, evidence_of, reason_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.wrappers import PrecompiledTransform

NO_ERROR = "only errors were looked for, and there was none"


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """A graph, what was made of it or what making it raised, and how closely to look."""

    vigilance: GuardConfig
    seen: GuardedGraphRecord
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
                    raise UncheckedCall(NO_ERROR)
        report = check.run()
        if report.failure is not None and is_refused_memory(report.failure.type, report.failure.message):
            raise UncheckedCall("there was not enough memory for a check, which holds both sides and the truth")
        return report

    def _check(self, args: Sequence[Any], stages: tuple[str, ...] | None) -> Check:
        midway = written_midway(self.original, args)

        def alike(run: Run) -> Run:
            return called_alike(run, self.original, self.seen.level, midway)

        check = prepare(
            RecordedCall(as_checked(self.original, midway)),
            inputs_of(args),
            options=CheckOptions(
                transform=PrecompiledTransform(
                    alike(self.run), lambda given: alike(self.make(graphs.with_own_nodes(self.original), list(given)))
                ),
                stages=stages,
                policy=self.vigilance.policy,
                seed=self.vigilance.seed,
                semantic=False,
            ),
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


REPORT = "report.json"
WAITED_S = 180.0
"""How long a run that a failure ends waits for the culprit."""


@dataclass(kw_only=True)
class GuardedGraph:
    """What a backend made of a graph; calling it is calling that, and some calls are checked before they run."""

    vigilance: GuardConfig
    ledger: GuardFindings
    seen: GuardedGraphRecord
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
    is_new: bool = True
    """Whether no call with values came yet."""
    has_fallen_back: bool = False

    def __call__(self, *args: Any) -> Any:
        """Run a call, which is checked first if it is its turn."""
        self._attend_to(args)
        try:
            return self.run(*args)
        except Exception as error:
            if not self._is_forgiven(error, args):
                raise
        return self.run(*args)

    def call_boxed(self, args: list[Any]) -> Any:
        """Do the same for arguments in a list, which what runs may empty to free them."""
        self._attend_to(args)
        return as_boxed(self.run)(args)

    def _attend_to(self, args: Sequence[Any]) -> None:
        self.calls += 1
        every = self.vigilance.every
        is_due = self.is_new or (every and self.calls % every == 0)
        if is_due and not self.has_fallen_back and have_values(args):
            self.is_new = False
            self.look_at(args)

    def look_at(self, args: Sequence[Any]) -> None:
        """Check a call before it runs, on copies, and act on what is found."""
        seen = replace(self.seen, call=self.calls)
        try:
            if self.vigilance.record == "always":
                # what ends the process leaves this behind
                seen = self._recorded(seen, args)
            if self.vigilance.check == "off":
                raise UncheckedCall("checks are off")
            if self.vigilance.is_spent(self.ledger.seconds):
                raise UncheckedCall(f"the budget of {self.vigilance.budget_s:g} s was spent")
            require_checkable(self.original, args)
            with self.ledger.attention(), outside.as_nobody():
                report = self._attempt.report(args)
        except UncheckedCall as why:
            self._leave_unchecked(replace(seen, unchecked=str(why)))
        except TorchDeltaError as error:  # it fails eagerly, or cannot be copied: nobody could check it
            self._leave_unchecked(replace(seen, unchecked=str(error).splitlines()[0]))
        except Exception as error:  # a mistake of ours must not cost the user the run
            self.ledger.note(f"graph {seen.number}: torchdelta failed itself ({type(error).__name__}: {error})")
            self._leave_unchecked(replace(seen, unchecked="a mistake of torchdelta's own"))
        else:
            self._take(replace(seen, verdict=report.verdict, unchecked="", reason=reason_of(report)), report, args)

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

    def fail_to_compile(self, error: Exception, example_inputs: Sequence[Any]) -> None:
        """Take what compiling raised: where only a report is wanted, at once; otherwise when there is a call."""
        self.error = error
        if self.vigilance.on_failure == "report":
            if have_values(example_inputs):
                self.look_at([dynamo.hint_of(each) for each in example_inputs])
            else:
                self._settle(replace(self.seen, verdict=Verdict.CRASHED, unchecked="", reason=_words(error)))
            return
        self.error = without_frames(error)  # they hold what the user has long let go of
        self.run = _raising(self.error)

    @property
    def _attempt(self) -> CheckedCall:
        return CheckedCall(
            vigilance=self.vigilance,
            seen=self.seen,
            original=self.original,
            make=self.make,
            run=self.run,
            error=self.error,
        )

    def _take(self, seen: GuardedGraphRecord, report: Report, args: Sequence[Any]) -> None:
        """Act on what a check says; the first failure of a graph is the one that is kept."""
        if not report.verdict.is_failure:
            self._settle(seen)
            self._forget()
            return
        if not self._has_failed:
            self._write(seen, report, args)
            self._look_into(report)
        if self.vigilance.on_failure == "fallback":
            self._fall_back()
            self.ledger.warn_once(f"{self.seen.name}: {self.seen.reason}; it runs eagerly from now on")
        elif self.vigilance.on_failure == "raise":
            raised = Diverged if report.verdict is Verdict.DIVERGED else CompilerFailed
            error = raised(_evidence(self.seen, report), report=report)
            if self.error is not None:
                raise error from self.error
            raise error

    def _leave_unchecked(self, seen: GuardedGraphRecord) -> None:
        self._settle(seen)
        if self.error is not None and self.vigilance.on_failure == "fallback":
            self._fall_back()
            self.ledger.warn_once(f"{seen.name}: {_words(self.error)}; it runs eagerly from now on")
        self._forget()

    def _write(self, seen: GuardedGraphRecord, report: Report, args: Sequence[Any]) -> None:
        try:
            seen = seen if seen.directory is not None else self._recorded(seen, args)
            assert seen.directory is not None
            write_report(report, Path(seen.directory) / REPORT)
        except Exception as error:  # what was found stands, written or not
            self.ledger.note(f"what was found about graph {seen.number} could not be written: {error}")
        self._settle(seen)

    def _look_into(self, report: Report) -> None:
        if self.seen.directory is None:
            return
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
        is_hopeless = self.vigilance.on_failure != "fallback" or self.vigilance.check == "off" or self.has_fallen_back
        # what was written to is not what it was: nobody could tell what a second run of it would be about
        if is_hopeless or error is self.error or any(map(writes_to, every_node(self.original))):
            return False
        self.look_at(args)
        return self.has_fallen_back

    def _fall_back(self) -> None:
        self.run, self.has_fallen_back = self.original.forward, True

    def _forget(self) -> None:
        """Let go of what nobody needs any more: there may be many graphs."""
        if not self.vigilance.every and self.vigilance.on_failure != "fallback":
            self.original, self.make = _NOTHING, _forgotten

    @property
    def _has_failed(self) -> bool:
        return self.seen.verdict is not None and self.seen.verdict.is_failure

    def _settle(self, seen: GuardedGraphRecord) -> None:
        """Keep what was learnt: a failure stays one, and that a later call was not checked is nothing new."""
        is_failure = seen.verdict is not None and seen.verdict.is_failure
        if is_failure or (not self._has_failed and (seen.verdict is not None or self.seen.verdict is None)):
            self.seen = seen
            self.ledger.settle(seen)

    def _recorded(self, seen: GuardedGraphRecord, args: Sequence[Any]) -> GuardedGraphRecord:
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
            autocast=AutocastSetting(device=cast[0], dtype=cast[1]) if cast is not None else None,
        )
        graph = as_checked(self.original, written_midway(self.original, args))
        for lacking in recordings.write(directory, graph, args, recording).lacks:
            self.ledger.note(f"the recording of graph {seen.number}: {lacking}")
        return replace(seen, directory=str(directory))


def _evidence(seen: GuardedGraphRecord, report: Report) -> str:
    lines = [evidence_of(report)]
    if seen.culprit is not None:
        lines.append(f"  first wrong: {seen.culprit.op} ({seen.culprit.node}) at {seen.culprit.source_line}")
    if seen.directory is not None:
        lines.append(f"  recorded: `torchdelta diagnose {seen.directory} -o {seen.directory}/diagnosis` makes it small")
    return "\n".join(lines)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _raising(error: Exception) -> Run:
    def raise_again(*_: Any) -> Any:
        raise error

    return raise_again


_NOTHING = GraphModule(torch.nn.Module(), torch.fx.Graph())


def _forgotten(_: GraphModule, __: Sequence[Any]) -> Run:
    raise AssertionError("a graph that nobody will check again was forgotten")
