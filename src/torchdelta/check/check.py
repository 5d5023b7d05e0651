"""Does it still compute the same thing? The candidate is run and held against the baseline, then the judge speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchdelta._torch.process import runtime, versions
from torchdelta.check import casts, decisions, semantic, steadiness
from torchdelta.check.baseline import Baseline
from torchdelta.check.candidate import CandidateRun, run_candidate
from torchdelta.check.decisions import settle_steps, with_count
from torchdelta.check.pairing import differing, paired
from torchdelta.check.quantized_layers import LayerwiseCheck
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.policy import Policy
from torchdelta.program.memory import living_set_aside, peak_bytes
from torchdelta.program.sides import Side
from torchdelta.program.stages import Observation
from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison, Unmatched
from torchdelta.records.report import Cost, Questions, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform

NEAR = 0.5
"""A tensor whose error is at least this share of what is allowed is near the threshold."""
FAR = 8.0
"""One whose error is this many times of what is allowed needs no second look."""
RUNS = 3
"""Noisy runs for tensors near the threshold."""


@dataclass(kw_only=True)
class Check:
    """One case with everything that its words stand for; `run` answers it."""

    case: Case
    baseline: Baseline
    transform: Transform
    policy: Policy
    stages_by_default: bool
    """True where the user named no stages: one that does not apply is then left out, and noted."""
    notes: list[str] = field(default_factory=list)
    candidate: CandidateRun = field(default_factory=CandidateRun)

    def run(self) -> Report:
        """Answer; raise for what is the user's or the machine's fault, and report what is the candidate's."""
        versions.require_supported()
        if self.case.deterministic:
            self.notes.append(
                "both sides ran with deterministic algorithms, which change generated code and fill empty memory: "
                "this is not the native run"
            )
        with runtime.preserved(), living_set_aside():
            return self._report()

    def _report(self) -> Report:
        baseline, reference = self.baseline, self.baseline.reference
        self.layered = LayerwiseCheck.of(self.transform, self.policy, self.case.seed, self._ask)
        with baseline.timed("candidate"):
            self.candidate = run_candidate(
                self.layered.transform,
                Side.copied_from(baseline.program, with_callable=self.transform.traits.reads_program),
                baseline.plan,
                original=baseline.original,
                scope=baseline.scope,
                draws_random=reference.draws_random,
            )
        has_truth = bool(self._policy.needs_truth and self.candidate.observation.stages and baseline.truth)
        unasked = "" if has_truth else f"not asked: {self._why_no_truth()}"
        lifted = self._run_lifted() if has_truth else semantic.LiftedRun(asked=unasked)
        noisy = self._noisy(1) if has_truth and differing(reference, self.candidate.observation) else []
        with baseline.timed("comparison"):
            stages, unmatched = self._judge(noisy)
            if noisy and any(_is_near(seen) for stage in stages for seen in stage.comparisons):
                stages = self._look_again(stages)
            is_coarse = any(steadiness.is_coarse(seen) for stage in stages for seen in stage.comparisons)
            if is_coarse and baseline.has_chosen and self.transform.traits.lowered_to is None:
                stages = self._replay(stages)
            stages = decisions.excuse_integers(stages, baseline, self.candidate.observation, noisy)
            if self._asks_for_casts(noisy):
                stages, note = casts.notice(stages, baseline, self.candidate.observation, self._terms)
                self.notes += [note] if note else []
            asked, told = semantic.judge_lifted(lifted, baseline, keeps_names=self.transform.traits.keeps_names)
            stages = [semantic.add(stage, told.get(stage.name, {}), baseline) for stage in stages]
            if noisy and self.transform.traits.lowered_to is None:
                stages = self._follow(stages, told)
        if any(steadiness.rests_on_steadiness(seen) for stage in stages for seen in stage.comparisons):
            stages = self._hold_steady(stages)
        stages = [steadiness.doubt_coarse(stage) for stage in stages]
        self.notes += steadiness.vouched_for(stages)
        return Report(
            verdict=worst_of(stage.verdict for stage in stages),
            environment=versions.environment(),
            case=self.case,
            stages=tuple(stages),
            questions=Questions(native=unasked or "asked", semantic=asked, local=self.layered.asked),
            graphs=self.candidate.graphs,
            unmatched=tuple(unmatched),
            notes=tuple(dict.fromkeys((*self.notes, *baseline.notes, *self.candidate.notes))),
            failure=self.candidate.failure,
            cost=Cost(seconds=dict(baseline.seconds), peak_bytes=peak_bytes()),
        )

    def _run_lifted(self) -> semantic.LiftedRun:
        if not self.case.semantic:
            return semantic.LiftedRun(asked="not asked: it was left out on request")
        if self.candidate.failure is not None:
            return semantic.LiftedRun(asked="not asked: the candidate failed")
        return semantic.run_lifted(self.baseline, self.transform)

    def _asks_for_casts(self, noisy: list[Observation]) -> bool:
        if self.transform.traits.lowered_to is not None or not self.candidate.observation.stages:
            return False
        return "casts" in self.case.strict or (bool(noisy) and self.baseline.narrowed_to is not None)

    def _noisy(self, count: int) -> list[Observation]:
        return self.baseline.noisy(count, lowered_to=self.transform.traits.lowered_to)

    def _ask(self, transform: Transform) -> Report:
        return replace(self, transform=transform, notes=[], candidate=CandidateRun())._report()

    @property
    def _policy(self) -> Policy:
        return self.layered.policy or self.policy

    def _why_no_truth(self) -> str:
        if self.layered.policy is not None:
            return "what is quantized is judged layer by layer"
        if not self.policy.needs_truth:
            return f"policy {self.case.policy} needs no truth"
        return self.baseline.no_truth or "the candidate failed before anything could be compared"

    def _judge(self, noisy: Sequence[Observation]) -> tuple[list[Stage], list[Unmatched]]:
        candidate, baseline, keeps_names = self.candidate, self.baseline, self.transform.traits.keeps_names
        stages: list[Stage] = []
        unmatched: list[Unmatched] = []
        if self._policy.needs_truth and baseline.no_truth:
            self.notes.append(
                f"no truth: {baseline.no_truth}. Pass policy 'rtol=…,atol=…' or 'close' to judge by fixed tolerances"
            )
        for name in self.case.stages:
            if candidate.failure and candidate.has_failed_by(name):
                reason = f"{candidate.failure.type}: {candidate.failure.message}"
                return [*stages, Stage(name=name, verdict=Verdict.CRASHED, reason=reason)], unmatched
            if name not in baseline.reference.stages or (name != "forward" and not self.transform.traits.has_backward):
                stages += self._without_gradients(name)
                continue
            found, alone, nameless = self._compare(name, noisy)
            unmatched += nameless
            vacuous = _vacuous(found)
            if vacuous and stages and self.stages_by_default and not keeps_names:
                self.notes.append(f"{name} were not compared: no name is the same on both sides")
                continue
            doubt = vacuous or candidate.untransformed() or baseline.shortfall
            stages.append(Stage.of(name, tuple(found), doubt))
            unmatched += alone
        if unmatched and not keeps_names:
            self.notes.append(
                f"{len(unmatched)} parameters, buffers or gradients have a name on one side only: another "
                "implementation has its own, and what it computes was compared without them"
            )
        return stages, unmatched

    def _compare(
        self,
        stage: str,
        noisy: Sequence[Observation],
        truth: Observation | None = None,
        reference: Observation | None = None,
    ) -> tuple[list[Comparison], list[Unmatched], list[Unmatched]]:
        judge = Judge(policy=self._policy, terms=self._terms, is_stepped=stage == "steps")
        baseline, observed = self.baseline, self.candidate.observation
        reference = reference or baseline.reference
        truth = truth or (baseline.truth if self._policy.needs_truth else None)
        of_reference, of_candidate, nameless = paired(
            stage, reference, observed, keeps_names=self.transform.traits.keeps_names
        )
        runs = [run.stages.get(stage, {}) for run in noisy]
        undecided: dict[str, int] = {}
        if stage == "steps" and truth is not None and noisy:
            sides = (of_reference, of_candidate, *runs)
            (of_reference, of_candidate, *runs), undecided = settle_steps(sides, truth, (reference, *noisy))
        found, alone = judge.compare(
            of_reference,
            of_candidate,
            truth.stages.get(stage) if truth else None,
            (reference.aliases, observed.aliases),
            runs,
        )
        return [with_count(seen, undecided) for seen in found], alone, nameless

    @property
    def _terms(self) -> Terms:
        return Terms(
            ignore=frozenset(self.case.ignore) | self.transform.traits.excused_clauses,
            strict=frozenset(self.case.strict),
            lowered_to=self.transform.traits.lowered_to,
        )

    def _look_again(self, stages: list[Stage]) -> list[Stage]:
        """Judge what is near the threshold by more noisy runs."""
        noisy = self._noisy(RUNS)
        closer: list[Stage] = []
        for stage in stages:
            if not any(_is_near(seen) for seen in stage.comparisons):
                closer.append(stage)
                continue
            again = {seen.path: seen for seen in self._compare(stage.name, noisy)[0]}
            comparisons = tuple(again[seen.path] if _is_near(seen) else seen for seen in stage.comparisons)
            closer.append(Stage.of(stage.name, comparisons, stage.reason))
        return closer

    def _replay(self, stages: list[Stage]) -> list[Stage]:
        """Judge what is coarse because of choices within rounding by a truth that chose as the reference did."""
        found = decisions.replay_reference(self.baseline)
        if found is None:
            return stages
        sharper: list[Stage] = []
        count = 0
        for stage in stages:
            if not any(steadiness.is_coarse(seen) for seen in stage.comparisons):
                sharper.append(stage)
                continue
            again = {seen.path: seen for seen in self._compare(stage.name, [found.noisy], found.truth)[0]}
            comparisons = [_sharper(seen, again[seen.path]) for seen in stage.comparisons]
            count += sum(old is not new for old, new in zip(stage.comparisons, comparisons, strict=True))
            sharper.append(Stage.of(stage.name, tuple(comparisons), stage.reason))
        if count:
            self.notes.append(
                f"{found.count} choices (topk, argmax, sort) are within rounding: in {count} leaves the candidate was "
                "held against a truth that chose as the reference did"
            )
        return sharper

    def _follow(self, stages: list[Stage], told: decisions.SemanticComparisons) -> list[Stage]:
        """Judge what diverged natively alone by runs that decided as the candidate did where rounding decides."""
        follower = decisions.DecisionFollower(
            baseline=self.baseline,
            candidate=self.candidate.observation,
            compare=lambda stage, runs: self._compare(stage, runs.noisy, runs.truth, runs.reference)[0],
            semantic=told,
        )
        followed = follower.explain(stages)
        self.notes += follower.notes
        return followed

    def _without_gradients(self, name: str) -> list[Stage]:
        has_loss = self.transform.traits.has_backward and self.baseline.plan.loss is not None
        what = "the loss does not require grad" if has_loss else "no output of the reference requires grad"
        what = what if self.transform.traits.has_backward else f"what {self.case.transform} makes has no backward"
        if self.stages_by_default and not has_loss:
            self.notes.append(f"{name} were not compared: {what}")
            return []
        return [Stage(name=name, verdict=Verdict.INCONCLUSIVE, reason=f"{what}, so there is nothing to compare")]

    def _hold_steady(self, stages: list[Stage]) -> list[Stage]:
        unsteady = steadiness.differing_runs(self.baseline.reference, self.baseline.second_reference)
        if unsteady:
            named = ", ".join(path for _, path in list(unsteady)[:4])
            self.notes.append(
                f"the reference is not deterministic: {named} differ between two eager runs of the same seed"
            )
        return [steadiness.excuse(stage, unsteady) for stage in stages]


def _is_near(seen: Comparison) -> bool:
    return seen.noise is not None and NEAR < seen.ratio < FAR


def _sharper(seen: Comparison, replayed: Comparison) -> Comparison:
    """Return the comparison with the replayed truth where that tells more, and the candidate chose alike."""
    tells_more = (replayed.resolution or 0.0) < (seen.resolution or 0.0)
    if not steadiness.is_coarse(seen) or replayed.verdict is not Verdict.EQUIVALENT or not tells_more:
        return seen
    return replace(replayed, details={**replayed.details, "replayed": True})


def _vacuous(comparisons: list[Comparison]) -> str:
    if any(seen.measurement and seen.measurement.numel for seen in comparisons):
        return ""
    return "nothing was compared: no output has values and nothing was changed"
