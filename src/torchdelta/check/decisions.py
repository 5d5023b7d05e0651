"""Decisions within rounding: a check replays them, follows them, or excuses them.

A decision among floats is an argmax, topk or sort, a comparison, a rounding, or the sign of a gradient that an
optimizer divides by its size. If its margin is within noise, a correct program may decide either way: a token goes to
another expert, a parameter steps the other way, and everything behind that differs by far more than rounding does. Such
a difference is not a fault of the candidate, and it must not hide one. There is one entry point for each remedy:

- `replay_reference` runs truth and noise again with the reference's choices, because choices that differ between these
  runs make the noise coarse. A candidate that chose as the reference did is then held to a finer measure.
- `DecisionFollower.explain` runs truth, reference and noise with the candidate's decisions. The choices of a candidate
  cannot be seen, so each choice within noise is tried the other way, and is kept if the truth comes closer to the
  candidate's outputs.
- `excuse_integers` makes integers and booleans inconclusive if rounding may have decided them.
- `settle_choices` makes such integers equivalent if only choices within rounding set the reference apart from the
  truth, and the candidate chose as the truth did.
- `settle_steps` replaces a parameter's elements by the truth where an undecided gradient stepped them: the gradient is
  judged in its own place. `SignFlips` gives the noisy runs of a baseline a random sign there.

`_torch/modes/decisions.py` has the table of the operations that decide, and the modes that record and replay them.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from torchdelta._torch.modes.decisions import NEAR, Choice, DecisionMargins, DecisionRecord, DecisionReplay, MarginWatch
from torchdelta._torch.modes.noisy import Noisy
from torchdelta._torch.tensors import has_values
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import Leaves
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.objects import as_tensor
from torchdelta.compare.protocol import Yardstick
from torchdelta.compare.spread import block_length, spread
from torchdelta.program.stages import BeforeStep, Observation, SideFailed
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

if TYPE_CHECKING:
    # a baseline flips signs in its own noisy runs, and imports this module for it
    from torchdelta.check.baseline import Baseline

CLOSE = 4.0
"""A margin of at most this many times its noise is within noise: two values may be in either order, a gradient may have
either sign.

Runs follow such decisions, after which a leaf may be equivalent.
"""
CLOSE_INTEGER = 8.0
"""A margin of at most this many times its noise excuses an integer.

It may be larger than `CLOSE`, because an excused integer is inconclusive and never equivalent.
"""
MOST_FLIPS = 4
"""So many times as many decisions as differ between two correct runs, and one more, may be made by rounding.

Where a step is as small as the noise, every margin is within it, also that of a candidate which is off everywhere.
"""
TRIED = 32
"""Choices that are tried the other way, those with the smallest margins first."""
FAR = 8.0
"""An error of more than this many times the allowed one is not explained by a few choices among many."""
RUNS = 3
"""Noisy runs that follow the candidate."""
_AS_TRUTH = "as_truth"
"""The detail of an excused comparison whose candidate has the truth's integers."""

SemanticComparisons = Mapping[str, Mapping[str, Comparison]]
"""The comparisons of the semantic question, by stage and path."""


# Replay the reference's choices


def replay_reference(baseline: Baseline) -> tuple[Yardstick[Observation], int] | None:
    """Run the truth and a noisy run with the reference's choices, where those are within rounding.

    Before that, the reference runs once more to record its choices. Return a yardstick of the reference and these two,
    and the number of indices that the truth would have chosen otherwise. Return None if that number is 0, or if the
    program fails with the choices, which is noted in the baseline.
    """
    record = DecisionRecord()
    with baseline.timed("replay"):
        try:
            baseline.observe(record)
            if not record.choices:
                return None
            unit = unit_roundoff(baseline.drawn_in)
            in_truth = DecisionReplay(record.indices, unit=unit)
            truth = baseline.observe(in_truth, lifted=True)
            if not in_truth.count:
                return None
            in_noise = DecisionReplay(record.indices, unit=unit)
            noisy = baseline.observe(in_noise, noise=Noisy(seed=baseline.plan.seed))
        except SideFailed as failed:
            baseline.notes.append(f"choices within rounding were not replayed: the program fails with them ({failed})")
            return None
    return Yardstick(reference=baseline.reference, truth=truth, noisy=[noisy]), in_truth.count


# Follow the candidate's decisions


Compare = Callable[[str, Yardstick[Observation]], Sequence[Comparison]]
"""Compares the candidate's leaves of a stage with those of correct runs."""


@dataclass(frozen=True)
class _CloseRow:
    """One row of one choice, whose margin is within noise."""

    position: int
    """The place of the choice among those of a run."""
    row: int
    pair: torch.Tensor
    """The two indices that are exchanged when the row is chosen the other way."""
    margin: float
    noise: float
    operation: str

    def __str__(self) -> str:
        """Return the operation, its margin and its noise in words."""
        return f"{self.operation} by a margin of {self.margin:.3g}, which rounding moves by {self.noise:.3g}"


