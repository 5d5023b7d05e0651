"""Judge one call of a candidate's module on the inputs that the reference's module was called with.

Most modules of a correct implementation give the same bits, and nothing more is run for them. The others go through
the steps of `compare.protocol`: the reference's module is run in float64 and with noise, and both modules in float64.
Start with `ModuleJudge.judge`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, brief
from torchdelta.compare.policy import Bitwise, Policy
from torchdelta.compare.protocol import (
    Answers,
    JudgingSteps,
    Yardstick,
    answer_in_float64,
    as_answered,
    excuse_integer,
    has_diverged,
    select_answers,
)
from torchdelta.compare.semantic import KEPT_IN_FLOAT32, Semantic
from torchdelta.nodewise.module_runs import Mode, ModuleInputs, ModuleResult, Runner, both, lifted, noisy
from torchdelta.records.case import IGNORABLE
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

_FORWARD, _GRADIENTS = "forward", "gradients"


@dataclass(frozen=True, kw_only=True)
class ModuleJudgement:
    """The comparisons of a module by itself, or the reason why there are none."""

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
        """Run the candidate's module on the reference's inputs; return its comparisons with the `recorded` result.

        They are those of outputs, changed inputs and, if the runner takes them, gradients. The reference's module is
        run again for gradients, or if the outputs have other bits. The judgement has a reason instead if the
        candidate's module raises, or if the reference's, run again, raises or gives other outputs. With `is_brief` one
        noisy run is taken, and both modules are not compared in float64.
        """
        try:
            result = self.runner.run(candidate, inputs)
        except Exception as error:
            return ModuleJudgement(reason=raised(error))
        # a module that reads the state of its earlier calls differs from one that was not called before
        if self.runner.gradients or not _are_same(recorded.outputs, result.outputs):
            try:
                second = self.runner.run(reference, inputs)
            except Exception as error:  # such as a cache of fixed length that is full by now
                return ModuleJudgement(reason=f"the reference's module cannot be called once more: {raised(error)}")
            if not _are_same(recorded.outputs, second.outputs):
                return ModuleJudgement(reason="the reference's module gives other values when it is called once more")
            recorded = replace(recorded, gradients=second.gradients)
        sides = self.common(recorded, result)
        judging = ModuleJudging(
            settings=self,
            modules=(reference, candidate),
            inputs=inputs,
            sides=sides,
            is_brief=is_brief,
        )
        stages = {stage.name: stage.comparisons for stage in judging.judge()}
        return ModuleJudgement(local=stages[_FORWARD], gradients=stages[_GRADIENTS])

    def common(self, reference: ModuleResult, candidate: ModuleResult) -> tuple[ModuleResult, ModuleResult]:
        """Return both results without the gradients of parameters that only one side has, and with the same `changed`.

        The latter has the inputs that either side changed. If gradients are left out, a note is added.
        """
        names = [{path for path in side.gradients if path.startswith("parameters")} for side in (reference, candidate)]
        unshared = names[0] ^ names[1]
        if unshared:
            self.notes["gradients of parameters that have a name on one side only were not compared"] = None
        changed = reference.changed | candidate.changed
        first, second = (
            replace(
                side,
                changed=changed,
                gradients={path: leaf for path, leaf in side.gradients.items() if path not in unshared},
            )
            for side in (reference, candidate)
        )
        return first, second

    def run_copy(
        self, module: torch.nn.Module, inputs: ModuleInputs, mode: Mode, note: str, *, widened: bool = False
    ) -> ModuleResult | None:
        """Return the result of a copy of the module within a mode, or None if it raises; then `note` is added.

        An empty note is not added. With `widened` the copies of the module and its inputs are in float64.
        """
        try:
            return self.runner.run_copy(module, inputs, mode, widened=widened)
        except Exception as error:
            if note:
                self.notes[brief(f"{note} ({type(error).__name__}: {error})")] = None
            return None


@dataclass(kw_only=True)
class ModuleJudging(JudgingSteps[ModuleResult]):
    """One call of a module that is being judged."""

    settings: ModuleJudge
    modules: tuple[torch.nn.Module, torch.nn.Module]
    inputs: ModuleInputs
    sides: tuple[ModuleResult, ModuleResult]
    is_brief: bool = False

    names = (_FORWARD, _GRADIENTS)

    @property
    def reference(self) -> ModuleResult:
        """The result of the reference's module."""
        return self.sides[0]

    def judge_by_bits(self) -> list[Stage] | None:
        """Compare without truth and noise; return the stages, or None if truth and noise are needed.

        They are not needed if every comparison is EQUIVALENT, or if the policy does without.
        """
        stages = self.compare_stages(Yardstick(reference=self.reference))
        are_same = all(each.verdict is Verdict.EQUIVALENT for stage in stages for each in stage.comparisons)
        return stages if are_same or not self.settings.policy.needs_truth else None

    def truth(self) -> ModuleResult | None:
        """Return the result of the reference's module in float64, or None if it raises; then a note is added."""
        return self._run(lifted(self._module), f"{self._name} does not run in float64", widened=True)

    def noisy(self, count: int) -> list[ModuleResult]:
        """Return the results of `count` noisy runs of the reference's module, without those that failed.

        A failed run adds a note.
        """
        seed, note = self.settings.runner.seed, f"the noise of {self._name} is not known"
        runs = [self._run(noisy(seed + index), note) for index in range(count)]
        return [run for run in runs if run is not None]

    def compare(self, stage: str, yardstick: Yardstick[ModuleResult]) -> Sequence[Comparison]:
        """Return the comparisons of a stage: of outputs and changed inputs for `forward`, else of gradients."""
        return _compare(Judge(policy=self.settings.policy), stage, self.sides[1], yardstick)

    def excuse_integers(self, stages: list[Stage], yardstick: Yardstick[ModuleResult]) -> list[Stage]:
        """Return the stages; diverged integer outputs become INCONCLUSIVE if correct runs differ in them at all.

        The correct runs are the noisy ones and the truth. Changed inputs count as outputs. Gradients, and outputs that
        break the contract without an excuse, stay as they are.
        """
        leaves = _leaves(_FORWARD, self.reference, self.reference)
        runs = [run for run in (*yardstick.noisy, yardstick.truth) if run is not None]
        others = [_leaves(_FORWARD, run, self.reference) for run in runs]

        def excuse(comparison: Comparison) -> Comparison:
            path = comparison.path
            if any(not breach.excused for breach in comparison.contract):
                return comparison
            correct = (run.get(path) for run in others)
            return excuse_integer(comparison, leaves.get(path), correct, times=math.inf, other_shape=1)

        forward, gradients = stages
        return [Stage.of(_FORWARD, tuple(map(excuse, forward.comparisons))), gradients]

    def ask_in_float64(self, stages: list[Stage], yardstick: Yardstick[ModuleResult]) -> list[Stage]:
        """Compare both modules in float64, and return the stages; a leaf that diverges there becomes DIVERGED.

        Without a truth, or if the candidate's module raises in float64, return the stages unchanged. A leaf that has
        diverged already keeps its comparison.
        """
        if yardstick.truth is None:
            return stages
        candidate = self._run(lifted(self._module), "", module=self.modules[1], widened=True)
        if candidate is None:
            return stages
        sides = self.settings.common(yardstick.truth, candidate)
        judge = Judge(policy=Semantic(KEPT_IN_FLOAT32), terms=Terms(ignore=frozenset(IGNORABLE)))

        def compare(yardstick: Yardstick[ModuleResult]) -> Answers:
            return {name: select_answers(_compare(judge, name, sides[1], yardstick)) for name in self.names}

        def in_float64() -> Yardstick[ModuleResult] | None:
            run = self._run(both(lifted(self._module), noisy(self.settings.runner.seed)), "", widened=True)
            return None if run is None else replace(native, noisy=[run])

        native = replace(yardstick, reference=sides[0])
        answers = answer_in_float64(compare, native, in_float64)
        return [_with_answers(stage, answers) for stage in stages] if has_diverged(answers) else stages

    @property
    def _module(self) -> torch.nn.Module:
        """The reference's module."""
        return self.modules[0]

    @property
    def _name(self) -> str:
        """The name of the class of the reference's module."""
        return type(self._module).__name__

    def _run(
        self, mode: Mode, note: str, *, module: torch.nn.Module | None = None, widened: bool = False
    ) -> ModuleResult | None:
        """Return the result of a copy of a module, the reference's by default, or None if it raises.

        If it raises, `note` is added to the notes, unless it is empty.
        """
        return self.settings.run_copy(module or self._module, self.inputs, mode, note, widened=widened)


