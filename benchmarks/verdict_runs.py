"""Run the trials of one subject. Reference, truth and exports are computed once and shared by all of them.

Start reading at `Bench.run`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from dataclasses import replace

from torchdelta import transforms
from torchdelta._torch.modes import lift
from torchdelta.audit.faults import NotPlantable, Place, PlaceLost, plant
from torchdelta.check.baseline import Baseline
from torchdelta.check.check import Check
from torchdelta.compare.policy_parser import parse
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.program.stages import OPTIMIZERS, Observation, Plan, SideFailed, observe
from torchdelta.records.case import Case
from torchdelta.records.report import Report, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.export import Exports
from verdict_cases import FAULT, Subject, Trial
from verdict_records import CRASHED, DONE, FAILED, NATIVE_ALONE, NOT_PLANTABLE, OURS, Record, StageRecord
from verdict_rules import flagged_by_others, is_identical

_MOST_REASONS = 3
_LONGEST_ERROR = 500
_STEPS = 3


class RunFailed(Exception):
    """A program that was run without being judged raised."""


class Bench:
    """One subject with its baseline and exports, which its trials share."""

    def __init__(self, subject: Subject, stages: tuple[str, ...]) -> None:
        self.stages = stages
        self.baseline = self._make_baseline(subject)
        self.exports = Exports()
        self._last_wide: tuple[Baseline, Observation] | None = None

    def _make_baseline(self, subject: Subject) -> Baseline:
        return baseline_of(subject.program(), self.stages)

    def transform_of(self, trial: Trial) -> Transform:
        """Return the transform of a trial; NotPlantable if its fault is known to have no place."""
        return transform_of(trial, self.exports)

    def run(self, trial: Trial) -> Record:
        """Run a trial and return its record, also if it crashed or failed."""
        started = time.perf_counter()
        record = self._try(trial)
        return replace(record, seconds=round(time.perf_counter() - started, 3))

    def _try(self, trial: Trial) -> Record:
        """Run a trial and return its record without its time."""
        record = Record(trial=trial, status=DONE, seconds=0.0)
        try:
            transform = self.transform_of(trial)
            check, report = checked(self.baseline, trial, transform)
            candidate = check.candidate.observation
            record = replace(record, place=_place(transform), graphs=report.graphs.captured if report.graphs else 0)
            if report.failure:
                error = f"{report.failure.type}: {report.failure.message}"[:_LONGEST_ERROR]
                return replace(record, status=CRASHED, error=error)
            mattering = self._mattering(transform, candidate) if trial.kind == FAULT else set()
            return replace(
                record, stages={stage.name: self._judged(stage, check, mattering) for stage in report.stages}
            )
        except NotPlantable as error:
            return replace(record, status=NOT_PLANTABLE, error=str(error))
        except Exception:
            return replace(record, status=FAILED, error=traceback.format_exc(limit=-6))

    def _judged(self, stage: Stage, check: Check, mattering: set[str]) -> StageRecord:
        """Return what each rule says about a stage of a check, whose baseline may have more inputs than the bench's."""
        name = stage.name
        others = flagged_by_others(
            check.baseline.reference.stages[name],
            check.candidate.observation.stages[name],
            self._wide_reference(check.baseline).stages[name],
        )
        return StageRecord(
            verdict=stage.verdict.value,
            flagged=[*_flagged_by_us(stage), *others],
            reasons=_reasons(stage),
            matters=name in mattering,
        )

    def _wide_reference(self, baseline: Baseline) -> Observation:
        """Return the reference in float64 as users of the other rules compute it: casts inside the program are kept."""
        if self._last_wide is None or self._last_wide[0] is not baseline:
            self._last_wide = baseline, _run_wide(baseline)
        return self._last_wide[1]

    def _mattering(self, transform: Transform, candidate: Observation) -> set[str]:
        """Return the stages that a fault changes, natively or in float64."""
        differing = self._differing(self._unfaulted, candidate)
        if differing != set(self.stages):
            with contextlib.suppress(PlaceLost, RunFailed):  # not every faulty program has a float64 of its own
                is_eager = not transform.traits.is_compiler
                faulty = self.run_alone(transform, lifted=True, is_eager=is_eager)
                differing |= self._differing(self._lifted_unfaulted, faulty)
        return differing

    def _differing(self, first: Observation, second: Observation) -> set[str]:
        return {name for name in self.stages if not is_identical(first.stages[name], second.stages[name])}

    @functools.cached_property
    def _unfaulted(self) -> Observation:
        return self.run_unfaulted(lifted=False)

    @functools.cached_property
    def _lifted_unfaulted(self) -> Observation:
        return self.run_unfaulted(lifted=True)

    def run_unfaulted(self, *, lifted: bool) -> Observation:
        """Run the exported program without a fault."""
        return self.run_alone(transforms.build("export", {}), lifted=lifted, is_eager=True)

    def run_alone(self, transform: Transform, *, lifted: bool, is_eager: bool) -> Observation:
        """Run a transform, and return the observation without judging it; `is_eager` says that it does not compile."""
        run = self.baseline.run(transform, lifted=lifted, is_eager=is_eager)
        if run.failure is not None:
            raise RunFailed(f"{run.failure.type}: {run.failure.message}")
        return run.observation


