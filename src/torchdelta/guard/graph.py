"""One graph under guard, from its compilation to its last call.

A `GuardedGraph` stands in the place of the compiled graph. Before its first call, and then before every n-th, a
`CheckedCall` runs the compiled graph and the original graph on copies of the inputs and compares them. A failure is
recorded on disk, followed up in another process, and then raised, reported or answered by running the original graph.

Start with `GuardedGraph.__call__`, then `GuardedGraph.check_call`.
"""

from __future__ import annotations

import shlex
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
from torchdelta._torch.process.exceptions import names_out_of_memory, without_frames
from torchdelta.check.baseline import TOUCHED
from torchdelta.check.candidate import failure_of
from torchdelta.check.check import Check
from torchdelta.check.prepare import prepare
from torchdelta.errors import CompilerFailed, Diverged, ProgramError, TorchDeltaError
from torchdelta.guard.config import GuardConfig
from torchdelta.guard.findings import GuardFindings
from torchdelta.passes.real_calls import (
    RecordedCall,
    Run,
    UncheckedCall,
    adapt_call,
    detach_inputs,
    have_values,
    require_checkable,
    return_written,
    written_nonleaves,
)
from torchdelta.program import recordings
from torchdelta.program.programs import own_path
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
    """A check of one call: the graph, the compiled graph or the error of compiling it, and what to compare."""

    config: GuardConfig
    record: GuardedGraphRecord
    original: GraphModule
    make: Callable[[GraphModule, Sequence[Any]], Run]
    """Compiles a graph as the backend did."""
    run: Run
    error: Exception | None

    def report(self, args: Sequence[Any]) -> Report:
        """Compare the compiled graph with the original one, which runs eagerly, on copies of `args`; return the report.

        If the graph could not be compiled, and the original runs, it is a CRASHED report without comparisons. For a
        graph of dynamo, gradients are compared too while they are enabled; if that raises ProgramError, such as for a
        backward that fails eagerly, the forward is compared alone, and a note says so. Raise ProgramError if the
        original graph fails or cannot be copied, and UncheckedCall if the memory does not suffice, or if
        `check="errors"` and the compiled graph does not raise.
        """
        is_trained = self.record.level == "dynamo" and torch.is_grad_enabled()
        try:
            return self._compare_with_eager(args, None if is_trained else ("forward",))
        except ProgramError as error:
            if not is_trained:
                raise
            # the backward may raise eagerly, and the forward can be compared still
            report = self._compare_with_eager(args, ("forward",))
            return replace(report, notes=(*report.notes, f"gradients were not compared: {error}"))

    def _compare_with_eager(self, args: Sequence[Any], stages: tuple[str, ...] | None) -> Report:
        """Return the report of a check on copies of `args`; the `stages` to compare are the default ones if it is None.

        If the graph could not be compiled, the report is a crash without comparisons. If the compiled graph changed how
        this process runs the original one, an equivalent report becomes inconclusive. Raise ProgramError if the
        original graph is run and raises. Raise UncheckedCall if `check="errors"` and the compiled graph does not raise,
        or if the memory does not suffice.
        """
        check = self._prepare(args, stages)
        if self.error is not None:
            with runtime.preserved():
                _ = check.baseline.reference  # raises if the graph fails eagerly too: not the compiler's fault then
            return _crash_report(check, failure_of(self.error, "transform"))
        if self.config.check == "errors":
            with runtime.preserved():
                if _failure_on_copies(check) is None:
                    raise UncheckedCall(NO_ERROR)
        report = check.run()
        with runtime.preserved():
            if report.verdict is Verdict.EQUIVALENT and check.baseline.is_touched:
                report = replace(report, verdict=Verdict.INCONCLUSIVE, notes=(*report.notes, TOUCHED))
        if report.failure is not None and names_out_of_memory(report.failure.type, report.failure.message):
            raise UncheckedCall("there was not enough memory for a check, which holds both sides and the truth")
        return report

    def _prepare(self, args: Sequence[Any], stages: tuple[str, ...] | None) -> Check:
        """Return the check of the compiled graph against the original one, not yet run, without its semantic question.

        Inputs that are not leaves and may be written to are cloned on both sides, and become outputs. If the graph
        draws random numbers, the check compiles a copy of it again by `make`, so that it draws those of eager.
        """
        written = written_nonleaves(self.original, args)

        def called_as_graph(run: Run) -> Run:
            return adapt_call(run, self.original, self.record.level, written)

        def compile_again(inputs: Sequence[Any]) -> Run:
            return called_as_graph(self.make(graphs.copy_nodes(self.original), list(inputs)))

        check = prepare(
            RecordedCall(return_written(self.original, written)),
            detach_inputs(args),
            options=CheckOptions(
                transform=PrecompiledTransform(called_as_graph(self.run), compile_again),
                stages=stages,
                policy=self.config.policy,
                seed=self.config.seed,
                semantic=False,
            ),
        )
        baseline = replace(check.baseline, program=replace(check.baseline.program, name=self.record.name))
        case = replace(check.case, program=self.record.name, transform=self.record.backend)
        return replace(check, case=case, baseline=baseline)


