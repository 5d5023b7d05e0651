"""Choices within rounding, such as the expert a token goes to, are replayed so that what lies behind them is compared.

Truth and noise are run again with the reference's choices. That tells more about a candidate that chose as the
reference did, and nothing about another one: its native verdict stays as it is.

What rounding decides, a correct program may decide otherwise: such decisions of the candidate are followed.

A token between two experts, or the sign of a gradient that is zero but for rounding, takes everything behind it
elsewhere, by far more than rounding does. A candidate that diverged natively, and is the same function in float64, is
held against a truth, a reference and a noisy run that decided as it did. What it chose inside cannot be seen: each
choice within noise is tried the other way, and kept where that brings the truth closer to the candidate's outputs.

Integers and booleans that a correct program may get either way: their margin from the edge is within noise.

The program is run again for the margins alone, in float64, natively and with noise: by how much a margin moves between
correct runs is its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from torchdelta._torch.modes import lift
from torchdelta._torch.modes.decisions import (
    ChoiceRecord,
    ChoiceReplay,
    CloseChoice,
    DecisionWatch,
    ForcedDecisions,
    MarginWatch,
)
from torchdelta._torch.modes.noisy import Noisy
from torchdelta._torch.process import runtime
from torchdelta.check.baseline import Baseline
from torchdelta.check.near_zero_gradients import FollowedSigns
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.spread import spread
from torchdelta.program.sides import Side, varied_in
from torchdelta.program.stages import BeforeStep, Observation, Plan, Scope, SideFailed, observe
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict


@dataclass(frozen=True)
class ReplayedRuns:
    """The truth and a noisy run that chose as the reference did."""

    truth: Observation
    noisy: Observation
    count: int
    """Choices of the truth that would have been others."""


def replayed(baseline: Baseline) -> ReplayedRuns | None:
    """Run the truth and a noisy run with the reference's choices; None where they would have been the same."""
    recorded = ChoiceRecord()
    plan, original = baseline.plan, baseline.original
    noise = Noisy(seed=plan.seed)
    with baseline.timed("replay"):
        try:
            observe(Side.copied_from(baseline.program), plan, original, within(baseline.eager_scope, recorded))
            if not recorded.chosen:
                return None
            unit = unit_roundoff(baseline.drawn_in)
            of_truth, of_noise = ChoiceReplay(recorded.chosen, unit), ChoiceReplay(recorded.chosen, unit)
            lifted = within(baseline.lifted_scope(baseline.drawn_in), of_truth)
            truth = observe(
                Side.copied_from(baseline.program, convert=lift.widened), plan, original, lifted, lift.widened
            )
            if not of_truth.count:
                return None
            side = Side.copied_from(baseline.program)
            noise.start_from(varied_in(side))
            noisy = observe(side, plan, original, within(baseline.eager_scope, noise, of_noise))
        except SideFailed as failed:
            baseline.notes.append(f"choices within rounding were not replayed: the program fails with them ({failed})")
            return None
    return ReplayedRuns(truth, noisy, of_truth.count)


def within(scope: Scope, *modes: AbstractContextManager[object]) -> Scope:
    """Return a scope with these modes inside it."""

    @contextmanager
    def nested() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(scope())
            for mode in modes:
                stack.enter_context(mode)
            yield

    return nested


WITHIN = 4.0
"""So many times its noise apart, two values may be in either order."""
TRIED = 32
"""Choices that are tried the other way, those with the smallest margins first."""
FAR = 8.0
"""An error this many times of what is allowed is not made by a few choices among many."""
RUNS = 3
"""Noisy runs that follow."""

Told = Mapping[str, Mapping[str, Comparison]]
"""What float64 told, by stage and path."""


@dataclass(frozen=True, kw_only=True)
class FollowedRuns:
    """Correct runs that decided as the candidate did."""

    reference: Observation
    truth: Observation
    noisy: list[Observation]


Compare = Callable[[str, FollowedRuns], Sequence[Comparison]]


