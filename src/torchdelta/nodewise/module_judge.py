"""Judge one call of a candidate's module, fed what the reference's module was given.

Most modules of a correct implementation give the very same bits, and nothing more is run for those. For the others the
reference's module is run in float64 and with its roundings moved, and the candidate's in float64 too, where what
differs is not rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, brief
from torchdelta.compare.policy import Bitwise, Policy
from torchdelta.compare.semantic import KEPT_IN_FLOAT32, Semantic
from torchdelta.nodewise.module_runs import Mode, ModuleInputs, ModuleResult, Runner, both, lifted, noisy
from torchdelta.records.case import IGNORABLE
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict

RUNS = 3
"""Noisy runs where something is near the threshold."""
NEAR, FAR = 0.5, 8.0
Judged = tuple[tuple[Comparison, ...], tuple[Comparison, ...]]
"""What was found of the outputs, and of the gradients."""


@dataclass(frozen=True, kw_only=True)
class ModuleJudgement:
    """What a module does by itself, or why that is not known."""

    local: tuple[Comparison, ...] = ()
    gradients: tuple[Comparison, ...] = ()
    reason: str = ""


@dataclass(kw_only=True)
class ModuleJudge:
    """Judges call after call by one policy."""

    policy: Policy
    runner: Runner
    notes: dict[str, None] = field(default_factory=dict)

    def judge(
        self,
        reference: torch.nn.Module,
        candidate: torch.nn.Module,
        inputs: ModuleInputs,
        recorded: ModuleResult,
        *,
        is_brief: bool = False,
    ) -> ModuleJudgement:
        """Run the candidate's module on the reference's inputs; `recorded` is what the reference's module left.

        A brief look takes one noisy run and does not ask float64: of a module in which the culprit was found already.
        """
        try:
            found = self.runner.run(candidate, inputs)
        except Exception as error:
            return ModuleJudgement(reason=raised(error))
        gradients: Leaves = {}
        if self.runner.gradients:
            again = self.runner.run(reference, inputs)
            if not _are_same(recorded.outputs, again.outputs):
                return ModuleJudgement(reason="the reference's module gives other values when it is called once more")
            gradients = again.gradients
        whole = replace(recorded, gradients=gradients)
        sides = self._common(whole, found)
        judged = _compared(Judge(policy=self.policy), sides, None, [])
        if self.policy.needs_truth and any(seen.verdict is not Verdict.EQUIVALENT for part in judged for seen in part):
            judged = self._judge_closely(reference, candidate, inputs, whole, found, is_brief)
        return ModuleJudgement(local=judged[0], gradients=judged[1])

    def _judge_closely(
        self,
        reference: torch.nn.Module,
        candidate: torch.nn.Module,
        inputs: ModuleInputs,
        whole: ModuleResult,
        found: ModuleResult,
        is_brief: bool,
    ) -> Judged:
        name = type(reference).__name__
        sides = self._common(whole, found)
        truth = self._tried(reference, inputs, lifted(reference), f"{name} does not run in float64", widened=True)
        runs = self._noisy(reference, inputs, 1)
        judge = Judge(policy=self.policy)
        judged = _compared(judge, sides, truth, runs)
        if is_brief:
            return judged
        if runs and any(NEAR < seen.ratio < FAR for part in judged for seen in part if seen.noise is not None):
            runs = self._noisy(reference, inputs, RUNS)
            judged = _compared(judge, sides, truth, runs)
        judged = _excused(judged, sides, (*runs, *([truth] if truth else [])))
        if truth is None:
            return judged
        wide = self._tried(candidate, inputs, lifted(reference), "", widened=True)
        return judged if wide is None else self._ask_float64(judged, reference, inputs, truth, wide, runs)

    def _ask_float64(
        self,
        judged: Judged,
        reference: torch.nn.Module,
        inputs: ModuleInputs,
        truth: ModuleResult,
        wide: ModuleResult,
        runs: Sequence[ModuleResult],
    ) -> Judged:
        """Add what float64 tells; a divergence only if noise in float64 itself does not explain it."""
        judge = Judge(policy=Semantic(KEPT_IN_FLOAT32), terms=Terms(ignore=frozenset(IGNORABLE)))
        sides = self._common(truth, wide)
        told = _compared(judge, sides, truth, runs)
        if not any(seen.verdict is Verdict.DIVERGED for part in told for seen in part):
            return judged
        mode = both(lifted(reference), noisy(self.runner.seed))
        confirming = self._tried(reference, inputs, mode, "", widened=True)
        if confirming is not None:
            told = _compared(judge, sides, truth, [confirming])
        return _told(judged[0], told[0]), _told(judged[1], told[1])

    def _noisy(self, module: torch.nn.Module, inputs: ModuleInputs, count: int) -> list[ModuleResult]:
        why = f"the noise of {type(module).__name__} is not known"
        runs = [self._tried(module, inputs, noisy(self.runner.seed + index), why) for index in range(count)]
        return [run for run in runs if run is not None]

    def _tried(
        self, module: torch.nn.Module, inputs: ModuleInputs, mode: Mode, why: str, *, widened: bool = False
    ) -> ModuleResult | None:
        try:
            return self.runner.run_copy(module, inputs, mode, widened=widened)
        except Exception as error:
            if why:
                self.notes[brief(f"{why} ({type(error).__name__}: {error})")] = None
            return None

    def _common(self, reference: ModuleResult, candidate: ModuleResult) -> tuple[ModuleResult, ModuleResult]:
        """Return both sides without the gradients of parameters that only one has a name for."""
        names = [{path for path in side.gradients if path.startswith("parameters")} for side in (reference, candidate)]
        alone = names[0] ^ names[1]
        if alone:
            self.notes["gradients of parameters that have a name on one side only were not compared"] = None
        changed = reference.changed | candidate.changed
        first, second = (
            replace(
                side,
                changed=changed,
                gradients={path: leaf for path, leaf in side.gradients.items() if path not in alone},
            )
            for side in (reference, candidate)
        )
        return first, second


def raised(error: Exception) -> str:
    """Say that a module raised."""
    return brief(f"fed the reference's inputs it raised {type(error).__name__}: {error}")


def _compared(
    judge: Judge, sides: tuple[ModuleResult, ModuleResult], truth: ModuleResult | None, runs: Sequence[ModuleResult]
) -> Judged:
    reference, candidate = sides
    changed = reference.changed
    forward, _ = judge.compare(
        reference.forward(changed),
        candidate.forward(changed),
        truth.forward(changed) if truth else None,
        noisy=[run.forward(changed) for run in runs],
    )
    gradients, _ = judge.compare(
        reference.gradients,
        candidate.gradients,
        truth.gradients if truth else None,
        noisy=[run.gradients for run in runs],
    )
    return tuple(forward), tuple(gradients)


def _excused(judged: Judged, sides: tuple[ModuleResult, ModuleResult], others: Sequence[ModuleResult]) -> Judged:
    """Leave integers undecided that rounding alone changes: they were decided by a margin within noise."""
    reference = sides[0]
    leaves = reference.forward(reference.changed)

    def excused(seen: Comparison) -> Comparison:
        leaf = leaves.get(seen.path)
        is_exact = isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
        if seen.verdict is not Verdict.DIVERGED or not is_exact or any(not breach.excused for breach in seen.contract):
            return seen
        if all(_are_same({"": leaf}, {"": run.forward(reference.changed).get(seen.path)}) for run in others):
            return seen
        reason = f"rounding alone changes some of these in the reference; {seen.reason}"
        return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)

    return tuple(excused(seen) for seen in judged[0]), judged[1]


def _told(native: Sequence[Comparison], lifted: Sequence[Comparison]) -> tuple[Comparison, ...]:
    wide = {seen.path: seen for seen in lifted if seen.verdict is Verdict.DIVERGED and seen.measurement is not None}

    def told(seen: Comparison) -> Comparison:
        other = wide.get(seen.path)
        if other is None or seen.verdict is Verdict.DIVERGED or other.dtype not in ("float64", "complex128"):
            return seen
        return replace(
            seen,
            verdict=Verdict.DIVERGED,
            reason=other.reason,
            error=other.error,
            noise=other.noise,
            allowed=other.allowed,
            details={**seen.details, "question": "semantic"},
        )

    return tuple(told(seen) for seen in native)


def _are_same(first: Leaves, second: Leaves) -> bool:
    comparisons, _ = Judge(policy=Bitwise(), terms=Terms(ignore=frozenset(IGNORABLE) - {"integers"})).compare(
        first, second
    )
    return all(seen.verdict is not Verdict.DIVERGED for seen in comparisons)
