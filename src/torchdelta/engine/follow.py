"""What rounding decides, a correct program may decide otherwise: such decisions of the candidate are followed.

A token between two experts, or the sign of a gradient that is zero but for rounding, takes everything behind it
elsewhere, by far more than rounding does. A candidate that diverged natively, and is the same function in float64, is
held against a truth, a reference and a noisy run that decided as it did. What it chose inside cannot be seen: each
choice within noise is tried the other way, and kept where that brings the truth closer to the candidate's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch

from torchdelta._torch import lift
from torchdelta._torch.noisy import Noisy
from torchdelta._torch.torn import Choice, Force, Watch
from torchdelta.compare.spread import spread
from torchdelta.engine.baseline import Baseline
from torchdelta.engine.undecided import Followed
from torchdelta.execute.sides import Side, varied_in
from torchdelta.execute.stages import BeforeStep, Observation, Scope, SideFailed, observe
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

WITHIN = 4.0
"""So many times its noise apart, two values may be in either order."""
TRIED = 32
"""Choices that are tried the other way, those with the smallest margins first."""
RUNS = 3
"""Noisy runs that follow."""

Told = Mapping[str, Mapping[str, Comparison]]
"""What float64 told, by stage and path."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Correct runs that decided as the candidate did."""

    reference: Observation
    truth: Observation
    noisy: list[Observation]


Compare = Callable[[str, Runs], Sequence[Comparison]]


@dataclass(frozen=True)
class _Torn:
    """One row of one choice that rounding decides."""

    choice: int
    row: int
    pair: torch.Tensor
    margin: float
    noise: float
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} by a margin of {self.margin:.3g}, which rounding moves by {self.noise:.3g}"