@dataclass(frozen=True)
class _CloseDecisions:
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
class DecisionFollower:
    """Explains a candidate by decisions of its own, as far as they are within rounding."""

    baseline: Baseline
    candidate: Observation
    compare: Compare
    told: Told
    notes: list[str] = field(default_factory=list)
    turned: list[_CloseDecisions] = field(default_factory=list)
    """Choices that the candidate made the other way."""
    torn: list[_CloseDecisions] = field(default_factory=list)
    """All choices within noise."""
    _chosen: list[torch.Tensor] = field(default_factory=list)

    def explain(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages with what other decisions explain equivalent, and what they may explain inconclusive."""
        suspects = [stage.name for stage in stages if _has_suspects(stage)]
        if not suspects or any(_has_diverged(leaves.values()) for leaves in self.told.values()):
            return stages
        with self.baseline.timed("follow"):
            try:
                if self.baseline.has_chosen:
                    self._turn_choices()
                if self.turned or suspects == ["steps"]:
                    stages = self._judged(stages, has_steps="steps" in suspects)
            except SideFailed as failed:
                self.notes.append(
                    f"decisions within rounding were not followed: the program fails with them ({failed})"
                )
                return stages
        return [self._doubted(stage) for stage in stages]

    def _judged(self, stages: list[Stage], *, has_steps: bool) -> list[Stage]:
        signs = FollowedSigns(
            candidate=self.candidate,
            truth=self.baseline.truth or Observation(),
            runs=(self.baseline.reference, *self.baseline.noisy(1)),
        )
        runs = self._runs(signs, has_steps)
        explained = 0
        judged = []
        for stage in stages:
            if _has_suspects(stage):
                again = {seen.path: seen for seen in self.compare(stage.name, runs)}
                told = self.told.get(stage.name, {})
                found = [_explained(seen, again.get(seen.path), told.get(seen.path)) for seen in stage.comparisons]
                explained += sum(old is not new for old, new in zip(stage.comparisons, found, strict=True))
                stage = Stage.of(stage.name, tuple(found), stage.reason)
            judged.append(stage)
        if explained:
            decided = [f"{len(self.turned)} choices ({self.turned[0]})"] if self.turned else []
            if signs.count:
                decided.append(f"the steps of {signs.count} elements whose gradient is zero but for rounding")
            self.notes.append(
                f"{explained} leaves were held against a truth that decided as the candidate did where rounding "
                f"decides: it made otherwise {' and '.join(decided) or 'nothing, but stepped by a little more or less'}"
            )
        return judged

    def _doubted(self, stage: Stage) -> Stage:
        """Return the stage with what choices that were not tried may explain inconclusive.

        Those of later steps are not tried at all.
        """
        is_open = len(self.torn) > TRIED or (bool(self.torn) and stage.name == "steps")
        if not is_open or not stage.comparisons:
            return stage
        doubt = (
            f"but {len(self.torn)} choices are within rounding, the closest {self.torn[0]}, and a correct program "
            "that makes others of them may be as far off"
        )
        told = self.told.get(stage.name, {})

        def doubted(seen: Comparison) -> Comparison:
            if not _is_suspect(seen) or seen.path not in told or (stage.name != "steps" and seen.ratio > FAR):
                return seen
            return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=f"{seen.reason}; {doubt}")

        return Stage.of(stage.name, tuple(doubted(seen) for seen in stage.comparisons), stage.reason)

    def _turn_choices(self) -> None:
        """Find the choices within noise, and turn those that bring the truth closer to the candidate."""
        truth, choices = self._watched(lift.widened, self._lifted)
        noise = Noisy(seed=self.baseline.plan.seed)
        others = [
            self._watched(_same, self.baseline.eager_scope)[1],
            self._watched(_same, within(self.baseline.eager_scope, noise), noise)[1],
        ]
        moved = _moved(choices, others)
        self.torn = sorted(_torn(choices, moved), key=lambda found: found.margin / found.noise)
        nearest = self._distance(truth)
        # in their order: what lies behind a choice that was turned may be chosen by a wide margin now
        pending = sorted(self.torn[:TRIED], key=lambda found: found.choice)
        for _ in range(TRIED):
            if not pending:
                break
            torn = pending.pop(0)
            told = [choice.indices for choice in choices[: torn.choice]]
            told.append(choices[torn.choice].changed(torn.row, torn.pair))
            truth, made = self._watched(lift.widened, within(self._lifted, ForcedDecisions(told)))
            if (distance := self._distance(truth)) < nearest:
                nearest, choices = distance, made
                self.turned.append(torn)
                pending = [other for other in pending if other.choice == torn.choice]
                pending += [other for other in _torn(choices, moved) if other.choice > torn.choice]
        self._chosen = [choice.indices for choice in choices]

    def _watched(
        self, convert: Callable[[torch.dtype], torch.dtype], scope: Scope, noise: Noisy | None = None
    ) -> tuple[Observation, list[CloseChoice]]:
        watch = DecisionWatch()
        return self._forward(convert, within(scope, watch), noise), watch.choices

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
        first = self.baseline.truth or truth
        for path, value in truth.stages["forward"].items():
            sides = (self.candidate, self.baseline.reference, first)
            leaves = [leaf for side in sides if _is_like(leaf := side.stages["forward"].get(path), value)]
            if len(leaves) == len(sides) and is_inexact(value.dtype):
                given, held, before = leaves
                unit = spread(before, held).rms
                total += (spread(value, given).rms / unit) ** 2 if unit else 0.0
        return total if math.isfinite(total) else math.inf

    def _runs(self, signs: FollowedSigns, has_steps: bool) -> FollowedRuns:
        plan = self.baseline.plan
        if not has_steps:
            plan = replace(plan, stages=tuple(name for name in plan.stages if name != "steps"))
        truth = self._full(plan, lift.widened, self._lifted, signs.lead)
        reference = self._full(plan, _same, self.baseline.eager_scope, signs.follow)
        noisy = []
        for index in range(RUNS):
            noise = Noisy(seed=plan.seed + index)
            noisy.append(self._full(plan, _same, within(self.baseline.eager_scope, noise), signs.follow, noise))
        return FollowedRuns(reference=reference, truth=truth, noisy=noisy)

    def _full(
        self,
        plan: Plan,
        convert: Callable[[torch.dtype], torch.dtype],
        scope: Scope,
        before_step: BeforeStep,
        noise: Noisy | None = None,
    ) -> Observation:
        baseline = self.baseline
        side = Side.copied_from(baseline.program, convert=convert)
        if noise is not None:
            noise.start_from(varied_in(side))
        forced = within(scope, ForcedDecisions(self._chosen)) if self.turned else scope
        return observe(side, plan, baseline.original, forced, convert, before_step=before_step)


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _moved(choices: Sequence[CloseChoice], others: Sequence[Sequence[CloseChoice]]) -> list[float]:
    """Return by how much correct runs move the values of each choice."""
    moved = []
    for index, choice in enumerate(choices):
        runs = [run[index].rows for run in others if index < len(run) and run[index].rows.shape == choice.rows.shape]
        # the values of a row that an earlier choice took elsewhere moved for that reason: so it is the median
        moves = [float((run - choice.rows).abs().amax(-1).nanmedian()) for run in runs if run.numel()]
        moved.append(max(moves, default=0.0))
    return moved


def _torn(choices: Sequence[CloseChoice], moved: Sequence[float]) -> Iterator[_CloseDecisions]:
    """Yield every row of a choice whose margin is within noise."""
    for index, (choice, noise) in enumerate(zip(choices, moved, strict=False)):
        margins, pairs = choice.other_way()
        for row in (margins <= WITHIN * noise).nonzero()[:, 0].tolist() if noise > 0.0 else ():
            yield _CloseDecisions(index, row, pairs[row], float(margins[row]), noise, choice.operation)


def _is_suspect(seen: Comparison) -> bool:
    """Tell whether values diverged in the native question alone."""
    is_native = seen.details.get("question") == "native" and seen.error is not None and math.isfinite(seen.error)
    return is_native and seen.verdict is Verdict.DIVERGED and not any(not breach.excused for breach in seen.contract)


def _has_suspects(stage: Stage) -> bool:
    return any(_is_suspect(seen) for seen in stage.comparisons)


def _has_diverged(leaves: Iterable[Comparison]) -> bool:
    return any(seen.verdict is Verdict.DIVERGED for seen in leaves)


def _is_like(leaf: object, value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor) and leaf.shape == value.shape


def _explained(seen: Comparison, again: Comparison | None, told: Comparison | None) -> Comparison:
    if again is None or not _is_suspect(seen) or again.verdict is not Verdict.EQUIVALENT:
        return seen
    details = {**again.details, "followed": True}
    if told is not None and told.error is not None:
        details |= {"semantic_error": told.error, "semantic_noise": told.noise or 0.0}
    return replace(again, details=details)


WITHIN_NOISE = 8.0
"""So many times its noise from the edge, a margin may still be on either side of it."""


@dataclass(frozen=True)
class _Edge:
    """The margins of one leaf: in the truth, and by how much correct runs move them."""

    margins: torch.Tensor
    noise: float
    operation: str


def excuse(stages: list[Stage], baseline: Baseline, candidate: Observation, noisy: list[Observation]) -> list[Stage]:
    """Return the stages with every integer within noise of its edge inconclusive, and its margin as evidence."""
    return [_excused_stage(stage, baseline, candidate, noisy) for stage in stages]


def _excused_stage(stage: Stage, baseline: Baseline, candidate: Observation, noisy: list[Observation]) -> Stage:
    suspects = [seen for seen in stage.comparisons if _is_suspect_integer(seen)]
    if not suspects or baseline.truth is None:
        return stage
    edges: dict[str, _Edge] = {}
    if stage.name == "forward":
        try:
            edges = _edges(baseline)
        except Exception as error:  # the program's own: it runs on other values than it was given
            baseline.notes.append(f"margins are not known: a noisy run of the program fails ({error})")
    changed = []
    for seen in stage.comparisons:
        if seen in suspects:
            sides = (baseline.truth, baseline.reference, candidate, *noisy)
            leaves = [side.stages.get(stage.name, {}).get(seen.path) for side in sides]
            seen = _excused(seen, leaves, edges.get(seen.path))
        changed.append(seen)
    return Stage.of(stage.name, tuple(changed), stage.reason)


def _is_suspect_integer(seen: Comparison) -> bool:
    is_exact = seen.dtype is not None and not seen.dtype.startswith(("float", "bfloat", "complex"))
    is_broken = any(not breach.excused for breach in seen.contract)
    return is_exact and not is_broken and seen.verdict is Verdict.DIVERGED and seen.measurement is not None


def _excused(seen: Comparison, leaves: list[Any], edge: _Edge | None) -> Comparison:
    truth, reference, candidate, *noisy = leaves
    if not isinstance(truth, torch.Tensor) or truth.shape != reference.shape:
        return seen
    noisy = [run for run in noisy if isinstance(run, torch.Tensor) and run.shape == truth.shape]
    if torch.equal(candidate, truth):
        reason = f"{seen.reason.partition(',')[0]}, and in all of them the candidate is as the truth is"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
    differs = (candidate != reference) | (candidate != truth)
    if edge is not None and edge.margins.shape == differs.shape:
        margin = float(edge.margins[differs].max())
        details = {**seen.details, "margin": margin, "margin_noise": edge.noise, "decided_by": edge.operation}
        where = f"{seen.reason.partition(',')[0]}; {edge.operation} decided them by a margin of up to {margin:.3g}"
        if edge.noise > 0.0 and margin <= WITHIN_NOISE * edge.noise:
            reason = f"{where}, and rounding moves that margin by {edge.noise:.3g}: either way may be right"
            return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason, details=details)
        return replace(seen, reason=f"{where}, and rounding moves it by {edge.noise:.3g} only", details=details)
    among_correct = max(int((run != truth).sum()) for run in (reference, *noisy))
    if 0 < int((candidate != truth).sum()) < 2 * among_correct:
        reason = f"{seen.reason.partition(',')[0]}; {among_correct} differ between correct runs of the program too"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
    return seen


def _edges(baseline: Baseline) -> dict[str, _Edge]:
    """Run the program's forward three times, and return the margins of its integer outputs."""
    mode = Noisy(seed=baseline.plan.seed)
    wide, native, noisy = MarginWatch(), MarginWatch(), MarginWatch()
    drawn_in = baseline.drawn_in
    lifted = _outputs(baseline, [baseline.lifted_scope(drawn_in), lambda: wide], lift.widened)
    plain = _outputs(baseline, [baseline.eager_scope, lambda: native])
    moved = _outputs(baseline, [baseline.eager_scope, lambda: mode, lambda: noisy], start=mode.start_from)
    edges = {}
    for path, value in lifted.items():
        if not isinstance(value, torch.Tensor) or (found := wide.margin_of(value)) is None:
            continue
        margins, operation = found
        others = [
            seen[0]
            for ledges, outputs in ((native, plain), (noisy, moved))
            if isinstance(outputs.get(path), torch.Tensor) and (seen := ledges.margin_of(outputs[path])) is not None
        ]
        moves = [torch.nan_to_num(other.double() - margins.double()).abs() for other in others]
        noise = max((float(move.max()) for move in moves if move.shape == margins.shape and move.numel()), default=0.0)
        edges[path] = _Edge(margins, noise, operation)
    return edges


def _outputs(
    baseline: Baseline,
    scopes: list[Callable[[], AbstractContextManager[Any]]],
    convert: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    start: Callable[[list[torch.Tensor]], None] = lambda _: None,
) -> Leaves:
    side = Side.copied_from(baseline.program, convert=convert)
    start(varied_in(side))
    runtime.seed_everything(baseline.plan.seed)
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        outputs = side.call(*side.args, **side.kwargs)
    return leaves_of(outputs, "outputs")