@dataclass(kw_only=True)
class DecisionFollower:
    """Explains the differences of a candidate by decisions of its own, as far as these are within rounding."""

    baseline: Baseline
    candidate: Observation
    compare: Compare
    semantic: SemanticComparisons
    notes: list[str] = field(default_factory=list)
    close_rows: list[_CloseRow] = field(default_factory=list)
    """All choices within noise, the closest first."""
    exchanged: list[_CloseRow] = field(default_factory=list)
    """Those that the candidate made the other way."""
    _forced: list[torch.Tensor] = field(default_factory=list)
    """The indices of every choice, as the candidate seems to have made them."""

    def explain(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages; leaves that the candidate's decisions explain, or may, become equivalent or inconclusive.

        Only leaves that `_is_suspect` are looked at: their values diverged in the native question alone.
        `_compare_again` makes them equivalent, and is called only if a choice was exchanged or `steps` is the only
        stage with such leaves; `_doubt` makes them inconclusive. The stages are returned unchanged if there are none,
        if float64 diverged anywhere, or if the program fails with the candidate's decisions, which is noted. Sets
        `close_rows` and `exchanged`.
        """
        suspects = [stage.name for stage in stages if _has_suspects(stage)]
        if not suspects or any(_has_diverged(leaves.values()) for leaves in self.semantic.values()):
            return stages
        with self.baseline.timed("follow"):
            try:
                if self.baseline.has_chosen:
                    self._exchange_choices()
                if self.exchanged or suspects == ["steps"]:
                    stages = self._compare_again(stages, has_steps="steps" in suspects)
            except SideFailed as failed:
                self.notes.append(
                    f"decisions within rounding were not followed: the program fails with them ({failed})"
                )
                return stages
        return [self._doubt(stage) for stage in stages]

    def _compare_again(self, stages: list[Stage], *, has_steps: bool) -> list[Stage]:
        """Return the stages; a suspect leaf becomes equivalent if it agrees with runs that decide as the candidate did.

        `_is_suspect` says which leaves are suspect; the others, and those that do not agree, keep their comparison. The
        runs, of truth, reference and noise, are made here, with the stage `steps` if `has_steps`. A note says how many
        leaves were explained, and by which decisions.
        """
        signs = FollowedSigns(
            candidate=self.candidate,
            truth=self.baseline.truth or Observation(),
            runs=(self.baseline.reference, *self.baseline.noisy(1)),
        )
        yardstick = self._run_followers(signs, has_steps)
        count = 0
        results = []
        for stage in stages:
            if _has_suspects(stage):
                followed = {comparison.path: comparison for comparison in self.compare(stage.name, yardstick)}
                semantic = self.semantic.get(stage.name, {})
                comparisons = [
                    _explained(comparison, followed.get(comparison.path), semantic.get(comparison.path))
                    for comparison in stage.comparisons
                ]
                count += sum(old is not new for old, new in zip(stage.comparisons, comparisons, strict=True))
                stage = Stage.of(stage.name, tuple(comparisons), stage.reason)
            results.append(stage)
        if count:
            others = [f"{len(self.exchanged)} choices ({self.exchanged[0]})"] if self.exchanged else []
            if signs.count:
                others.append(f"the steps of {signs.count} elements whose gradient is zero but for rounding")
            self.notes.append(
                f"{count} leaves were held against a truth that decided as the candidate did where rounding decides: "
                f"{' and '.join(others) or 'nothing'} went another way"
                + ("" if others else ", but some steps were a little longer or shorter")
            )
        return results

    def _doubt(self, stage: Stage) -> Stage:
        """Return the stage; its suspect leaves become inconclusive if choices within noise may explain them.

        They may if more than `TRIED` choices are within noise, counting those that were tried too, or if any is and the
        stage is `steps`. A leaf is suspect by `_is_suspect`. It stays as it is if float64 has no answer for it, or,
        except in the stage `steps`, if its error is more than `FAR` times the allowed one.
        """
        is_open = len(self.close_rows) > TRIED or (bool(self.close_rows) and stage.name == "steps")
        if not is_open or not stage.comparisons:
            return stage
        doubt = (
            f"but {len(self.close_rows)} choices are within rounding, the closest {self.close_rows[0]}, and a correct "
            "program that makes others of them may be as far off"
        )
        semantic = self.semantic.get(stage.name, {})

        def with_doubt(comparison: Comparison) -> Comparison:
            is_too_far = stage.name != "steps" and comparison.ratio > FAR
            if not _is_suspect(comparison) or comparison.path not in semantic or is_too_far:
                return comparison
            return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=f"{comparison.reason}; {doubt}")

        return Stage.of(stage.name, tuple(map(with_doubt, stage.comparisons)), stage.reason)

    def _exchange_choices(self) -> None:
        """Find the choices within noise, try them the other way, and keep those that bring truth and candidate closer.

        Sets `close_rows`, `exchanged` and the indices that later runs are forced to choose. At most `TRIED` are tried,
        the closest ones in the program's order, each by a run of the truth's forward. After an exchange, the choices
        behind it are looked for anew. Raise SideFailed if a run fails.
        """
        truth, choices = self._run_forward(lifted=True)
        others = [self._run_forward()[1], self._run_forward(noise=Noisy(seed=self.baseline.plan.seed))[1]]
        noises = _noises(choices, others)
        self.close_rows = sorted(_close_rows(choices, noises), key=lambda close: close.margin / close.noise)
        nearest = self._distance(truth)
        # in the program's order, because an exchange may widen the margins of the choices behind it
        pending = sorted(self.close_rows[:TRIED], key=lambda close: close.position)
        for _ in range(TRIED):
            if not pending:
                break
            close = pending.pop(0)
            forced = [choice.indices for choice in choices[: close.position]]
            forced.append(choices[close.position].exchange(close.row, close.pair))
            truth, choices_of_trial = self._run_forward(DecisionReplay(forced), lifted=True)
            if (distance := self._distance(truth)) < nearest:
                nearest, choices = distance, choices_of_trial
                self.exchanged.append(close)
                pending = [other for other in pending if other.position == close.position]
                pending += [other for other in _close_rows(choices, noises) if other.position > close.position]
        self._forced = [choice.indices for choice in choices]

    def _run_forward(
        self, *modes: AbstractContextManager[object], lifted: bool = False, noise: Noisy | None = None
    ) -> tuple[Observation, list[Choice]]:
        """Run only the program's forward within these modes; return its observation and the choices it made, in order.

        Choices that a `DecisionReplay` among the modes forced are returned as forced. With `lifted` the program runs in
        float64, with `noise` its roundings are moved. Raise SideFailed if it raises.
        """
        record = DecisionRecord()
        plan = replace(self.baseline.plan, stages=("forward",))
        return self.baseline.observe(*modes, record, lifted=lifted, noise=noise, plan=plan), record.choices

    def _distance(self, truth: Observation) -> float:
        """Return how far the candidate's forward is from this truth: the sum of the squared distances of its leaves.

        The distance of a leaf is a root mean square, in units of the reference's distance from the baseline's truth.
        Leaves without such a unit do not count, nor those that are not floats of one shape on all sides. Return
        infinity if the sum is not finite.
        """
        total = 0.0
        first_truth = self.baseline.truth or truth
        for path, value in truth.stages["forward"].items():
            sides = (self.candidate, self.baseline.reference, first_truth)
            leaves = [leaf for side in sides if _is_like(leaf := side.stages["forward"].get(path), value)]
            if len(leaves) == len(sides) and is_inexact(value.dtype):
                of_candidate, of_reference, of_first_truth = leaves
                unit = spread(of_first_truth, of_reference).rms
                total += (spread(value, of_candidate).rms / unit) ** 2 if unit else 0.0
        return total if math.isfinite(total) else math.inf

    def _run_followers(self, signs: FollowedSigns, has_steps: bool) -> Yardstick[Observation]:
        """Return truth, reference and `RUNS` noisy runs, run anew with the candidate's decisions.

        Choices are forced only if some were exchanged. `signs` changes gradients before each step: the truth leads and
        the others follow. The stage `steps` is left out unless `has_steps`.
        """
        plan = self.baseline.plan
        if not has_steps:
            plan = replace(plan, stages=tuple(name for name in plan.stages if name != "steps"))

        def run(before_step: BeforeStep, *, lifted: bool = False, noise: Noisy | None = None) -> Observation:
            forced = [DecisionReplay(self._forced)] if self.exchanged else []
            return self.baseline.observe(*forced, lifted=lifted, noise=noise, plan=plan, before_step=before_step)

        truth = run(signs.lead, lifted=True)
        reference = run(signs.follow)
        noisy = [run(signs.follow, noise=Noisy(seed=plan.seed + index)) for index in range(RUNS)]
        return Yardstick(reference=reference, truth=truth, noisy=noisy)


def _noises(choices: Sequence[Choice], others: Sequence[Sequence[Choice]]) -> list[float]:
    """Return for each choice by how much other correct runs move its values; 0 if none has it in the same shape.

    `others` are the choices of these runs. A row moves by its largest difference, a choice by the median of its rows,
    and the run that moves it most counts.
    """
    noises = []
    for index, choice in enumerate(choices):
        rows = choice.rows
        runs = [run[index].rows for run in others if index < len(run)]
        # the median of the rows, because an earlier choice may have moved some of them for another reason
        moves = [
            float((run - rows).abs().amax(-1).nanmedian()) for run in runs if run.shape == rows.shape and run.numel()
        ]
        noises.append(max(moves, default=0.0))
    return noises


def _close_rows(choices: Sequence[Choice], noises: Sequence[float]) -> Iterator[_CloseRow]:
    """Yield every row of a choice whose margin is at most `CLOSE` times the choice's noise.

    `noises` has the noise of each choice. A choice with a noise of 0 has no such rows.
    """
    for position, (choice, noise) in enumerate(zip(choices, noises, strict=False)):
        margins, pairs = choice.nearest_exchanges()
        for row in (margins <= CLOSE * noise).nonzero()[:, 0].tolist() if noise > 0.0 else ():
            yield _CloseRow(position, row, pairs[row], float(margins[row]), noise, choice.operation)


def _is_suspect(comparison: Comparison) -> bool:
    """Tell whether values diverged in the native question alone: by a finite error, without a broken contract."""
    is_native = comparison.details.get("question") == "native"
    is_finite = comparison.error is not None and math.isfinite(comparison.error)
    return is_native and is_finite and comparison.verdict is Verdict.DIVERGED and not _breaks_contract(comparison)


def _breaks_contract(comparison: Comparison) -> bool:
    """Tell whether a comparison has a breach that is not excused."""
    return any(not breach.excused for breach in comparison.contract)


def _has_suspects(stage: Stage) -> bool:
    """Tell whether `_is_suspect` holds for a leaf of the stage."""
    return any(_is_suspect(comparison) for comparison in stage.comparisons)


def _has_diverged(comparisons: Iterable[Comparison]) -> bool:
    """Tell whether a comparison is DIVERGED."""
    return any(comparison.verdict is Verdict.DIVERGED for comparison in comparisons)


def _is_like(leaf: object, value: object) -> TypeGuard[torch.Tensor]:
    """Tell whether both are tensors of one shape, with values, and both real or both complex."""
    if not (isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor)) or leaf.shape != value.shape:
        return False
    return leaf.is_complex() == value.is_complex() and has_values(leaf) and has_values(value)


def _explained(comparison: Comparison, followed: Comparison | None, semantic: Comparison | None) -> Comparison:
    """Return a copy of `followed`, the comparison with the runs that followed the candidate, if it is equivalent.

    Its details say so, and have error and noise of the semantic question if `semantic` has them. Return `comparison`
    itself if it is not suspect (`_is_suspect`), or if `followed` is None or not equivalent.
    """
    if followed is None or not _is_suspect(comparison) or followed.verdict is not Verdict.EQUIVALENT:
        return comparison
    details = {**followed.details, "followed": True}
    if semantic is not None and semantic.error is not None:
        details |= {"semantic_error": semantic.error, "semantic_noise": semantic.noise or 0.0}
    return replace(followed, details=details)


# Excuse integers by their margin


@dataclass(frozen=True, kw_only=True)
class _LeafMargins:
    """The margins of one leaf in the truth, and by how much correct runs move them."""

    decided: DecisionMargins
    noise: float
    operand_noise: float = 0.0
    """By how much correct runs move the operand of the rounding that decided, if that is known."""

    @property
    def margins(self) -> torch.Tensor:
        """The margin of each element."""
        return self.decided.margins

    def margins_of(
        self, candidate: torch.Tensor, truth: torch.Tensor, reference: torch.Tensor, noisy: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return how far operands would have to move to give each of the candidate's elements.

        Without the operands, it is how far they would have to move for another value. Of an extreme that is the truth's
        in the candidate, it is the distance to the reference's. A value that another correct run has counts as near as
        any other one, because it may come from an earlier decision.
        """
        origin, rows = self.decided.origin, self.decided.rows
        if origin is None or rows is None or not self._is_current(truth):
            return self.margins
        own = origin.margins_of(candidate, truth, rows)
        if self.decided.sources:
            return own.where(candidate != truth, origin.margins_of(reference, truth, rows))
        return self.margins.where(_is_among(candidate, (truth, reference, *noisy)), own)

    def excess_of(self, candidate: torch.Tensor, runs: Sequence[torch.Tensor]) -> tuple[int, float]:
        """Return how many elements a rounding cannot have given, and how far one may be off; `runs` are correct ones.

        A rounding gives the next number, or as many more as correct runs move its operand. The first of the runs is the
        truth. Return 0 and infinity if step or operand of the rounding are not known.
        """
        step = self.decided.step
        if step is None or self.decided.operand is None or not self._is_current(runs[0]):
            return 0, math.inf
        most = step * max(1.0, math.ceil(CLOSE * self.operand_noise / step))
        distances = [(candidate.double() - run.double()).abs() for run in runs]
        nearest = torch.stack(distances).amin(0)
        if not is_inexact(candidate.dtype):
            limits = torch.iinfo(candidate.dtype)
            # the number after the largest one is the smallest one
            nearest = torch.minimum(nearest, (float(limits.max) - float(limits.min) + 1.0) - nearest)
        return int((nearest > most).sum()), most

    def _is_current(self, truth: torch.Tensor) -> bool:
        """Tell whether the truth has the values that were decided, as far as they were kept."""
        values = self.decided.values
        return values is not None and values.shape == truth.shape and bool((values == truth).all())


def _is_among(values: torch.Tensor, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a mask of the elements that one of these runs has too."""
    return torch.stack([values == run for run in runs]).any(0)


def excuse_integers(
    stages: list[Stage], baseline: Baseline, candidate: Observation, noisy: list[Observation]
) -> list[Stage]:
    """Return the stages; diverged integers and booleans become inconclusive if rounding may explain them.

    The evidence is the margin of a decision, or without one the number of elements in which correct runs differ: see
    `_excuse_leaf`. For the margins the program runs again; if that fails, the baseline gets a note. `noisy` are noisy
    runs of the reference. Without a truth the stages are returned unchanged.
    """
    return [_excuse_stage(stage, baseline, candidate, noisy) for stage in stages]


def _excuse_stage(stage: Stage, baseline: Baseline, candidate: Observation, noisy: list[Observation]) -> Stage:
    """Return the stage; diverged integers and booleans become inconclusive where `_excuse_leaf` excuses them.

    It is returned unchanged if none diverged or there is no truth. Margins are measured for the stage `forward` alone,
    by running the program again; if that fails, a note is added to the baseline, and there are no margins.
    """
    suspects = [each for each in stage.comparisons if _is_suspect_integer(each) or _differs_in_shape_alone(each)]
    if not suspects or baseline.truth is None:
        return stage
    margins: dict[str, _LeafMargins] = {}
    if stage.name == "forward" and any(map(_is_suspect_integer, suspects)):
        try:
            margins = _margins_of_outputs(baseline)
        except Exception as error:  # the program's own, because it runs on changed values
            baseline.notes.append(f"margins are not known: a noisy run of the program fails ({error})")
    sides = (baseline.truth, baseline.reference, candidate, *noisy)

    def excused(comparison: Comparison) -> Comparison:
        """Return a suspect as `_excuse_shape` or `_excuse_leaf` returns it, and any other comparison unchanged."""
        if comparison not in suspects:
            return comparison
        leaves = [as_tensor(side.stages.get(stage.name, {}).get(comparison.path)) for side in sides]
        if _differs_in_shape_alone(comparison):
            return _excuse_shape(comparison, leaves)
        return _excuse_leaf(comparison, leaves, margins.get(comparison.path))

    return Stage.of(stage.name, tuple(map(excused, stage.comparisons)), stage.reason)


def has_suspects(stages: Sequence[Stage]) -> bool:
    """Tell whether `excuse_integers` may excuse any comparison of these stages."""
    return any(
        _is_suspect_integer(comparison) or _differs_in_shape_alone(comparison)
        for stage in stages
        for comparison in stage.comparisons
    )


def _differs_in_shape_alone(comparison: Comparison) -> bool:
    """Tell whether two tensors diverged because their shapes differ, and no other clause is broken."""
    clauses = {breach.clause for breach in comparison.contract if not breach.excused}
    return comparison.verdict is Verdict.DIVERGED and clauses == {"shape"}


def _excuse_shape(comparison: Comparison, leaves: list[Any]) -> Comparison:
    """Return the comparison of two shapes, inconclusive if rounding may explain that they differ, or else unchanged.

    `leaves` are those of truth, reference, candidate and noisy runs, in this order. A shape that depends on data, such
    as that of `x[x > 1]`, differs among correct runs too. On each axis the candidate's size may be twice as far from
    the reference's as that of the correct run that is furthest away. The comparison is unchanged, too, if one of the
    first three is not a tensor, or if candidate and reference have different numbers of dimensions.
    """
    truth, reference, candidate, *noisy = leaves
    if not all(isinstance(leaf, torch.Tensor) for leaf in (truth, reference, candidate)):
        return comparison

    alike = [run for run in (truth, *noisy) if isinstance(run, torch.Tensor) and run.dim() == reference.dim()]
    among = [
        max((abs(run.shape[axis] - size) for run in alike), default=0) for axis, size in enumerate(reference.shape)
    ]
    if candidate.dim() != reference.dim() or any(
        abs(candidate.shape[axis] - size) > 2 * among[axis] for axis, size in enumerate(reference.shape)
    ):
        return comparison
    among_correct = max(among)
    reason = (
        f"{comparison.reason}; but sizes of correct runs differ by up to {among_correct} too, as rounding decides them"
    )
    return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)


def _is_suspect_integer(comparison: Comparison) -> bool:
    """Tell whether the values of integers or booleans diverged, without a broken contract."""
    dtype = comparison.dtype
    is_exact = dtype is not None and not dtype.startswith(("float", "bfloat", "complex"))
    is_measured = comparison.verdict is Verdict.DIVERGED and comparison.measurement is not None
    return is_exact and is_measured and not _breaks_contract(comparison)


def _excuse_leaf(comparison: Comparison, leaves: list[Any], known: _LeafMargins | None) -> Comparison:
    """Return the comparison of an integer leaf that diverged, inconclusive if rounding may explain it.

    `leaves` are those of truth, reference, candidate and noisy runs, in this order. It is inconclusive if the candidate
    equals the truth, and its details say so. Otherwise, with `known` margins, it is so if the largest margin of the
    elements that differ is at most `CLOSE_INTEGER` times its noise, their decisions are at most `MOST_FLIPS` times one
    more than differ between correct runs, and no rounding is off by more than noise can move it; reason and details get
    the numbers in any case. Where the operands are known, the margin is that of the candidate's own choice: how far
    they would have to move to give it. Without margins, or if they have no noise, it is so if the candidate differs
    from the truth in fewer than twice as many elements as the correct run that differs most from it. If truth and
    reference differ in shape it is unchanged.
    """
    truth, reference, candidate, *noisy = leaves
    if not isinstance(truth, torch.Tensor) or truth.shape != reference.shape:
        return comparison
    noisy = [run for run in noisy if isinstance(run, torch.Tensor) and run.shape == truth.shape]
    difference = comparison.reason.partition(",")[0]
    if torch.equal(candidate, truth):
        reason = f"{difference}, and in all of them the candidate is as the truth is"
        details = {**comparison.details, _AS_TRUTH: True}
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason, details=details)
    differs = (candidate != reference) | (candidate != truth)
    among_correct = max(int((run != truth).sum()) for run in (reference, *noisy))
    if known is not None and known.margins.shape == differs.shape:
        margins = known.margins_of(candidate, truth, reference, noisy)
        margin, noise = float(margins[differs].max()), known.noise
        details = {**comparison.details, "margin": margin, "margin_noise": noise, "decided_by": known.decided.operation}
        where = f"{difference}; {known.decided.operation} decided them by a margin of up to {margin:.3g}"
        if noise > 0.0 and margin <= CLOSE_INTEGER * noise:
            # one decision may be broadcast to many elements, and equal values have one margin
            flips = _count_decisions(known.margins, differs)
            most = max(_count_decisions(known.margins, run != truth) for run in (reference, *noisy))
            if flips > MOST_FLIPS * (most + 1):
                reason = f"{where}, but at most {among_correct} differ between correct runs of the program"
                return replace(comparison, reason=reason, details=details)
            excess, reach = known.excess_of(candidate, (truth, reference, *noisy))
            if excess:
                reason = f"{where}, but {excess} of them are off by more than {reach:.3g}: rounding moves none so far"
                return replace(comparison, reason=reason, details=details)
            reason = f"{where}, and rounding moves that margin by {noise:.3g}: either way may be right"
            return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason, details=details)
        comparison = replace(comparison, reason=f"{where}, and rounding moves it by {noise:.3g} only", details=details)
        if noise > 0.0:
            return comparison
    if 0 < int((candidate != truth).sum()) < 2 * among_correct:
        reason = f"{difference}; {among_correct} differ between correct runs of the program too"
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)
    return comparison


def _count_decisions(margins: torch.Tensor, mask: torch.Tensor) -> int:
    """Return how many decisions the elements of a mask come from at most: those of one decision share its margin."""
    return len(set(margins[mask].tolist()))


def is_as_truth(comparison: Comparison) -> bool:
    """Tell whether `excuse_integers` excused the comparison because the candidate's integers are those of the truth."""
    return bool(comparison.details.get(_AS_TRUTH))


def has_chosen_as_reference(reference: Observation, truth: Observation, candidate: Observation) -> bool:
    """Tell whether an integer output of the candidate is the reference's where the truth has another.

    Then the candidate shows that it chose as the reference did, and not as float64 does.
    """

    def shows(path: str) -> bool:
        """Tell whether the integers at a path of the forward show it; False if the three differ in shape or dtype."""
        of_reference, of_truth, own = _leaves_at("forward", path, reference, truth, candidate)
        if not (isinstance(of_reference, torch.Tensor) and not is_inexact(of_reference.dtype)):
            return False
        if not (_is_like(of_reference, of_truth) and _is_like(of_reference, own)):
            return False
        return bool(((own == of_reference) & (of_reference != of_truth)).any())

    return any(map(shows, reference.stages.get("forward", {})))


def doubt_mixture(stage: Stage, replayed: Sequence[Comparison]) -> Stage:
    """Return the stage; equivalent floats that diverge from the reference's own choices become inconclusive.

    The candidate returned the reference's indices, so its values should be those at these indices. `replayed` has the
    comparisons with a truth that chose as the reference did; in it, the values at float64's indices diverge. A stage
    without comparisons, such as one in which the candidate crashed, is returned unchanged.
    """
    if not stage.comparisons:
        return stage
    by_path = {comparison.path: comparison for comparison in replayed}

    def doubted(comparison: Comparison) -> Comparison:
        other = by_path.get(comparison.path)
        is_mixed = comparison.verdict is Verdict.EQUIVALENT and other is not None and _has_diverged([other])
        if not is_mixed or not (comparison.dtype or "").startswith(("float", "bfloat", "complex")):
            return comparison
        reason = (
            f"{comparison.reason}; but the candidate returns the reference's indices (topk, argmax, sort), and values "
            "that float64 has at other indices"
        )
        return replace(comparison, verdict=Verdict.INCONCLUSIVE, reason=reason)

    return Stage.of(stage.name, tuple(map(doubted, stage.comparisons)), stage.reason)


def settle_choices(stages: list[Stage], runs: ChoiceRuns) -> list[Stage]:
    """Return the stages; integers in which the candidate is as the truth is become equivalent where both are right.

    Both are right if the truth has the reference's integers once it makes the reference's choices where those are
    within rounding. The candidate must have the reference's integers in float64, so that it is not right by chance.
    Other comparisons keep their verdict. Unless its forward made the truth's choices in all leaves
    (`ChoiceRuns.is_consistent`), all stages are returned unchanged.
    """
    if not runs.is_consistent():
        return stages

    def settled(stage: str, comparison: Comparison) -> Comparison:
        if not is_as_truth(comparison) or not runs.is_right(stage, comparison.path):
            return comparison
        reason = f"{comparison.reason}; the reference chose otherwise within rounding"
        return replace(comparison, verdict=Verdict.EQUIVALENT, reason=reason)

    return [
        Stage.of(stage.name, tuple(settled(stage.name, each) for each in stage.comparisons), stage.reason)
        for stage in stages
    ]


@dataclass(frozen=True, kw_only=True)
class ChoiceRuns:
    """The runs by which `settle_choices` tells whose choices the candidate made."""

    reference: Observation
    truth: Observation
    replayed: Observation
    """The truth with the reference's choices where those are within rounding."""
    candidate: Observation
    lifted: tuple[Observation, Observation]
    """Reference and candidate in float64."""
    unit: float
    """The unit of rounding of the program's dtype."""

    def is_right(self, stage: str, path: str) -> bool:
        """Tell whether the replayed truth has the reference's integers at a path, and both sides agree in float64."""
        return _is_same(*_leaves_at(stage, path, self.reference, self.replayed)) and _is_same(
            *_leaves_at(stage, path, *self.lifted)
        )

    def is_consistent(self) -> bool:
        """Tell whether the candidate made the truth's choices in every leaf of the forward that depends on them.

        A leaf depends on them where truth and replayed truth differ by more than rounding. There, integers must be
        those of the truth, and floats must be nearer to the truth than to the replayed one: a candidate that mixes both
        may send a token to one expert twice.
        """
        return all(self._has_chosen_as_truth(path) for path in self.replayed.stages.get("forward", {}))

    def _has_chosen_as_truth(self, path: str) -> bool:
        """Tell whether the candidate's leaf at a path of the forward has the truth's choices.

        True, whatever the candidate has, if truth and replayed truth are the same there, or the replayed leaf is not a
        tensor with values. Otherwise False if the leaf is missing or `_is_like` no other on a side. Only elements in
        which truth and replayed truth differ, floats by more than rounding, are looked at.
        """
        truth, replayed, candidate = _leaves_at("forward", path, self.truth, self.replayed, self.candidate)
        if not isinstance(replayed, torch.Tensor) or not has_values(replayed) or _is_same(truth, replayed):
            return True
        if not (_is_like(truth, replayed) and _is_like(candidate, replayed)):
            return False
        if not is_inexact(replayed.dtype):
            depends = truth != replayed
            return torch.equal(candidate[depends], truth[depends])
        depends = (truth - replayed).abs() > NEAR * self.unit * torch.maximum(truth.abs(), replayed.abs())
        own = candidate.to(truth.dtype)
        return bool(((own - truth).abs() < (own - replayed).abs())[depends].all())


def _leaves_at(stage: str, path: str, *runs: Observation) -> tuple[Any, ...]:
    """Return the leaf of each run at a path of a stage, as a tensor if it is a number, or None if a run has none."""
    return tuple(as_tensor(run.stages.get(stage, {}).get(path)) for run in runs)


def _is_same(first: object, second: object) -> bool:
    """Tell whether both are tensors with the same shape and values, and `_is_like` each other."""
    return _is_like(first, second) and isinstance(second, torch.Tensor) and torch.equal(first, second)


def _margins_of_outputs(baseline: Baseline) -> dict[str, _LeafMargins]:
    """Run the forward in float64, natively and with noise; return the margins of its decided outputs, by path.

    Outputs of which no deciding operation is known are left out. The margins are those in float64; their noise is the
    largest change of one in the other two runs, or 0 if those have none. Raise what the program raises.
    """
    in_truth, *in_others = MarginWatch(), MarginWatch(), MarginWatch()
    # not `observe`: a watch knows the output tensors themselves, not copies of them
    truth = baseline.outputs(in_truth, lifted=True)
    others = [
        baseline.outputs(in_others[0]),
        baseline.outputs(in_others[1], noise=Noisy(seed=baseline.plan.seed)),
    ]
    known = {}
    for path, value in truth.items():
        of_truth = in_truth.decided_of(value) if isinstance(value, torch.Tensor) else None
        if of_truth is None:
            continue
        outputs_of_others = [outputs.get(path) for outputs in others]
        of_others = [
            other
            for watch, output in zip(in_others, outputs_of_others, strict=True)
            if isinstance(output, torch.Tensor) and (other := watch.decided_of(output)) is not None
        ]
        known[path] = _LeafMargins(
            decided=of_truth,
            noise=_largest_move(of_truth.measures, [other.measures for other in of_others]),
            operand_noise=_largest_move([of_truth.operand], [[other.operand] for other in of_others]),
        )
    return known


def _largest_move(of_truth: Sequence[torch.Tensor | None], of_others: Sequence[Sequence[torch.Tensor | None]]) -> float:
    """Return the largest difference of an element from the truth in another run; 0 if no tensor has the same shape."""
    moves = [
        float(torch.nan_to_num(other.double() - own.double()).abs().max())
        for run in of_others
        for own, other in zip(of_truth, run, strict=False)
        if own is not None and other is not None and other.shape == own.shape and own.numel()
    ]
    return max(moves, default=0.0)


# Settle gradients within noise of zero: an optimizer that divides a gradient by its size steps by the sign alone

_FEW = 4.0
"""A step in the other direction takes an element twice as far as a step does, and the slack is the same again."""
_STEPPED = re.compile(r"steps\[(?P<step>\d+)\]\.parameters(?P<name>\[.*\])")


@dataclass
class SignFlips:
    """Flips the signs of undecided gradients before a step, as another correct program might have."""

    reference: Observation
    truth: Observation | None
    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Set the generator of random signs, by the seed."""
        self.generator = torch.Generator().manual_seed(self.seed)

    def flip(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Multiply each undecided element of the gradients by a random 1 or −1, in place.

        `gradients` has them by parameter name. An element is undecided if the truth's gradient of that step is within
        noise of zero. Nothing changes without a truth, nor in a gradient that truth or reference lack or that has
        another shape in the truth.
        """
        if self.truth is None:
            return
        for name, gradient in gradients.items():
            of_truth, of_reference = (_gradient(side, step, f"[{name!r}]") for side in (self.truth, self.reference))
            parts = _real_parts(gradient)
            if of_truth is None or of_reference is None or of_truth.shape != parts.shape:
                continue
            signs = torch.randint(0, 2, parts.shape, generator=self.generator).to(parts.device) * 2 - 1
            near = is_near_zero(of_truth, (of_reference, parts))
            with torch.no_grad():
                gradient.copy_(_of_parts(torch.where(near, parts * signs, parts), gradient))


@dataclass(kw_only=True)
class FollowedSigns:
    """Gives the undecided elements of each step the candidate's gradients, so that a run stays on its trajectory.

    One element that is stepped the other way moves all later gradients by far more than rounding does.
    """

    candidate: Observation
    truth: Observation
    runs: Sequence[Observation]
    """Correct runs, for the noise of the first step: later steps may have gone other ways."""
    undecided: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """The undecided elements, by step and parameter, as the truth that follows had them."""
    count: int = 0
    """Elements whose step the candidate took the other way."""

    def lead(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace undecided elements of the truth's gradients in a step by the candidate's, and remember them.

        `gradients` has the truth's gradients by parameter name, and is changed in place. An element is undecided if
        truth and candidate are near zero there by the noise of the first step, and differ. `undecided` gets a mask for
        each parameter whose gradients are known, and `count` grows by the undecided elements of another sign.
        """
        for name, gradient in gradients.items():
            key = f"[{name!r}]"
            of_truth, *of_runs = (_gradient(side, 0, key) for side in (self.truth, *self.runs))
            of_candidate = _gradient(self.candidate, step, key)
            parts = _real_parts(gradient)
            runs = [run for run in of_runs if run is not None and run.shape == parts.shape]
            if of_truth is None or of_candidate is None or not runs or of_candidate.shape != parts.shape:
                continue
            edge = CLOSE * _noise(of_truth, runs)
            near = (parts.abs() <= edge) & (of_candidate.abs() <= 2.0 * edge) & (of_candidate != parts)
            self.undecided[step, name] = near
            self.count += int((near & (of_candidate.sign() != parts.sign())).sum())
        self.follow(step, gradients)

    def follow(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Put the candidate's gradients in place of the elements that `lead` found undecided at this step.

        `gradients` has the gradients of a run by parameter name, and is changed in place. A parameter without a mask
        from `lead` is left as it is.
        """
        for name, gradient in gradients.items():
            near, of_candidate = self.undecided.get((step, name)), _gradient(self.candidate, step, f"[{name!r}]")
            if near is not None and of_candidate is not None:
                with torch.no_grad():
                    parts = _real_parts(gradient)
                    gradient.copy_(_of_parts(torch.where(near, of_candidate.to(parts.dtype), parts), gradient))


def is_near_zero(truth: torch.Tensor, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a mask of the elements of a gradient at which the truth is within noise of zero.

    That is at most `CLOSE` times the noise of the element's block, which is how far these `runs` are from the truth.
    Elements that are 0 in the truth and in every run are not in the mask.
    """
    if not truth.numel():
        return torch.zeros_like(truth, dtype=torch.bool)
    near = truth.detach().double().abs() <= CLOSE * _noise(truth, runs)
    # an element that is zero in every run is decided
    return near & torch.stack([run != 0 for run in (truth, *runs)]).any(0)


def _noise(truth: torch.Tensor, runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return for each element the noise of its block: the largest root mean square of run − truth among these runs.

    It is a float64 tensor of the truth's shape. A difference of NaN counts as 0.
    """
    length = max(block_length(truth.shape), 1)
    wide = truth.detach().double()
    noise = torch.zeros(wide.numel() // length, 1, dtype=torch.float64, device=truth.device)
    for run in runs:
        error = torch.nan_to_num(run.detach().double() - wide).reshape(-1, length)
        noise = torch.maximum(noise, error.square().mean(-1, keepdim=True).sqrt())
    return noise.expand(-1, length).reshape(truth.shape)


def settle_steps(
    sides: Sequence[Leaves], truth: Observation, runs: Sequence[Observation], reach: Callable[[str], float]
) -> tuple[list[Leaves], dict[str, int]]:
    """Return the sides with the truth's values at undecided elements of parameters, and how many there are by path.

    Each side has its leaves of the stage `steps`; the sides are copied, not changed. An element is undecided if the
    truth's gradient of a step is within noise of zero, by the differences between truth and the correct `runs`; it then
    stays undecided in all later steps. An undecided element further from the truth than `reach` says of its path stays
    as it is, but is counted. Leaves that are not parameters stay. Paths without undecided elements have no number.
    """
    counts: dict[str, int] = {}
    settled = [dict(leaves) for leaves in sides]
    undecided: dict[str, torch.Tensor] = {}
    for path, value in truth.stages["steps"].items():
        match = _STEPPED.fullmatch(path)
        if match is None or not isinstance(value, torch.Tensor):
            continue
        name, step = match["name"], int(match["step"])
        known = [_gradient(side, step, name) for side in (truth, *runs)]
        shape = _real_parts(value).shape
        gradients = [gradient for gradient in known if gradient is not None and gradient.shape == shape]
        if len(gradients) < 2:
            continue
        near = is_near_zero(gradients[0], gradients[1:])
        # a step in doubt leaves every later value of the parameter in doubt
        undecided[name] = near | undecided[name] if name in undecided else near
        if undecided[name].any():
            counts[path] = int(undecided[name].sum())
            for leaves in settled:
                if path in leaves:
                    leaves[path] = _with_truth(leaves[path], value, undecided[name], reach(path))
    return settled, counts


def reach_of_steps(starts: Mapping[str, torch.Tensor], runs: Sequence[Observation]) -> Callable[[str], float]:
    """Return a function from the path of a stepped parameter to how far a step in another direction may take it.

    That is a few times the largest distance of one of its elements from `starts`, the initial parameters, in any of
    these correct runs. It is infinite if the start is unknown, or if no run has the parameter in the start's shape.
    """

    def reach(path: str) -> float:
        """Return how far a step in another direction may take the parameter at a path."""
        match = _STEPPED.fullmatch(path)
        start = starts.get(ast.literal_eval(match["name"])[0]) if match else None
        values = [run.stages.get("steps", {}).get(path) for run in runs]
        distances = [
            float((_real_parts(value).double() - _real_parts(start).double()).abs().max())
            for value in values
            if start is not None and isinstance(value, torch.Tensor) and value.shape == start.shape and value.numel()
        ]
        return _FEW * max(distances, default=math.inf)

    return reach


def with_count(comparison: Comparison, counts: Mapping[str, int]) -> Comparison:
    """Return the comparison with the number of its undecided elements, of `settle_steps`, in its reason and details.

    `counts` has the numbers by path; a comparison whose path it lacks is returned unchanged.
    """
    if comparison.path not in counts:
        return comparison
    count = counts[comparison.path]
    reason = f"{comparison.reason}, but for {count} elements whose gradient is within noise of zero"
    return replace(comparison, reason=reason, details={**comparison.details, "undecided": count})


def _with_truth(leaf: object, truth: torch.Tensor, where: torch.Tensor, reach: float) -> object:
    """Return a copy of a tensor with the truth's elements where the mask `where` is set and the truth is near.

    Near is a distance of at most `reach` and a few roundings. Of complex tensors the real and imaginary parts are
    elements of their own. The copy has the tensor's dtype and `requires_grad`. A leaf that is not a tensor of the
    truth's shape, or is complex where the truth is not, is returned itself.
    """
    if not isinstance(leaf, torch.Tensor) or _real_parts(leaf).shape != _real_parts(truth).shape:
        return leaf
    settled = torch.empty_like(leaf, memory_format=torch.preserve_format)
    with torch.no_grad():
        parts, wide = _real_parts(leaf), _real_parts(truth).double()
        rounding = _FEW * unit_roundoff(leaf.dtype) * wide.abs()
        is_reached = (parts.double() - wide).abs() <= reach + rounding
        settled.copy_(_of_parts(torch.where(where & is_reached, wide.to(parts.dtype), parts), leaf))
    return settled.requires_grad_(leaf.requires_grad)


def _real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of floats, detached; of a complex one, the real and imaginary parts along one more dimension.

    An optimizer steps by the two apart, so each of them is decided by itself.
    """
    detached = tensor.detach()
    return torch.view_as_real(detached.resolve_conj()) if detached.is_complex() else detached


def _of_parts(parts: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what has these `_real_parts`: a complex tensor if `tensor` is one, or else `parts` themselves."""
    return torch.view_as_complex(parts.contiguous()) if tensor.is_complex() else parts


def _gradient(side: Observation, step: int, name: str) -> torch.Tensor | None:
    """Return the `_real_parts` of the gradient that a step took; None if it was not recorded or is not a tensor.

    Steps count from 0. `name` is the parameter's in brackets and quotes, such as `['weight']`. If the stage `steps` has
    none for step 0, it is that of the stage `gradients`.
    """
    gradient = side.stages.get("steps", {}).get(f"steps[{step}].gradients{name}")
    if gradient is None and step == 0:
        gradient = side.stages.get("gradients", {}).get(f"parameters{name}.grad")
    return _real_parts(gradient) if isinstance(gradient, torch.Tensor) else None