def _failure_on_copies(check: Check) -> Failure | None:
    """Run the compiled graph on copies of the inputs, so that nothing changes; return the failure, or None."""
    return check.baseline.run(check.transform, draws_random=False).failure


def _crash_report(check: Check, failure: Failure) -> Report:
    """Return the report of a graph that could not be compiled: CRASHED, with the failure and without comparisons."""
    stage = Stage(name="forward", verdict=Verdict.CRASHED, reason=f"{failure}")
    return Report(
        verdict=Verdict.CRASHED,
        environment=versions.environment(),
        case=check.case,
        stages=(stage,),
        failure=failure,
    )


REPORT = "report.json"
CULPRIT_WAIT_S = 180.0
"""How long a run that a failure ends waits for the culprit."""


@dataclass(kw_only=True)
class GuardedGraph:
    """A compiled graph under guard. A call runs the compiled graph; some calls are checked first."""

    config: GuardConfig
    findings: GuardFindings
    record: GuardedGraphRecord
    """What is known about the graph so far."""
    original: GraphModule
    """The graph as the backend got it, with the attributes that it has now."""
    make: Callable[[GraphModule, Sequence[Any]], Run]
    """Compiles a graph as the backend did."""
    run: Run
    """What a call runs: the compiled graph, or the original one once that has failed."""
    transform: str | None
    """The name by which another process finds the backend, or None if it cannot."""
    options: dict[str, Any] = field(default_factory=dict)
    """The backend's settings, as options of that transform."""
    error: Exception | None = None
    """What compiling the graph raised."""
    calls: int = 0
    is_new: bool = True
    """Whether no call with values came yet."""
    has_fallen_back: bool = False

    def __call__(self, *args: Any) -> Any:
        """Check the call if it is due, then run it, and return its result.

        The check may raise, or put the original graph in place of the compiled one (`check_call`). If the compiled
        graph raises and the config says `on_failure="fallback"`, the original graph may take its place, for this call
        and all later ones (`_falls_back`). Otherwise the exception is raised.
        """
        self._check_if_due(args)
        try:
            return self.run(*args)
        except Exception as error:
            if not self._falls_back(error, args):
                raise
        return self.run(*args)

    def call_boxed(self, args: list[Any]) -> Any:
        """Check the call if it is due, then run it with arguments in a list, which the compiled graph may empty.

        Return the result. Unlike in `__call__`, an exception of the run itself is always raised.
        """
        self._check_if_due(args)
        return as_boxed(self.run)(args)

    def _check_if_due(self, args: Sequence[Any]) -> None:
        """Count the call; check it if it is the first with values, or if its number is a multiple of `config.every`.

        It is not checked if the graph has fallen back, or if a tensor among `args` has no values.
        """
        self.calls += 1
        every = self.config.every
        is_due = self.is_new or (every and self.calls % every == 0)
        if is_due and not self.has_fallen_back and have_values(args):
            self.is_new = False
            self.check_call(args)

    def check_call(self, args: Sequence[Any]) -> None:
        """Check a call on copies of `args`; update the record, and act on a failure as the config says.

        With `record="always"` the call is written to disk first. If it cannot be checked, the record says why, and the
        original graph may take over (`_leave_unchecked`). That is so for checks that are off, a spent budget, and any
        exception while checking; one that is neither UncheckedCall nor a TorchDeltaError becomes a note too. Raise
        Diverged or CompilerFailed for a failure if the config says `on_failure="raise"`.
        """
        # only the first call shares its directory, with the compilation
        directory = self.record.directory if self.calls <= 1 else None
        record = replace(self.record, call=self.calls, directory=directory)
        try:
            if self.config.record == "always":
                # recorded first, because the call may end the process
                record = self._write_recording(record, args)
            if self.config.check == "off":
                raise UncheckedCall("checks are off")
            if self.config.is_over_budget(self.findings.seconds):
                raise UncheckedCall(f"the budget of {self.config.budget_s:g} s was spent")
            require_checkable(self.original, args)
            with self.findings.exclusive_check(), outside.without_modes_or_hooks():
                report = self._checked_call.report(args)
        except UncheckedCall as why:
            self._leave_unchecked(replace(record, unchecked=str(why)))
        except TorchDeltaError as error:  # it fails eagerly or cannot be copied, so no check is possible
            self._leave_unchecked(replace(record, unchecked=str(error).splitlines()[0]))
        except Exception as error:  # a mistake of ours must not cost the user the run
            self.findings.note(f"graph {record.number}: torchdelta failed itself ({type(error).__name__}: {error})")
            self._leave_unchecked(replace(record, unchecked="a mistake of torchdelta's own"))
        else:
            checked = replace(record, verdict=report.verdict, unchecked="", reason=reason_of(report))
            self._act_on(checked, report, args)

    def record_before_compiling(self, example_inputs: Sequence[Any]) -> None:
        """Write the graph with its example inputs to disk if the config says `record="always"`.

        Nothing is written if an input has no values. An error becomes a note.
        """
        inputs = [dynamo.hint_of(each) for each in example_inputs]
        # behind AOTAutograd the example inputs have no values, and the first call brings them
        if self.config.record != "always" or not have_values(inputs):
            return
        try:
            self._update(self._write_recording(self.record, inputs))
        except Exception as error:  # the user's run matters more than a recording
            self.findings.note(f"graph {self.record.number} could not be recorded: {error}")

    def fail_to_compile(self, error: Exception, example_inputs: Sequence[Any]) -> None:
        """Keep the error that compiling the graph raised, and report it now or in the first call.

        With `on_failure="report"` it is reported now: by a check on the example inputs, or as CRASHED without a check
        if they have no values. Otherwise `run` becomes a function that raises the error; the first call is checked
        before that, and raises or falls back.
        """
        self.error = error
        if self.config.on_failure == "report":
            if have_values(example_inputs):
                self.check_call([dynamo.hint_of(each) for each in example_inputs])
            else:
                self._update(replace(self.record, verdict=Verdict.CRASHED, unchecked="", reason=_describe_error(error)))
            return
        self.error = without_frames(error)  # its frames hold tensors that the user has let go of
        self.run = _raising(self.error)

    @property
    def _checked_call(self) -> CheckedCall:
        """The check of one call, with the compiled graph, the error and the record as they are now."""
        return CheckedCall(
            config=self.config,
            record=self.record,
            original=self.original,
            make=self.make,
            run=self.run,
            error=self.error,
        )

    def _act_on(self, record: GuardedGraphRecord, report: Report, args: Sequence[Any]) -> None:
        """Update the record with the report of a check, and act on a failure as the config says.

        The first failure of a graph is written to disk and followed up. With `on_failure="fallback"` the original graph
        runs from now on, and the first failure of the run is a warning; with "raise", Diverged is raised, or
        CompilerFailed for another failure. If the check did not fail, the original graph is dropped, unless later calls
        may need it.
        """
        if not report.verdict.is_failure:
            self._update(record)
            self._free()
            return
        if not self._has_failed:
            self._write_failure(record, report, args)
            self._follow_up(report)
        if self.config.on_failure == "fallback":
            self._fall_back()
            self.findings.warn_once(f"{self.record.name}: {self.record.reason}; it runs eagerly from now on")
        elif self.config.on_failure == "raise":
            kind = Diverged if report.verdict is Verdict.DIVERGED else CompilerFailed
            error = kind(_evidence(self.record, report), report=report)
            if self.error is not None:
                raise error from self.error
            raise error

    def _leave_unchecked(self, record: GuardedGraphRecord) -> None:
        """Update the record, which says why a call was not checked; drop the original graph if it is not needed later.

        A record with a verdict stays as it is, because verdict, call and directory are those of the checked call. If
        the graph could not be compiled and the config says `fallback`, the original graph runs from now on, with a
        warning if it is the first of the run.
        """
        if self.record.verdict is None:
            self._update(record)
        if self.error is not None and self.config.on_failure == "fallback":
            self._fall_back()
            self.findings.warn_once(f"{record.name}: {_describe_error(self.error)}; it runs eagerly from now on")
        self._free()

    def _write_failure(self, record: GuardedGraphRecord, report: Report, args: Sequence[Any]) -> None:
        """Write the report of a failure, and the recording of its call if there is none, to disk; update the record.

        An error in writing becomes a note, and the record is updated all the same.
        """
        try:
            record = record if record.directory is not None else self._write_recording(record, args)
            assert record.directory is not None
            write_report(report, Path(record.directory) / REPORT)
        except Exception as error:  # the finding stands, written or not
            self.findings.note(f"what was found about graph {record.number} could not be written: {error}")
        self._update(record)

    def _follow_up(self, report: Report) -> None:
        """Name a culprit or minify the failure, and update the record with the answers.

        With `on_failure="raise"` and a divergence, run `locate` and wait for its culprit, at most `CULPRIT_WAIT_S`.
        Then, with `minify=True`, begin `diagnose` in the background; with `minify="wait"`, wait for its answer. Nothing
        is done without a recording, or, with a note, if no other process can import the backend.
        """
        if self.record.directory is None:
            return
        if self.transform is None:
            self.findings.note(
                f"{self.record.backend} cannot be imported by another process, which is needed to name a culprit: "
                "let it be a function of a module"
            )
            return
        followup, config = self.findings.followup, self.config
        if config.on_failure == "raise" and report.verdict is Verdict.DIVERGED:
            self._update(followup.wait_for(self.record, "locate", timeout_s=CULPRIT_WAIT_S))
        if config.minify == "wait":
            self._update(followup.wait_for(self.record, "diagnose"))
        elif config.minify:
            followup.begin(self.record, "diagnose")

    def _falls_back(self, error: Exception, args: Sequence[Any]) -> bool:
        """Check a call in which the compiled graph raised; return whether the original graph now stands in its place.

        Return False without a check if the config does not say `fallback` or has checks off, if the graph has fallen
        back before, if the error is that of compiling, or if a node of the graph may write to its inputs.
        """
        is_final = self.config.on_failure != "fallback" or self.config.check == "off" or self.has_fallen_back
        # inputs may have been mutated, and then a second run would not be comparable
        if is_final or error is self.error or any(map(writes_to, every_node(self.original))):
            return False
        self.check_call(args)
        return self.has_fallen_back

    def _fall_back(self) -> None:
        """Run the original graph in place of the compiled one from now on."""
        self.run, self.has_fallen_back = self.original.forward, True

    def _free(self) -> None:
        """Drop the original graph, and `make`, if the config lets no later call need them: there may be many graphs.

        They are needed if the config says `every` or `on_failure="fallback"`. Nothing else is looked at, so the caller
        has to know that the first check is over.
        """
        if not self.config.every and self.config.on_failure != "fallback":
            self.original, self.make = _EMPTY_GRAPH, _refuse_to_compile

    @property
    def _has_failed(self) -> bool:
        """Whether the verdict so far is a failure."""
        return self.record.verdict is not None and self.record.verdict.is_failure

    def _update(self, record: GuardedGraphRecord) -> None:
        """Keep a record and write it to the findings, unless it says less than the present one.

        A failure is always kept. Any other record is dropped if the graph has failed, or if only the present one has a
        verdict.
        """
        is_failure = record.verdict is not None and record.verdict.is_failure
        if is_failure or (not self._has_failed and (record.verdict is not None or self.record.verdict is None)):
            self.record = record
            self.findings.update(record)

    def _write_recording(self, record: GuardedGraphRecord, args: Sequence[Any]) -> GuardedGraphRecord:
        """Write the graph with the inputs and settings of a call to a directory; return the record with the directory.

        The inputs that `written_nonleaves` names become outputs of the recorded graph. A graph of dynamo is recorded
        with gradients if they are enabled, any other for its forward alone. Parts that cannot be recorded become notes.
        """
        directory = self.findings.directory_for(record)
        is_trained = record.level == "dynamo" and torch.is_grad_enabled()
        cast = runtime.autocast()
        recording = Recording(
            name=record.name,
            level=record.level,
            transform=self.transform,
            options=self.options,
            stages=None if is_trained else ("forward",),
            policy=self.config.policy,
            nodes=record.nodes,
            settings=settings.plain_settings(settings.changed_settings()),
            path=own_path(),
            is_grad_enabled=torch.is_grad_enabled(),
            autocast=AutocastSetting(device=cast[0], dtype=cast[1]) if cast is not None else None,
        )
        graph = return_written(self.original, written_nonleaves(self.original, args))
        for lacking in recordings.write(directory, graph, args, recording).lacks:
            self.findings.note(f"the recording of graph {record.number}: {lacking}")
        return replace(record, directory=str(directory))


def _evidence(record: GuardedGraphRecord, report: Report) -> str:
    """Return the message for a failure: the report's evidence, and lines for the culprit and the recording, if any."""
    lines = [evidence_of(report)]
    if record.culprit is not None:
        lines.append(f"  first wrong: {record.culprit.op} ({record.culprit.node}) at {record.culprit.source_line}")
    if record.directory is not None:
        words = ["torchdelta", "diagnose", record.directory, "-o", f"{record.directory}/diagnosis"]
        command = shlex.join([*words, *recordings.trust_flags(record.directory)])
        lines.append(f"  recorded: `{command}` makes it small")
    return "\n".join(lines)


def _describe_error(error: Exception) -> str:
    """Return the class and the message of an exception, only the first line of it."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _raising(error: Exception) -> Run:
    """Return a function that takes any positional arguments, and raises the error whenever it is called."""

    def raise_again(*_: Any) -> Any:
        raise error

    return raise_again


_EMPTY_GRAPH = GraphModule(torch.nn.Module(), torch.fx.Graph())


def _refuse_to_compile(_: GraphModule, __: Sequence[Any]) -> Run:
    """Raise AssertionError: this takes the place of `make` once a graph was freed."""
    raise AssertionError("the graph was freed, because no call of it will be checked again")