def baseline_of(program: Program, stages: tuple[str, ...]) -> Baseline:
    """Return the baseline that every candidate of a program is compared with; nothing has run yet."""
    plan = Plan(stages=stages, seed=0, iterations=1, steps=_STEPS, optimizer=OPTIMIZERS.get("adamw"))
    return Baseline(program=program, plan=plan)


def _run_wide(baseline: Baseline) -> Observation:
    """Return a run of a plain copy of the program in float64, or the truth or the reference if it fails there."""
    try:
        side = Side.copied_from(baseline.program, convert=lift.widened)
        return observe(side, baseline.plan, baseline.original, baseline.eager_scope, lift.widened)
    except SideFailed:
        return baseline.truth or baseline.reference


def checked(baseline: Baseline, trial: Trial, transform: Transform) -> tuple[Check, Report]:
    """Run a check; return it with its report."""
    check = Check(
        case=Case(program=trial.subject.model, transform=trial.transform, stages=trial.stages, steps=_STEPS),
        transform=transform,
        policy=parse("noise"),
        baseline=baseline,
        stages_by_default=False,
    )
    report = check.run()
    return check, report


def transform_of(trial: Trial, exports: Exports) -> Transform:
    """Return the transform of a trial: a planted fault, or one by its name."""
    if trial.kind == FAULT:
        return plant(trial.transform, seed=trial.subject.seed, exports=exports)
    return transforms.build(trial.transform, {})


def _place(transform: Transform) -> str:
    place = getattr(transform, "place", None)
    return f"{place.node} of {place.module_path or 'the model'}" if isinstance(place, Place) else ""


def _flagged_by_us(stage: Stage) -> list[str]:
    diverged = [seen for seen in stage.comparisons if seen.verdict is Verdict.DIVERGED]
    is_seen_natively = any(seen.details.get("question", "native") == "native" for seen in diverged)
    return [*([NATIVE_ALONE] if is_seen_natively else []), *([OURS] if diverged else [])]


def _reasons(stage: Stage) -> list[str]:
    """Return the reasons of the stage's verdict: of the worst leaves, or of the one that came closest."""
    leaves = sorted(stage.comparisons, key=lambda seen: seen.rank, reverse=True)
    guilty = [seen for seen in leaves if seen.verdict is not Verdict.EQUIVALENT]
    told = [f"{seen.path}: {seen.reason}" for seen in (guilty[:_MOST_REASONS] or leaves[:1])]
    return [*([stage.reason] if stage.reason else []), *told]
