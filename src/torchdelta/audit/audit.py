"""How good is a check? Faults are planted in the user's own program, one at a time, and it is asked each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchdelta import transforms
from torchdelta._torch.process import runtime
from torchdelta.audit.faults import FAULTS, NotPlantable, plant
from torchdelta.check.baseline import Baseline
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.check import Check
from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Bitwise
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import ProgramError, UsageError
from torchdelta.program.loading import load_program
from torchdelta.program.programs import Program
from torchdelta.program.stages import OPTIMIZERS, Observation, Plan
from torchdelta.records.audit import Audit, FaultTrial, TrialOutcome
from torchdelta.records.case import Case
from torchdelta.records.comparison import Scalar
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.export import Export, Exports

DEFAULT_STAGES = ("forward", "gradients")

_OUTCOME = {
    Verdict.DIVERGED: TrialOutcome.CAUGHT,
    Verdict.EQUIVALENT: TrialOutcome.MISSED,
    Verdict.INCONCLUSIVE: TrialOutcome.INCONCLUSIVE,
    Verdict.CRASHED: TrialOutcome.CRASHED,
    Verdict.TIMED_OUT: TrialOutcome.CRASHED,
}


def audit(
    program: str,
    *,
    transform: str,
    options: Mapping[str, Scalar] | None = None,
    stages: Sequence[str] | None = None,
    policy: str = "noise",
    kinds: Sequence[str] = (),
    per_kind: int = 1,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Plant faults of these kinds (of all, where none is named) in a program, and check each under the transform."""
    chosen = [FAULTS.get(kind).name for kind in dict.fromkeys(kinds)] or list(FAULTS)
    if per_kind < 1:
        raise UsageError(f"at least one fault of a kind is planted, not {per_kind}")
    case = Case(
        program=program,
        transform=transform,
        options=dict(options or {}),
        stages=tuple(stages) if stages is not None else DEFAULT_STAGES,
        policy=policy,
        seed=seed,
    )
    onward = transforms.build(transform, case.options)
    parse(policy)  # what is misspelt is said before anything runs
    with runtime.preserved():
        runtime.seed_everything(seed)
        source = load_program(program)
        auditor = _Auditor(case=case, program=source, transform=onward, stages_by_default=stages is None)
        return auditor.run(chosen, per_kind, progress)


@dataclass(frozen=True, kw_only=True)
class _Auditor:
    case: Case
    program: Program
    transform: Transform
    stages_by_default: bool

    def run(self, kinds: Sequence[str], per_kind: int, progress: Callable[[str], None]) -> Audit:
        progress("without a fault")
        if failure := self._clean.failure:
            raise ProgramError(
                f"{self.program.name} cannot be exported, so no fault can be planted in it: "
                f"{failure.type}: {failure.message}"
            )
        control = self._check(self.transform)
        trials: list[FaultTrial] = []
        inapplicable = []
        for kind in kinds:
            progress(kind)
            found = list(self._trials(kind, per_kind))
            trials += found
            if not found:
                inapplicable.append(kind)
        return Audit(
            case=self.case,
            control=control.verdict,
            control_reason=_evidence(control),
            trials=tuple(trials),
            inapplicable=tuple(inapplicable),
        )

    def _trials(self, kind: str, most: int) -> Iterator[FaultTrial]:
        """Try one place after the other, until there are no more."""
        taken: list[str] = []
        while len(taken) < most:
            alone = plant(kind, self.case.seed, excluding=taken, exports=self._exports)
            try:
                faulty = self._run(alone)
            except NotPlantable:
                return
            assert alone.place is not None
            if failure := faulty.failure:
                reason = f"it fails without the transform too: {failure.type}: {failure.message}"
                yield FaultTrial(place=alone.place, outcome=TrialOutcome.CRASHED, reason=reason)
            elif _is_same(self._clean.observation, faulty.observation):
                yield FaultTrial(place=alone.place, outcome=TrialOutcome.NO_EFFECT)
            else:
                # the same seed among the same places: the same place
                onward = plant(kind, self.case.seed, self.transform, excluding=taken, exports=self._exports)
                report = self._check(onward)
                yield FaultTrial(place=alone.place, outcome=_OUTCOME[report.verdict], reason=_evidence(report))
            taken.append(alone.place.node)

    def _check(self, transform: Transform) -> Report:
        return Check(
            case=self.case,
            baseline=self._baseline,
            transform=transform,
            policy=parse(self.case.policy),
            stages_by_default=self.stages_by_default,
        ).run()

    def _run(self, transform: Transform) -> CandidateRun:
        """Run what a transform that compiles nothing makes of the program, without judging it."""
        return self._baseline.run(transform, is_eager=True)

    @cached_property
    def _baseline(self) -> Baseline:
        plan = Plan(
            stages=self.case.stages,
            seed=self.case.seed,
            iterations=self.case.iterations,
            steps=self.case.steps,
            optimizer=OPTIMIZERS.get(self.case.optimizer),
        )
        return Baseline(program=self.program, plan=plan)

    @cached_property
    def _exports(self) -> Exports:
        return Exports()

    @cached_property
    def _clean(self) -> CandidateRun:
        return self._run(Export({}))


def _is_same(clean: Observation, faulty: Observation) -> bool:
    if clean.stages.keys() != faulty.stages.keys():
        return False
    judge = Judge(policy=Bitwise())
    for stage, leaves in clean.stages.items():
        found, unmatched = judge.compare(leaves, faulty.stages[stage])
        if unmatched or any(seen.verdict is not Verdict.EQUIVALENT for seen in found):
            return False
    return True


def _evidence(report: Report) -> str:
    """Return why the worst stage is not equivalent; empty where all are."""
    worst = max(report.stages, key=lambda stage: stage.verdict.severity, default=None)
    if worst is None or worst.verdict is Verdict.EQUIVALENT:
        return ""
    guilty = [seen for seen in worst.comparisons if seen.verdict is worst.verdict]
    if not guilty:
        return f"{worst.name}: {worst.reason}"
    leaf = max(guilty, key=lambda seen: seen.rank)
    return f"{worst.name} {leaf.path}: {leaf.reason}"