def raised(error: Exception) -> str:
    """Return the reason of a judgement whose module raised `error` on the reference's inputs, as one short line."""
    return brief(f"fed the reference's inputs it raised {type(error).__name__}: {error}")


def _leaves(stage: str, result: ModuleResult, reference: ModuleResult) -> Leaves:
    """Return the leaves of a result: for the stage `forward` its outputs and some inputs, or else its gradients.

    The inputs are those that `reference` has as `changed`.
    """
    return result.forward(reference.changed) if stage == _FORWARD else result.gradients


def _compare(
    judge: Judge, stage: str, candidate: ModuleResult, yardstick: Yardstick[ModuleResult]
) -> Sequence[Comparison]:
    """Return the comparisons of the candidate's leaves of one stage with those of the yardstick.

    The leaves of the stage `forward` are the outputs, and the inputs that the yardstick's reference has as `changed`;
    those of `gradients` are the gradients.
    """
    reference, truth = yardstick.reference, yardstick.truth
    comparisons, _ = judge.compare(
        _leaves(stage, reference, reference),
        _leaves(stage, candidate, reference),
        _leaves(stage, truth, reference) if truth else None,
        noisy=[_leaves(stage, run, reference) for run in yardstick.noisy],
    )
    return comparisons


def _with_answers(stage: Stage, answers: Answers) -> Stage:
    """Return the stage; a leaf that diverges in float64 becomes DIVERGED, with the reason and numbers of the answer.

    `answers` has the comparisons in float64, by stage and path. A leaf stays as it is if it has diverged already, if it
    has no answer, or if nothing could be measured.
    """

    def answered(comparison: Comparison) -> Comparison:
        answer = answers[stage.name].get(comparison.path)
        if answer is None or answer.verdict is not Verdict.DIVERGED or answer.measurement is None:
            return comparison
        return comparison if comparison.verdict is Verdict.DIVERGED else as_answered(comparison, answer)

    return Stage.of(stage.name, tuple(map(answered, stage.comparisons)))


def _are_same(first: Leaves, second: Leaves) -> bool:
    """Tell whether two sets have the same leaves, with the same shapes and bits.

    Other dtypes, strides, devices, orders of keys, and another `requires_grad` do not count, nor do leaves that cannot
    be compared.
    """
    terms = Terms(ignore=frozenset(IGNORABLE) - {"integers"})
    comparisons, _ = Judge(policy=Bitwise(), terms=terms).compare(first, second)
    return all(comparison.verdict is not Verdict.DIVERGED for comparison in comparisons)
