"""Before the first cut: which graph fails by itself, with which failure, and how often.

`Preflight.choose` returns the graph and the failure to follow. `patient` returns an oracle for a failure that does not
come each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta.errors import NothingToMinify
from torchdelta.minify.capture import nodes_of
from torchdelta.minify.edits import keep_only
from torchdelta.minify.queries import InProcessOracle, WorkerOracle
from torchdelta.minify.reducer import BudgetExhausted, Progress
from torchdelta.minify.search import Answer, Oracle, Predictor
from torchdelta.minify.subject import Subject
from torchdelta.records.case import SearchLimits
from torchdelta.records.failure import Signature
from torchdelta.records.report import Culprit
from torchdelta.records.signatures import MOST
from torchdelta.records.verdict import Verdict

TRIALS = 8
"""How often a failure that did not come again is asked for, to estimate its rate."""
RARE = 0.2
"""A failure with a lower rate than this cannot be minified by running it again and again."""
FORWARD = ("forward",)
"""The stages of a graph that fails in the forward, or before."""
SURE = 0.02
"""The accepted chance of missing a flaky failure."""


def stages_of(wanted: Signature, subject: Subject) -> tuple[str, ...]:
    """Return the stages that have to run for a failure to show: `forward`, or `forward` and `gradients`.

    Both if the failure is in the stage `gradients`, or if an input requires grad and the failure's stage is neither
    `forward` nor `transform`, for instance unknown, because the process died.
    """
    has_gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in subject.inputs)
    is_late = wanted.stage == "gradients" or (has_gradients and wanted.stage not in ("forward", "transform"))
    return (*FORWARD, "gradients") if is_late else FORWARD


@dataclass(frozen=True, kw_only=True)
class FailingGraph:
    """A graph that fails by itself, and the failure of it that is followed."""

    subject: Subject
    answer: Answer
    wanted: Signature


@dataclass(kw_only=True)
class Preflight:
    """Finds the graph that fails among those of a program."""

    ask: WorkerOracle | InProcessOracle
    program: str
    limits: SearchLimits
    """Its `match` tells which of several failures is followed."""
    expected: Sequence[Signature] = ()
    """The failures of the program as a whole: one of them is looked for before any other."""
    culprit: Culprit | None = None
    """The operation that `locate` blames."""
    guess: Callable[[Subject], Predictor] | None = None
    """For the only graph: returns what its reduction will most likely ask, before its failure is known."""
    tell: Callable[[Progress], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    rate: float = 1.0
    alternatives: Sequence[Subject] = ()
    """The same graphs in another form, one for each, or none. They are asked about if the others do not show it."""
    culprit_answer: tuple[Subject, Answer] | None = None
    """The culprit cut out alone and the answer about it, if that was asked."""

    def choose(self, subjects: Sequence[Subject]) -> FailingGraph:
        """Return the first graph that shows a failure to follow, and that failure; raise NothingToMinify if none does.

        The `subjects` are asked about in order, and then the `alternatives`. A failure is followed if `limits.match`
        allows it and it is like one of `expected`, or none is expected; of several, `_wanted` chooses. If a round shows
        only others that `limits.match` allows, the first of them is followed, with a note; if it shows none but some
        are expected, up to `TRIALS - 1` more rounds follow. If the case has the semantic question, an extra first round
        leaves it out and ignores small errors, which may be a loss of accuracy. NothingToMinify also if no graph runs
        eagerly or no query is left. Afterwards the case of `ask` has only the stages that the failure needs, and the
        semantic question only if it was asked in that round. If all answers are inconclusive for one reason, the
        message of NothingToMinify has it.
        """
        case = self.ask.case
        others: list[tuple[int, FailingGraph]] = []
        unmeant: list[Signature] = []
        # the semantic question takes one more compile, and most failures do not need it
        questions = [False, True] if case.semantic else [False]
        # a failure of the whole program that no graph shows may be flaky
        for is_semantic in [*questions, *questions[-1:] * (TRIALS - 1 if self.expected else 0)]:
            self.ask.case = replace(case, semantic=is_semantic)
            rejected: list[str] = []
            doubts: list[str] = []
            for place, subject in enumerate((*subjects, *self.alternatives)):
                self._require_budget()
                number = place % len(subjects) + 1
                self.tell(Progress(nodes=subject.size, queries=0, doing=f"graph {number} of {len(subjects)}"))
                answer = self._asked(subject)
                rejected += [answer.rejected] if answer.rejected else []
                doubts.append(_doubt_of(answer))
                meant = [signature for signature in answer.signatures if self.limits.is_meant(signature)]
                unmeant += [signature for signature in answer.signatures if signature not in meant]
                if is_semantic != questions[-1]:
                    meant = [signature for signature in meant if not _may_be_accuracy(signature)]
                same = [each for each in meant if any(each.is_like(whole) for whole in self.expected)]
                if same or (meant and not self.expected):
                    failing = FailingGraph(subject=subject, answer=answer, wanted=self._wanted(subject, same or meant))
                    return self._chosen(number, subjects, failing)
                others += [(number, FailingGraph(subject=subject, answer=answer, wanted=each)) for each in meant]
            if len(rejected) == len(subjects) + len(self.alternatives):
                raise NothingToMinify(
                    f"{self.program}: a program that does not run without the candidate is not made smaller, also if "
                    f"the candidate fails otherwise or not at all ({rejected[0]})"
                )
            if others and is_semantic == questions[-1]:
                number, failing = others[0]
                whole = "; ".join(map(str, self.expected))
                self.notes.append(f"no graph shows the program's failure by itself ({whole}): this one shows another")
                return self._chosen(number, subjects, failing)
        if unmeant:
            raise NothingToMinify(f"{self.limits.match!r} matches none of the failures: {'; '.join(map(str, unmeant))}")
        # such as that the pass changed nothing
        why = f": {doubts[0]}" if len(set(doubts)) == 1 and doubts[0] else ""
        raise NothingToMinify(
            f"{self.program}: none of the {len(subjects)} graphs that it is made of fails by itself, so there is "
            f"nothing to make smaller{why}"
        )

    @property
    def _has_budget(self) -> bool:
        """Whether the limits allow one more query."""
        return self.limits.queries is None or self.ask.begun < self.limits.queries

    def _require_budget(self) -> None:
        """Raise NothingToMinify if all queries that the limits allow were asked."""
        if not self._has_budget:
            raise NothingToMinify(
                f"{self.program}: no failure showed in {self.ask.begun} "
                f"{'query' if self.ask.begun == 1 else 'queries'}, and no more were allowed: raise --queries"
            )

    def _asked(self, subject: Subject) -> Answer:
        """Return the answer about a subject; with `guess` and workers, idle ones begin on likely later queries.

        The queries that `guess` predicts are asked about the stage `forward` alone.
        """
        if self.guess is None or not isinstance(self.ask, WorkerOracle):
            return self.ask(subject)
        return self.ask.ask(subject, self.guess(subject), replace(self.ask.case, stages=FORWARD))

    def _wanted(self, subject: Subject, meant: Sequence[Signature]) -> Signature:
        """Return the first failure of `meant` that the culprit alone shows too, or else the first of `meant`.

        The culprit is the first node of `nodes_of`. It is cut out and asked about only if there is one, `meant` has
        several failures and a query is left; `culprit_answer` keeps the cut and the answer.
        """
        is_open = self.culprit is not None and len(meant) > 1 and self._has_budget
        culprits = nodes_of(self.culprit, subject) if is_open and self.culprit is not None else ()
        cut = keep_only(subject, culprits[:1]).apply(subject) if culprits else None
        if cut is None:
            return meant[0]
        answer = self.ask(cut)
        self.culprit_answer = cut, answer
        return next((signature for signature in meant if answer.shows(signature)), meant[0])

    def _chosen(self, number: int, subjects: Sequence[Subject], failing: FailingGraph) -> FailingGraph:
        """Return the failing graph itself; from now on only the stages that its failure needs are asked.

        `number` is its place among the `subjects`, from 1; if there are several, a note tells it. An oracle of workers
        remembers `culprit_answer`, because the reduction begins with that question.
        """
        if len(subjects) > 1:
            which = f" ({failing.subject.origin})" if failing.subject.origin else ""
            self.notes.append(f"the failure is in graph {number} of {len(subjects)}{which}")
        self.ask.case = replace(self.ask.case, stages=stages_of(failing.wanted, failing.subject))
        if self.culprit_answer is not None and isinstance(self.ask, WorkerOracle):
            self.ask.remember(*self.culprit_answer)  # because the reduction begins with that question
        return failing

    def patient(self, subject: Subject, wanted: Signature) -> Oracle:
        """Return an oracle for a flaky failure, which this subject showed once and once not: it asks several times.

        The oracle returns the first answer that shows the failure, or the last one if none of them does. It raises
        BudgetExhausted instead of asking more queries than the limits allow. To estimate the failure's rate, this
        subject is asked about `TRIALS - 2` more times, as far as they allow that; `rate` is set, and a note tells it.
        Raise NothingToMinify if the rate is below `RARE`.
        """
        ask = self.ask
        trials, shown = 2, 1
        while trials < TRIALS and self._has_budget:
            trials += 1
            shown += ask(subject).shows(wanted)
        self.rate = shown / trials
        if self.rate < RARE:
            raise NothingToMinify(
                f"{wanted}: it came in {shown} of {trials} runs of the same graph on the same inputs, which is too "
                "rare to tell a smaller graph that does not fail from one that did not fail this time"
            )
        times = math.ceil(math.log(SURE) / math.log(1 - self.rate))
        self.notes.append(f"it fails in {shown} of {trials} runs: each smaller graph was run up to {times} times")

        def ask_again(subject: Subject) -> Answer:
            """Return the first of up to `times` answers that shows the failure, or else the last of them.

            Raise BudgetExhausted if no query is left for the next of them.
            """
            answer = Answer()
            for _ in range(times):
                if not self._has_budget:
                    raise BudgetExhausted
                answer = ask(subject)
                if answer.shows(wanted):
                    break
            return answer

        return ask_again


def _doubt_of(answer: Answer) -> str:
    """Return the reason for which an answer is inconclusive, or an empty text if it is not or has none."""
    if answer.report is None or answer.report.verdict is not Verdict.INCONCLUSIVE:
        return ""
    return next((stage.reason for stage in answer.report.stages if stage.reason), "")


def _may_be_accuracy(signature: Signature) -> bool:
    """Tell whether a divergence is so small that the same function may show it, less accurately computed."""
    return signature.type == "values" and signature.magnitude is not None and signature.magnitude < MOST