@dataclass(kw_only=True)
class Follower:
    """Explains a candidate by decisions of its own, as far as they are within rounding."""

    baseline: Baseline
    candidate: Observation
    compare: Compare
    told: Told
    notes: list[str] = field(default_factory=list)
    turned: list[_Torn] = field(default_factory=list)
    """Choices that the candidate made the other way."""
    torn: list[_Torn] = field(default_factory=list)
    """All choices within noise."""
    _chosen: list[torch.Tensor] = field(default_factory=list)

    def explain(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages with what other decisions explain equivalent, and what they may explain inconclusive."""
        is_other_function = any(
            seen.verdict is Verdict.DIVERGED for leaves in self.told.values() for seen in leaves.values()
        )
        if is_other_function or not any(_is_suspect(seen) for stage in stages for seen in stage.comparisons):
            return stages
        with self.baseline.timed("follow"):
            try:
                if self.baseline.has_chosen:
                    self._turn_choices()
                has_steps = any(stage.name == "steps" and _has_suspects(stage) for stage in stages)
                return self._judged(stages) if self.turned or has_steps else [self._doubted(stage) for stage in stages]
            except SideFailed as failed:
                self.notes.append(
                    f"decisions within rounding were not followed: the program fails with them ({failed})"
                )
                return stages

    def _judged(self, stages: list[Stage]) -> list[Stage]:
        signs = Followed(
            candidate=self.candidate,
            truth=self.baseline.truth or Observation(),
            runs=(self.baseline.reference, *self.baseline.noisy(1)),
        )
        runs = self._runs(signs)
        explained = 0
        judged = []
        for stage in stages:
            if _has_suspects(stage):
                again = {seen.path: seen for seen in self.compare(stage.name, runs)}
                found = [_explained(seen, again.get(seen.path)) for seen in stage.comparisons]
                explained += sum(old is not new for old, new in zip(stage.comparisons, found, strict=True))
                stage = Stage.of(stage.name, tuple(found), stage.reason)
            judged.append(self._doubted(stage))
        if explained:
            decided = [f"chose otherwise in {len(self.turned)} places ({self.turned[0]})"] if self.turned else []
            decided += [f"stepped otherwise in {signs.count} elements whose gradient is zero but for rounding"] * bool(
                signs.count
            )
            self.notes.append(
                f"in {explained} leaves the candidate was held against a truth that decided as it did: it "
                f"{' and '.join(decided) or 'took another trajectory'}"
            )
        return judged

    def _doubted(self, stage: Stage) -> Stage:
        """Return the stage with what other choices may explain inconclusive: not all of them were tried."""
        is_open = len(self.torn) > TRIED or (bool(self.torn) and stage.name == "steps")
        if not is_open or not _has_suspects(stage):
            return stage
        doubt = (
            f"but {len(self.torn)} choices are within rounding, the closest {self.torn[0]}, and a correct program "
            "that makes some of them the other way is as far off"
        )
        told = self.told.get(stage.name, {})
        found = [
            replace(seen, verdict=Verdict.INCONCLUSIVE, reason=f"{seen.reason}; {doubt}")
            if _is_suspect(seen) and seen.path in told
            else seen
            for seen in stage.comparisons
        ]
        return Stage.of(stage.name, tuple(found), stage.reason)

    def _turn_choices(self) -> None:
        """Find the choices within noise, and turn those that bring the truth closer to the candidate."""
        truth, choices = self._watched(lift.widened, self._lifted)
        noise = Noisy(seed=self.baseline.plan.seed)
        others = [
            self._watched(_same, self.baseline.eager_scope)[1],
            self._watched(_same, _within(self.baseline.eager_scope, noise), noise)[1],
        ]
        self.torn = sorted(_torn(choices, others), key=lambda found: found.margin / found.noise)
        self._chosen = [choice.indices for choice in choices]
        nearest = self._distance(truth)
        for torn in self.torn[:TRIED]:
            turned = list(self._chosen)
            turned[torn.choice] = choices[torn.choice].changed(turned[torn.choice], torn.row, torn.pair)
            scope = _within(self._lifted, Force(turned))
            distance = self._distance(self._forward(lift.widened, scope))
            if distance < nearest:
                nearest, self._chosen = distance, turned
                self.turned.append(torn)

    def _watched(
        self, convert: Callable[[torch.dtype], torch.dtype], scope: Scope, noise: Noisy | None = None
    ) -> tuple[Observation, list[Choice]]:
        watch = Watch()
        return self._forward(convert, _within(scope, watch), noise), watch.choices

    def _forward(
        self, convert: Callable[[torch.dtype], torch.dtype], scope: Scope, noise: Noisy | None = None
    ) -> Observation:
        side = Side.copied_from(self.baseline.program, convert=convert)
        if noise is not None:
            noise.start_from(varied_in(side))
        plan = replace(self.baseline.plan, stages=("forward",))
        return observe(side, plan, self.baseline.original, scope, convert)

    @property
    def _lifted(self) -> Scope:
        return self.baseline.lifted_scope(self.baseline.drawn_in)

    def _distance(self, truth: Observation) -> float:
        """Return how far the candidate's outputs are from this truth, each in units of the reference's distance."""
        total = 0.0
        for path, value in truth.stages["forward"].items():
            given, held = (side.stages["forward"].get(path) for side in (self.candidate, self.baseline.reference))
            first = self.baseline.truth.stages["forward"].get(path) if self.baseline.truth else None
            known = [leaf for leaf in (value, given, held, first) if isinstance(leaf, torch.Tensor)]
            if len(known) < 4 or not value.is_floating_point() or any(leaf.shape != value.shape for leaf in known):
                continue
            unit = spread(first, held).rms
            distance = spread(value, given).rms
            total += (distance / unit) ** 2 if unit else 0.0
        return total if math.isfinite(total) else math.inf

    def _runs(self, signs: Followed) -> Runs:
        truth = self._full(lift.widened, self._lifted, signs.lead)
        reference = self._full(_same, self.baseline.eager_scope, signs.follow)
        noisy = []
        for index in range(RUNS):
            noise = Noisy(seed=self.baseline.plan.seed + index)
            noisy.append(self._full(_same, _within(self.baseline.eager_scope, noise), signs.follow, noise))
        return Runs(reference=reference, truth=truth, noisy=noisy)

    def _full(
        self,
        convert: Callable[[torch.dtype], torch.dtype],
        scope: Scope,
        before_step: BeforeStep,
        noise: Noisy | None = None,
    ) -> Observation:
        baseline = self.baseline
        side = Side.copied_from(baseline.program, convert=convert)
        if noise is not None:
            noise.start_from(varied_in(side))
        forced = _within(scope, Force(self._chosen)) if self.turned else scope
        return observe(side, baseline.plan, baseline.original, forced, convert, before_step=before_step)


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _torn(choices: Sequence[Choice], others: Sequence[Sequence[Choice]]) -> Iterator[_Torn]:
    """Yield every row whose margin is within what correct runs move the values of that choice by."""
    for index, choice in enumerate(choices):
        runs = [run[index].rows for run in others if index < len(run) and run[index].rows.shape == choice.rows.shape]
        if not runs or not choice.rows.numel():
            continue
        # of a row that an earlier choice took elsewhere, the values moved for that reason
        noise = max(float((run - choice.rows).abs().amax(-1).nanmedian()) for run in runs)
        margins, pairs = choice.other_way()
        for row in (margins <= WITHIN * noise).nonzero()[:, 0].tolist() if noise > 0.0 else ():
            yield _Torn(index, row, pairs[row], float(margins[row]), noise, choice.operation)


def _is_suspect(seen: Comparison) -> bool:
    """Tell whether values diverged in the native question alone."""
    is_native = seen.details.get("question") == "native" and seen.error is not None and math.isfinite(seen.error)
    return is_native and seen.verdict is Verdict.DIVERGED and not any(not breach.excused for breach in seen.contract)


def _has_suspects(stage: Stage) -> bool:
    return any(_is_suspect(seen) for seen in stage.comparisons)


def _explained(seen: Comparison, again: Comparison | None) -> Comparison:
    if again is None or not _is_suspect(seen) or again.verdict is not Verdict.EQUIVALENT:
        return seen
    return replace(again, details={**again.details, "followed": True})


def _within(scope: Scope, *modes: AbstractContextManager[object]) -> Scope:
    @contextmanager
    def nested() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(scope())
            for mode in modes:
                stack.enter_context(mode)
            yield

    return nested
