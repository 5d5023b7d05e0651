"""The audit of a check: plant faults in the user's own program, one at a time, and count how many the check catches.

Each fault is tried twice. First it runs without the transform, to see whether it changes any value at all; a fault
without an effect cannot be caught. Then the program with the fault is checked under the transform. The control is the
same check without a fault: unless it is equivalent, the catches mean nothing.

    result = audit("model.py:build", options=CheckOptions(transform="inductor"), kinds=["residual_dropped"])
    result.catch_rate                       # 1.0

Start with `audit`; `_Auditor._trials` tries the faults of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchdelta._torch.process import runtime
from torchdelta.audit.faults import FAULTS, NotPlantable, plant
from torchdelta.check import other_inputs
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.check import Check
from torchdelta.check.prepare import prepare
from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Bitwise
from torchdelta.errors import ProgramError, UsageError
from torchdelta.program.stages import Observation
from torchdelta.records.audit import Audit, FaultTrial, TrialOutcome
from torchdelta.records.case import CheckOptions
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.export import Export, Exports

_OUTCOMES = {
    Verdict.DIVERGED: TrialOutcome.CAUGHT,
    Verdict.EQUIVALENT: TrialOutcome.MISSED,
    Verdict.INCONCLUSIVE: TrialOutcome.INCONCLUSIVE,
    Verdict.CRASHED: TrialOutcome.CRASHED,
    Verdict.TIMED_OUT: TrialOutcome.CRASHED,
}


def audit(
    program: str,
    *,
    options: CheckOptions,
    kinds: Sequence[str] = (),
    per_kind: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Plant one fault after the other in a named program, check it under these options, and return all outcomes.

    Without `kinds`, faults of all kinds are planted; `per_kind` is the number of places that are tried for each, at
    most. `progress` is called with a few words before the check without a fault and before each kind. Raise UsageError
    if a kind is unknown, if `per_kind` is below 1, or if the transform does not start from the program (`Planted`), and
    ProgramError if the program cannot be loaded, fails eagerly or cannot be exported.
    """
    chosen_kinds = [FAULTS.get(kind).name for kind in dict.fromkeys(kinds)] or list(FAULTS)
    if per_kind < 1:
        raise UsageError(f"per_kind is the number of faults of each kind: at least 1, not {per_kind}")
    with runtime.preserved():
        control = prepare(program, options=options)
        # once, because all trials share the baseline
        control.baseline = other_inputs.extend(control.baseline, control.transform, control.notes)
        return _Auditor(control=control).run(chosen_kinds, per_kind, progress)


@dataclass(frozen=True, kw_only=True)
class _Auditor:
    """Runs the control and all trials against one baseline."""

    control: Check
    """The check of the program without a fault."""

    def run(self, kinds: Sequence[str], per_kind: int, progress: Callable[[str], None]) -> Audit:
        """Return the control's verdict, the trials of all kinds, and the kinds that have no place in the program.

        At most `per_kind` places are tried for each kind. Raise ProgramError if the program cannot be exported.
        """
        progress("without a fault")
        if failure := self._clean.failure:
            raise ProgramError(
                f"{self.control.baseline.program.name} cannot be exported, so no fault can be planted in it: {failure}"
            )
        control = self.control.run()
        trials: list[FaultTrial] = []
        inapplicable = []
        for kind in kinds:
            progress(kind)
            kind_trials = list(self._trials(kind, per_kind))
            trials += kind_trials
            if not kind_trials:
                inapplicable.append(kind)
        return Audit(
            case=self.control.case,
            control=control.verdict,
            control_reason=_reason_for(control),
            trials=tuple(trials),
            inapplicable=tuple(inapplicable),
        )

    def _trials(self, kind: str, limit: int) -> Iterator[FaultTrial]:
        """Yield the trial of a fault of this kind at one place after the other, at `limit` places at most.

        The outcome is CRASHED if the faulty program fails without the transform, NO_EFFECT if it computes the same bits
        as without the fault, and otherwise follows from the verdict of the check under the transform (`_OUTCOMES`).
        Nothing is yielded if the program has no place for the fault.
        """
        seed, transform = self.control.case.seed, self.control.transform
        used_nodes: list[str] = []
        while len(used_nodes) < limit:
            fault_only = plant(kind, seed, excluding=used_nodes, exports=self._exports)
            try:
                faulty = self._run(fault_only)
            except NotPlantable:
                return
            assert fault_only.place is not None
            if failure := faulty.failure:
                reason = f"it fails without the transform too: {failure}"
                yield FaultTrial(place=fault_only.place, outcome=TrialOutcome.CRASHED, reason=reason)
            elif _has_same_values(self._clean.observation, faulty.observation):
                yield FaultTrial(place=fault_only.place, outcome=TrialOutcome.NO_EFFECT)
            else:
                # the same seed chooses the same place
                both = plant(kind, seed, transform, excluding=used_nodes, exports=self._exports)
                report = replace(self.control, transform=both, notes=[], candidate=CandidateRun()).run()
                yield FaultTrial(place=fault_only.place, outcome=_OUTCOMES[report.verdict], reason=_reason_for(report))
            used_nodes.append(fault_only.place.node)

    def _run(self, transform: Transform) -> CandidateRun:
        """Return the run of the program under a transform that compiles nothing; it is not judged."""
        return self.control.baseline.run(transform, is_eager=True)

    @cached_property
    def _exports(self) -> Exports:
        """The traced programs, which all faults share."""
        return Exports()

    @cached_property
    def _clean(self) -> CandidateRun:
        """The run of the exported program without a fault."""
        return self._run(Export({}))


def _has_same_values(clean: Observation, faulty: Observation) -> bool:
    """Tell whether two observations have the same stages and leaves, and all leaves are bitwise equal."""
    if clean.stages.keys() != faulty.stages.keys():
        return False
    judge = Judge(policy=Bitwise())
    for stage, leaves in clean.stages.items():
        comparisons, unmatched = judge.compare(leaves, faulty.stages[stage])
        if unmatched or any(comparison.verdict is not Verdict.EQUIVALENT for comparison in comparisons):
            return False
    return True


def _reason_for(report: Report) -> str:
    """Return one line on a report's worst stage, `STAGE PATH: REASON` of its worst leaf; empty if all are equivalent.

    If no leaf has the stage's verdict, it is `STAGE: REASON` with the reason of the stage.
    """
    worst = max(report.stages, key=lambda stage: stage.verdict.severity, default=None)
    if worst is None or worst.verdict is Verdict.EQUIVALENT:
        return ""
    comparisons = [comparison for comparison in worst.comparisons if comparison.verdict is worst.verdict]
    if not comparisons:
        return f"{worst.name}: {worst.reason}"
    worst_comparison = max(comparisons, key=lambda comparison: comparison.rank)
    return f"{worst.name} {worst_comparison.path}: {worst_comparison.reason}"
