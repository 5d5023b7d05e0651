"""Does it still compute the same thing? One check of one candidate, from its runs to its report.

`Check.run` is the place to start. It runs the candidate, natively and in float64, judges each stage in the steps of
`compare.protocol`, follows decisions that rounding may have made otherwise, asks whether the reference is the same
each time it runs, and puts everything on a report. The methods of `Check` stand in the order in which they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import GraphModule

from torchdelta._torch.graphs.graphs import forgetting_sources
from torchdelta._torch.graphs.nodes import takes_tangents
from torchdelta._torch.process import runtime, versions
from torchdelta.check import casts, decisions, graphwise, other_inputs, overflows, semantic, steadiness
from torchdelta.check.baseline import Baseline
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.decisions import reach_of_steps, settle_steps, with_count
from torchdelta.check.kinds import LiftedSides, tell_kinds
from torchdelta.check.pairing import (
    common_aliases,
    complete,
    has_differences,
    is_state,
    is_undecided,
    lost_aliases,
    pair_stage,
    state_name,
)
from torchdelta.check.quantized_layers import LayerwiseCheck
from torchdelta.compare import self_test
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.noise import Noise, unit_roundoff
from torchdelta.compare.policy import Policy
from torchdelta.compare.protocol import RUNS, Answers, JudgingSteps, Yardstick, has_diverged
from torchdelta.program.memory import living_set_aside, peak_bytes
from torchdelta.program.stages import Observation
from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison, UnmatchedLeaf
from torchdelta.records.report import ASKED, Cost, Questions, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform

_BROKEN = (
    "the candidate changed operators of torch in this process, and they give wrong results now, in the comparison too"
)
_OWN_STATE = "no parameter has the same name and initial values on both sides"


@dataclass(kw_only=True)
class Check(JudgingSteps[Observation]):
    """One case with its program, transform and policy; `run` answers it."""

    case: Case
    baseline: Baseline
    transform: Transform
    policy: Policy
    stages_by_default: bool
    """Whether the user named no stages: a stage that does not apply is then left out, and noted."""
    notes: list[str] = field(default_factory=list)
    candidate: CandidateRun = field(default_factory=CandidateRun)
    unmatched: list[UnmatchedLeaf] = field(default_factory=list, init=False)
    layers: LayerwiseCheck = field(init=False)
    """Judges a quantized program layer by layer; for other transforms it does nothing."""
    lifted: semantic.LiftedRun = field(init=False)
    """The candidate in float64."""
    answers: Answers = field(default_factory=dict, init=False)
    """What float64 says about each leaf."""
    graphs_agree: bool | None = field(default=None, init=False)
    """Whether each graph by itself is the same function in float64; None if they were not asked one by one."""
    semantic_question: str = field(default="", init=False)
    """Whether the semantic question was asked, or why not."""
    needs_noise: bool = field(default=False, init=False)
    """Whether there is a truth, and the candidate is not the same to the bit."""

    # a program takes long to compare: leaves that are not near the threshold are compared once
    keeps_distant = True

    def run(self) -> Report:
        """Run the check and return its report; a failure of the candidate is in the report.

        If the transform is meant for other inputs too, `baseline` gets an iteration on such inputs first. Mistakes of
        the user and lacks of the machine are raised, as TorchDeltaError. Global state of the process is restored
        afterwards. With deterministic algorithms, a note says that this is not the native run.
        """
        versions.require_supported()
        if self.case.deterministic:
            self.notes.append(
                "both sides ran with deterministic algorithms, which change generated code and fill empty memory: "
                "this is not the native run"
            )
        with runtime.preserved(), living_set_aside(), forgetting_sources():
            # each of torch's temporary settings leaves a context variable behind
            return copy_context().run(self._report)

    def _report(self) -> Report:
        """Run reference, truth and noise, then the candidate, natively and in float64; judge it and return the report.

        If the candidate did not fail, but the judge does not work any more (`self_test`), all stages have diverged.
        Otherwise, after the steps of `judge`, decisions within rounding are followed. Leaves become inconclusive if the
        reference differs in them between two runs, if their noise is as large as their values, or by
        `steadiness.doubt_few`; those that still diverge get their kind. The verdict is the worst of the stages. Without
        a truth, the semantic question is not asked. Raise EagerFails if the program raises, and EnvironmentUnfit if the
        judge does not work before the candidate runs.
        """
        self.baseline = baseline = other_inputs.extend(self.baseline, self.transform, self.notes)
        self.unmatched = []
        # a copy asks, because a check that its own layers refer to would keep all runs until garbage is collected
        self.layers = LayerwiseCheck.of(self.transform, self.policy, self.case.seed, replace(self)._ask)
        reference = baseline.reference  # before the candidate runs, which must not be able to change it
        if self.policy.needs_truth and not self.layers.is_observed and not baseline.has_run_candidate:
            baseline.measure_ahead(lowered_to=self.transform.traits.lowered_to)
        self_test.require()
        with baseline.timed("candidate"):
            self.candidate = baseline.run(self.layers.transform)
        has_truth = self.truth() is not None
        native_question = ASKED if has_truth else f"not asked: {self._why_no_truth()}"
        self.lifted = self._run_lifted() if has_truth else semantic.LiftedRun(asked=native_question)
        if self.candidate.failure is None and not self_test.holds():
            stages = [Stage(name=name, verdict=Verdict.DIVERGED, reason=_BROKEN) for name in self.case.stages]
            self.semantic_question = f"not asked: {_BROKEN}"
        else:
            self.needs_noise = has_truth and has_differences(reference, self.candidate.observation)
            stages = self._judge_stages()
        return Report(
            verdict=worst_of(stage.verdict for stage in stages),
            environment=versions.environment(),
            case=self.case,
            stages=tuple(stages),
            questions=Questions(native=native_question, semantic=self.semantic_question, local=self.layers.asked),
            graphs=self.candidate.graphs,
            unmatched=tuple(self.unmatched),
            notes=tuple(dict.fromkeys((*self.notes, *baseline.notes, *self.candidate.notes))),
            failure=self.candidate.failure,
            cost=Cost(seconds=dict(baseline.seconds), peak_bytes=peak_bytes()),
        )

    def _judge_stages(self) -> list[Stage]:
        """Return the stages after all steps of judging, with the kinds of those that diverged; add notes."""
        with self.baseline.timed("comparison"):
            stages = self._follow_decisions(self.judge())
        stages = self._doubt_few(self._doubt_unsteady(stages))
        self._note_generators()
        self._note_unread()
        fine = steadiness.fine_gradients(stages)
        call = self.baseline.program.call
        has_gradients = isinstance(call, GraphModule) and takes_tangents(call)
        stages = [steadiness.doubt_coarse(stage, fine, has_gradients=has_gradients) for stage in stages]
        self.notes += [*steadiness.vouched_for(stages), *steadiness.judged_by_gradients(stages)]
        return [tell_kinds(stage, self._lifted_sides(stage.name), self._accepted) for stage in stages]

    @property
    def _accepted(self) -> float:
        """How many times the noise a candidate may be off that is the same function; 1 unless the policy is `Noise`."""
        return self.policy.accepted if isinstance(self.policy, Noise) else 1.0

    def _lifted_sides(self, stage: str) -> LiftedSides:
        """Return the answers of float64 for one stage, with both whole lifted runs and whether the graphs agree."""
        return LiftedSides(
            answers=self.answers.get(stage, {}),
            reference=self.lifted.reference,
            candidate=self.lifted.candidate,
            graphs_agree=self.graphs_agree,
        )

    def _ask(self, transform: Transform) -> Report:
        """Return the report on another transform of the same program, by a copy of this check on the same baseline."""
        return replace(self, transform=transform, notes=[], candidate=CandidateRun())._report()

    @property
    def _judging_policy(self) -> Policy:
        """The policy that judges: the verdict of the layers if they are observed, or else the policy of the case."""
        return self.layers.policy or self.policy

    @property
    def _terms(self) -> Terms:
        """The terms of the contract: the clauses that case or transform excuse, the strict ones, the lowered dtype."""
        return Terms(
            ignore=frozenset(self.case.ignore) | self.transform.traits.excused_clauses,
            strict=frozenset(self.case.strict),
            lowered_to=self.transform.traits.lowered_to,
        )

    def _why_no_truth(self) -> str:
        """Return why the program has no truth; the caller reports it as why the native question is not asked.

        The reason is a policy for each layer, a policy that needs no truth, what the baseline says, or a candidate that
        failed.
        """
        if self.layers.policy is not None:
            return "a quantized program is judged layer by layer"
        if not self.policy.needs_truth:
            return f"policy {self.case.policy} needs no truth"
        return self.baseline.no_truth or "the candidate failed before anything could be compared"

    def _run_lifted(self) -> semantic.LiftedRun:
        """Run the candidate in float64 and return the run, or an empty one whose `asked` says why it was not run.

        It is not run if the user left the question out, if the candidate failed natively, or if `run_lifted` finds a
        reason.
        """
        if not self.case.semantic:
            return semantic.LiftedRun(asked="not asked: it was left out on request")
        if self.candidate.failure is not None:
            return semantic.LiftedRun(asked="not asked: the candidate failed")
        return semantic.run_lifted(self.baseline, self.transform, self.candidate)

    # the steps of `JudgingSteps.judge`, in its order

    @property
    def reference(self) -> Observation:
        """The program run eagerly."""
        return self.baseline.reference

    def judge_by_bits(self) -> None:
        """Return None: two programs that round to the same bits may still be two functions in float64."""

    def truth(self) -> Observation | None:
        """Return the program run in float64, or None if it is not needed or does not run there.

        It is not needed if the policy uses none, or if the candidate failed before its first stage.
        """
        is_needed = self._judging_policy.needs_truth and self.candidate.observation.stages
        return self.baseline.truth if is_needed else None

    def noisy(self, count: int) -> list[Observation]:
        """Return the first `count` noisy runs, without those that failed; an empty list if noise is not needed."""
        return self.baseline.noisy(count, lowered_to=self.transform.traits.lowered_to) if self.needs_noise else []

    def compare_stages(self, yardstick: Yardstick[Observation]) -> list[Stage]:
        """Return the stages of the case, compared for the first time, up to the one in which the candidate failed.

        That last stage is `crashed`, without comparisons. A stage is at best inconclusive if nothing with elements was
        compared, if calls ran untransformed, if a pass changed nothing, or if fewer iterations ran than planned. Stages
        that cannot be compared become what `_without_gradients` returns, or are left out with a note. Adds to
        `unmatched` and `notes`.
        """
        candidate, baseline, keeps_names = self.candidate, self.baseline, self.transform.traits.keeps_names
        stages: list[Stage] = []
        uncompared: list[UnmatchedLeaf] = []
        if self._judging_policy.needs_truth and baseline.no_truth:
            self.notes.append(
                f"no truth: {baseline.no_truth}. Pass policy 'rtol=…,atol=…' or 'close' to judge by fixed tolerances"
            )
        for name in self.case.stages:
            if candidate.failure and candidate.has_failed_by(name):
                reason = f"{candidate.failure}"
                return [*stages, Stage(name=name, verdict=Verdict.CRASHED, reason=reason)]
            if name not in baseline.reference.stages or (name != "forward" and not self.transform.traits.has_backward):
                stages += self._without_gradients(name)
                continue
            comparisons, unmatched, of_one_side = self._compare_and_match(name, yardstick, candidate.observation)
            uncompared += of_one_side
            self.unmatched += of_one_side
            doubt = _vacuous(name, comparisons)
            if doubt and of_one_side:
                doubt = f"nothing was compared: {_OWN_STATE}"
            if doubt and stages and self.stages_by_default and not keeps_names:
                self.notes.append(f"{name} were not compared: {_OWN_STATE}")
                continue
            doubt = doubt or self._doubt_new_names(of_one_side)
            doubt = doubt or (self._doubt_lost_aliases() if name == "forward" else "")
            doubt = doubt or candidate.untransformed() or candidate.unchanged() or baseline.shortfall
            stages.append(Stage.of(name, tuple(comparisons), doubt))
            self.unmatched += unmatched
        self._note_uncompared(uncompared)
        return stages

    def _doubt_new_names(self, leaves: Sequence[UnmatchedLeaf]) -> str:
        """Return why a stage without these leaves of one side is in doubt, because a run made some; empty if it is not.

        Another implementation may have the same state elsewhere, or not need it.
        """
        paths = [leaf.path for leaf in leaves if is_undecided(leaf, self.baseline.reference)]
        return (
            f"{_first_four(paths)}: the run made this state, and the candidate has none of this name" if paths else ""
        )

    def _doubt_lost_aliases(self) -> str:
        """Return why the forward is in doubt if state of the candidate has lost memory that it shared; empty if not.

        It is in doubt if the reference's state shares memory with an argument, a parameter or a buffer, which a later
        call may write to. State that shared memory with an output or other state alone is noted.
        """
        if "aliasing" in self._terms.ignore:
            return ""
        lost = lost_aliases(self.baseline.reference, self.candidate.observation)
        doubtful = [path for path, others in lost.items() if any(map(_is_given, others))]
        if noted := [path for path in lost if path not in doubtful]:
            self.notes.append(f"{_first_four(noted)}: memory that is shared in the reference is not in the candidate")
        if not doubtful:
            return ""
        return f"{_first_four(doubtful)}: only in the reference it shares memory with what the program is given"

    def _note_uncompared(self, leaves: Sequence[UnmatchedLeaf]) -> None:
        """Add a note on how many leaves have a name on one side only, and one on how many have other initial values.

        The leaves are state of another implementation that was not compared. A count of 0 gets no note.
        """
        other_starts = self.candidate.observation.other_starts
        restarted = [leaf for leaf in leaves if state_name(leaf.path) in other_starts]
        if count := len(leaves) - len(restarted):
            self.notes.append(
                f"{count} parameters, buffers or gradients have a name on one side only, as another implementation has "
                "its own names: the other leaves were compared without them"
            )
        if restarted:
            self.notes.append(
                f"{len(restarted)} parameters, buffers or gradients have other initial values in the candidate, as "
                "another implementation has its own state: the other leaves were compared without them"
            )

    def _without_gradients(self, name: str) -> list[Stage]:
        """Return a list of one inconclusive stage that says why it is not compared, or add a note and return no stage.

        The note is for stages that the user did not name, unless the user gave a loss and the candidate has a backward.
        """
        has_loss = self.transform.traits.has_backward and self.baseline.plan.loss is not None
        why = "the loss does not require grad" if has_loss else "no output of the reference requires grad"
        why = why if self.transform.traits.has_backward else f"the result of {self.case.transform} has no backward"
        if self.stages_by_default and not has_loss:
            self.notes.append(f"{name} were not compared: {why}")
            return []
        return [Stage(name=name, verdict=Verdict.INCONCLUSIVE, reason=f"{why}, so there is nothing to compare")]

    def compare(self, stage: str, yardstick: Yardstick[Observation]) -> list[Comparison]:
        """Return the comparisons of the candidate's leaves of one stage with those of the yardstick."""
        return self._compare_and_match(stage, yardstick, self.candidate.observation)[0]

    def _compare_and_match(
        self, stage: str, yardstick: Yardstick[Observation], candidate: Observation
    ) -> tuple[list[Comparison], list[UnmatchedLeaf], list[UnmatchedLeaf]]:
        """Return the comparisons of a stage, the leaves without a partner, and the state that is not compared.

        A leaf without a partner has a comparison, which diverged; state that `pair_stage` leaves out has none. In the
        stage `steps`, if there are a truth and noisy runs, `settle_steps` puts the truth in place of parameter elements
        whose gradient is within noise of zero; the comparison says how many have such a gradient. Unchanged state is
        added to the runs, in place.
        """
        judge = Judge(policy=self._judging_policy, terms=self._terms, is_stepped=stage == "steps")
        reference, truth = yardstick.reference, yardstick.truth
        complete(stage, [run for run in (reference, candidate, truth, *yardstick.noisy) if run])
        leaves, others, renamed = pair_stage(stage, reference, candidate, keeps_names=self.transform.traits.keeps_names)
        runs = [run.stages.get(stage, {}) for run in yardstick.noisy]
        undecided: dict[str, int] = {}
        if stage == "steps" and truth is not None and runs:
            sides = (leaves, others, *runs)
            correct = (reference, *yardstick.noisy)
            reach = reach_of_steps(self.baseline.original.state.parameters, (truth, *correct))
            (leaves, others, *runs), undecided = settle_steps(sides, truth, correct, reach)
        comparisons, unmatched = judge.compare(
            leaves,
            others,
            truth.stages.get(stage) if truth else None,
            common_aliases(reference, candidate),
            runs,
        )
        return [with_count(comparison, undecided) for comparison in comparisons], unmatched, renamed

    def excuse_integers(self, stages: list[Stage], yardstick: Yardstick[Observation]) -> list[Stage]:
        """Return the stages; integers, and shapes, that rounding may have decided become inconclusive."""
        # a few flips in each run: one run alone may have others than the candidate
        noisy = self.noisy(RUNS) if yardstick.noisy and decisions.has_suspects(stages) else []
        return decisions.excuse_integers(stages, self.baseline, self.candidate.observation, noisy)

    def ask_in_float64(self, stages: list[Stage], yardstick: Yardstick[Observation]) -> list[Stage]:
        """Return the stages with the answers to the semantic question, of the whole program or graph by graph.

        Before that, leaves whose noise is nearly as large as their values are judged with replayed choices, values at
        other indices than those that the candidate returns are doubted, and narrowing casts that the candidate left out
        are noticed, because an answer in float64 replaces none of these. If the whole program was asked, integers may
        then become equivalent by `_settle_choices`, and answers inconclusive by `_doubt_capture` if no leaf diverged
        natively. Sets `semantic_question`, and `answers` if the whole program was asked.
        """
        stages = self._doubt_mixture(self._replay_choices(stages), yardstick)
        stages = self._notice_casts(stages, yardstick)
        if self.lifted.is_by_graph:
            return self._ask_graphs(stages)
        self._judge_lifted()
        if not has_diverged(self.answers):
            stages = self._settle_choices(stages, yardstick)
        elif not any(stage.verdict is Verdict.DIVERGED for stage in stages):
            self._doubt_capture()
        return [semantic.add_answers(stage, self.answers.get(stage.name, {}), self.baseline) for stage in stages]

    def _judge_lifted(self) -> None:
        """Set `semantic_question` and `answers` to what float64 says of the whole program.

        A compiler captures the program in float64 without being told the dtypes of the native run. If its answers
        diverge, it is held against a reference that is not told them either. If all answers are equivalent then, they
        count, and `lifted` has that reference.
        """
        traits = self.transform.traits
        self.semantic_question, self.answers = semantic.judge_lifted(
            self.lifted, self.baseline, keeps_names=traits.keeps_names
        )
        if (
            not traits.is_compiler
            or not has_diverged(self.answers)
            or (untold := self.baseline.untold_reference) is None
        ):
            return
        lifted = replace(self.lifted, reference=untold, is_told=False)
        _, answers = semantic.judge_lifted(lifted, self.baseline, keeps_names=traits.keeps_names)
        # a difference must not be lost in a leaf that is not answered, or only coarsely
        if _are_equivalent(answers) and _paths_in(answers) == _paths_in(self.answers):
            self.lifted, self.answers = lifted, answers

    def _settle_choices(self, stages: list[Stage], yardstick: Yardstick[Observation]) -> list[Stage]:
        """Return the stages; integers become equivalent if rounding alone set the reference's choices apart.

        `decisions.settle_choices` says which. The stages are returned unchanged if no integers are those of the truth,
        if float64 was not asked, if a cast that is left out is a divergence (the truth leaves all of them
        out), or if there is nothing to replay. A note says if any became equivalent.
        """
        is_open = any(decisions.is_as_truth(comparison) for stage in stages for comparison in stage.comparisons)
        is_asked = self.semantic_question == ASKED
        if not (is_open and is_asked and self.baseline.has_chosen) or "casts" in self.case.strict:
            return stages
        replay = self._replayed
        if replay is None or replay[0].truth is None:
            return stages
        assert yardstick.truth is not None
        runs = decisions.ChoiceRuns(
            reference=yardstick.reference,
            truth=yardstick.truth,
            replayed=replay[0].truth,
            candidate=self.candidate.observation,
            lifted=(self.lifted.reference, self.lifted.candidate),
            unit=unit_roundoff(self.baseline.drawn_in),
        )
        settled = decisions.settle_choices(stages, runs)
        if settled != stages:
            self.notes.append(
                f"{replay[1]} choices (topk, argmax, sort) of the reference are within rounding, and the candidate "
                "made them as float64 does: integers that differ for this reason alone are equivalent"
            )
        return settled

    def _doubt_capture(self) -> None:
        """Make diverged `answers` inconclusive if each graph of the compiler is the same function by itself.

        Then the compiler has captured other values than the program computes: a table that the program has cached, or
        that numpy computed in float32, is computed in float64 by the graph. That shows in the first call: nothing
        changes if only later calls diverge, after a step. Nothing changes either for a transform that is not a compiler
        with a seam.
        """
        traits = self.transform.traits
        is_captured = traits.is_compiler and traits.has_seam and _has_diverged_at_first(self.answers)
        if not is_captured or not graphwise.ask_graphs(self.baseline, self.transform).are_same:
            return
        why = "but each graph by itself is the same function, so the compiler captures other values in float64"

        def doubt(answer: Comparison) -> Comparison:
            if answer.verdict is not Verdict.DIVERGED:
                return answer
            return replace(answer, verdict=Verdict.INCONCLUSIVE, reason=f"{answer.reason}; {why}")

        self.answers = {
            stage: {path: doubt(answer) for path, answer in leaves.items()} for stage, leaves in self.answers.items()
        }

    def _ask_graphs(self, stages: list[Stage]) -> list[Stage]:
        """Ask the semantic question of each captured graph by itself; return the stages with the answers.

        `GraphwiseAnswer.add_to` adds them. Sets `semantic_question` and `graphs_agree`, and adds a note if a graph was
        asked.
        """
        answer = graphwise.ask_graphs(self.baseline, self.transform)
        self.semantic_question = answer.question
        self.graphs_agree = answer.are_same if answer.question == ASKED else None
        if answer.count:
            why = self.lifted.asked.removeprefix("not asked: ")
            self.notes.append(f"float64 was asked about each of {answer.count} graphs by itself: {why}")
        return answer.add_to(stages)

    def _replay_choices(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages; coarse leaves are judged again by a truth and a noisy run that chose as the reference did.

        A coarse leaf differs, and its noise is nearly as large as its values. The new comparison counts only if it is
        equivalent with a finer resolution; a note says how many do. The stages are returned unchanged if no leaf is
        coarse, if the program chooses nothing, if the transform lowers precision, or if `replay_reference` has nothing
        to replay.
        """
        is_coarse = any(steadiness.is_coarse(comparison) for stage in stages for comparison in stage.comparisons)
        if not is_coarse or not self.baseline.has_chosen or self.transform.traits.lowered_to is not None:
            return stages
        if self._replayed is None:
            return stages
        replayed, choices = self._replayed
        sharper: list[Stage] = []
        count = 0
        for stage in stages:
            if any(map(steadiness.is_coarse, stage.comparisons)):
                by_path = {comparison.path: comparison for comparison in self.compare(stage.name, replayed)}
                comparisons = [_sharper(comparison, by_path[comparison.path]) for comparison in stage.comparisons]
                count += sum(old is not new for old, new in zip(stage.comparisons, comparisons, strict=True))
                stage = Stage.of(stage.name, tuple(comparisons), stage.reason)
            sharper.append(stage)
        if count:
            self.notes.append(
                f"{choices} choices (topk, argmax, sort) are within rounding: in {count} leaves the candidate was "
                "held against a truth that chose as the reference did"
            )
        return sharper

    def _doubt_mixture(self, stages: list[Stage], yardstick: Yardstick[Observation]) -> list[Stage]:
        """Return the stages; floats at other indices than the candidate returns become inconclusive.

        That is asked of forward and gradients if an integer output is the reference's where the truth chose another:
        see `decisions.doubt_mixture`. The stages are returned unchanged if nothing was chosen, if there is nothing to
        replay, or if the transform lowers precision.
        """
        truth, candidate = yardstick.truth, self.candidate.observation
        if truth is None or not self.baseline.has_chosen or self.transform.traits.lowered_to is not None:
            return stages
        if not decisions.has_chosen_as_reference(self.reference, truth, candidate) or self._replayed is None:
            return stages
        replayed, _ = self._replayed
        return [
            stage if stage.name == "steps" else decisions.doubt_mixture(stage, self.compare(stage.name, replayed))
            for stage in stages
        ]

    @cached_property
    def _replayed(self) -> tuple[Yardstick[Observation], int] | None:
        """Truth and noise with the reference's choices, as `decisions.replay_reference` returns them; run once."""
        return decisions.replay_reference(self.baseline)

    def _notice_casts(self, stages: list[Stage], yardstick: Yardstick[Observation]) -> list[Stage]:
        """Return the stages with a breach of `casts` at each leaf in which the candidate keeps values wider; add notes.

        `overflows.notice` finds leaves in which the reference alone overflows, `casts.notice` those without the
        rounding of narrowing casts. Unless the clause is strict, the second is left out if there is no noisy run, or if
        none showed such a cast and the program is given nothing in a narrow dtype. The stages are returned unchanged if
        the transform lowers precision, or if no stage of the candidate ran.
        """
        if self.transform.traits.lowered_to is not None or not self.candidate.observation.stages:
            return stages
        stages, note = overflows.notice(
            stages,
            self.baseline,
            yardstick,
            self.candidate.observation,
            self._terms,
            lambda *sides: self._compare_and_match(*sides)[0],
        )
        self.notes += [note] if note else []
        has_casts = bool(self.noisy(1)) and (self.baseline.narrowed_to is not None or self.baseline.is_narrow)
        if not has_casts and "casts" not in self.case.strict:
            return stages
        stages, note = casts.notice(stages, self.baseline, self.candidate.observation, self._terms)
        self.notes += [note] if note else []
        return stages

    # after the steps

    def _follow_decisions(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages; leaves that diverged natively alone are judged by runs that decide as the candidate did.

        Leaves that these runs explain become equivalent, and leaves that choices within noise may explain all the same
        become inconclusive: see `DecisionFollower.explain`. Notes say what was followed. The stages are returned
        unchanged if there is no noisy run, or if the transform lowers precision.
        """
        if not self.noisy(1) or self.transform.traits.lowered_to is not None:
            return stages
        follower = decisions.DecisionFollower(
            baseline=self.baseline,
            candidate=self.candidate.observation,
            compare=self.compare,
            semantic=self.answers,
        )
        stages = follower.explain(stages)
        self.notes += follower.notes
        return stages

    def _doubt_unsteady(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages; leaves in which two runs of the reference differ become inconclusive.

        The stages are returned unchanged if no verdict rests on the steadiness of the reference, which then does not
        run again, or if a candidate changed how this process runs the program. A note names up to four of the leaves;
        `steadiness.excuse` says which of them keep their verdict. Unregistered state is left out instead, and another
        note names it.
        """
        rests = any(steadiness.rests_on_steadiness(comparison) for stage in stages for comparison in stage.comparisons)
        if not rests or self.baseline.is_touched:
            return stages
        unsteady = steadiness.differing_runs(self.baseline.reference, self.baseline.second_reference)
        steady: list[Stage] = []
        for stage in stages:
            stage, dropped = steadiness.drop_unsteady(stage, unsteady, self.baseline.reference)
            steady.append(stage)
            if dropped:
                self.notes.append(
                    f"unsteady state was not compared: {_first_four(dropped)} differ between two eager runs of the "
                    "reference"
                )
        if paths := [path for _, path in unsteady if not is_state(path)]:
            names = _first_four(paths)
            self.notes.append(
                f"the reference is not deterministic: {names} differ between two eager runs of the same seed"
            )
        return [steadiness.excuse(stage, unsteady) for stage in steady]

    def _note_generators(self) -> None:
        """Add a note if a call left the process's random generators in another state than the reference's call did."""
        states = zip(self.baseline.reference.random_states, self.candidate.observation.random_states, strict=False)
        if any(reference != candidate for reference, candidate in states):
            self.notes.append(
                "the candidate leaves the random generators of the process in another state than the program does: "
                "what draws next gets other numbers"
            )

    def _note_unread(self) -> None:
        """Add a note that names up to four objects of the program whose state cannot be read."""
        if unread := self.baseline.original.unrun.unread:
            names = _first_four([f"{path} ({kind})" for path, kind in unread.items()])
            self.notes.append(f"state that Python cannot read was not compared: {names}")

    def _doubt_few(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages; diverged leaves of few elements that only the candidate rounds become inconclusive.

        `steadiness.doubt_few` says which. The stages are returned unchanged if none diverged, or without answers in
        float64.
        """
        if not any(stage.verdict is Verdict.DIVERGED for stage in stages) or not self.answers:
            return stages
        unit, reach = unit_roundoff(self.baseline.coarsest_dtype), self.baseline.rounding_of_inputs
        return [
            steadiness.doubt_few(stage, self.answers.get(stage.name, {}), unit=unit, reach=reach) for stage in stages
        ]


def _first_four(paths: Sequence[str]) -> str:
    """Return the first four paths, with commas, and the number of the others."""
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _are_equivalent(answers: Answers) -> bool:
    """Tell whether every answer of float64 is equivalent."""
    return all(each.verdict is Verdict.EQUIVALENT for leaves in answers.values() for each in leaves.values())


def _has_diverged_at_first(answers: Answers) -> bool:
    """Tell whether an answer of float64 about the calls before the first step has diverged."""
    return any(
        each.verdict is Verdict.DIVERGED and (stage != "steps" or path.startswith("steps[0].gradients"))
        for stage, leaves in answers.items()
        for path, each in leaves.items()
    )


def _paths_in(answers: Answers) -> set[tuple[str, str]]:
    """Return stage and path of every answer of float64."""
    return {(stage, path) for stage, leaves in answers.items() for path in leaves}


def _is_given(path: str) -> bool:
    """Tell whether a path is that of an argument, a parameter or a buffer."""
    return path.startswith(("args[", "kwargs[", "parameters[", "buffers["))


def _is_gradient(comparison: Comparison) -> bool:
    """Tell whether a leaf is the gradient of a tensor, by its path."""
    return comparison.path.endswith(".grad")


def _sharper(comparison: Comparison, replayed: Comparison) -> Comparison:
    """Return a copy of `replayed` if `comparison` is coarse, and `replayed` is equivalent and has a finer resolution.

    The details of the copy say that it is replayed. Otherwise return `comparison` itself.
    """
    resolves_more = (replayed.resolution or 0.0) < (comparison.resolution or 0.0)
    if not steadiness.is_coarse(comparison) or replayed.verdict is not Verdict.EQUIVALENT or not resolves_more:
        return comparison
    return replace(replayed, details={**replayed.details, "replayed": True})


def _vacuous(stage: str, comparisons: Sequence[Comparison]) -> str:
    """Return why a stage says nothing, if no comparison measured any elements and none diverged; else an empty text.

    After the forward, unregistered state does not count, because it is neither a gradient nor a parameter, but its
    gradients do.
    """
    decisive = [each for each in comparisons if stage == "forward" or not is_state(each.path) or _is_gradient(each)]
    if any(each.verdict is Verdict.DIVERGED or (each.measurement and each.measurement.numel) for each in decisive):
        return ""
    return "nothing was compared: no output has values and nothing was changed"
