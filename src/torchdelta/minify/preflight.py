"""Before anything is cut: which graph fails by itself, with which failure, and how often."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta.errors import NothingToMinify
from torchdelta.minify.capture import nodes_of
from torchdelta.minify.edits import kept_only
from torchdelta.minify.queries import InProcessOracle, WorkerOracle
from torchdelta.minify.reducer import Progress
from torchdelta.minify.search import Answer, Foresee, Oracle
from torchdelta.minify.subject import Subject
from torchdelta.records.case import SearchLimits
from torchdelta.records.failure import Signature
from torchdelta.records.report import Culprit

TRIALS = 8
"""How often a failure that did not come again is asked for, to tell how often it comes."""
RARE = 0.2
"""A failure that comes less often than this cannot be minified by running it again and again."""
FORWARD = ("forward",)
"""What is asked of a graph that fails there, or before."""
SURE = 0.02
"""The chance that is taken of losing a failure which comes only now and then."""


def stages_of(wanted: Signature, subject: Subject) -> tuple[str, ...]:
    """Return the stages that have to run for a failure to show; of a process that died nobody knows in which it did."""
    has_gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in subject.inputs)
    is_late = wanted.stage == "gradients" or (has_gradients and wanted.stage not in ("forward", "transform"))
    return (*FORWARD, "gradients") if is_late else FORWARD


@dataclass(frozen=True, kw_only=True)
class FailingGraph:
    """A graph that fails by itself."""

    subject: Subject
    answer: Answer
    wanted: Signature


@dataclass(kw_only=True)
class Preflight:
    """Finds the graph that fails, among those that a program is made of."""

    ask: WorkerOracle | InProcessOracle
    program: str
    limits: SearchLimits
    """Its `match` tells which of several failures is followed."""
    expected: Sequence[Signature] = ()
    """The failures of the program as a whole: one of them is looked for before any other."""
    culprit: Culprit | None = None
    """Who is said to have failed."""
    guess: Callable[[Subject], Foresee] | None = None
    """Says of the only graph what a reduction of it will ask, before it is known how it fails."""
    tell: Callable[[Progress], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    rate: float = 1.0
    alone: tuple[Subject, Answer] | None = None
    """The culprit by itself, where that was asked about."""

    def choose(self, subjects: Sequence[Subject]) -> FailingGraph:
        """Return the first graph that shows what is meant; NothingToMinify where none fails."""
        case = self.ask.case
        others: list[tuple[int, FailingGraph]] = []
        unmeant: list[Signature] = []
        # the semantic question takes one more compile, and most failures need it not
        questions = [False, True] if case.semantic else [False]
        # what the program showed as a whole and no graph does may come only now and then
        for is_semantic in [*questions, *questions[-1:] * (TRIALS - 1 if self.expected else 0)]:
            self.ask.case = replace(case, semantic=is_semantic)
            for number, subject in enumerate(subjects, 1):
                self.tell(Progress(nodes=subject.size, queries=0, doing=f"graph {number} of {len(subjects)}"))
                answer = self._asked(subject)
                meant = [signature for signature in answer.signatures if self.limits.is_meant(signature)]
                unmeant += [signature for signature in answer.signatures if signature not in meant]
                same = [each for each in meant if any(each.is_like(whole) for whole in self.expected)]
                if same or (meant and not self.expected):
                    found = FailingGraph(subject=subject, answer=answer, wanted=self._wanted(subject, same or meant))
                    return self._chosen(number, subjects, found)
                others += [(number, FailingGraph(subject=subject, answer=answer, wanted=each)) for each in meant]
            if others and is_semantic == questions[-1]:
                number, found = others[0]
                whole = "; ".join(map(str, self.expected))
                self.notes.append(f"no graph shows by itself what the program does ({whole}): this is what one shows")
                return self._chosen(number, subjects, found)
        if unmeant:
            raise NothingToMinify(f"{self.limits.match!r} matches none of the failures: {'; '.join(map(str, unmeant))}")
        raise NothingToMinify(
            f"{self.program}: none of the {len(subjects)} graphs that it is made of fails by itself, so there is "
            "nothing to make smaller"
        )

    def _asked(self, subject: Subject) -> Answer:
        if self.guess is None or not isinstance(self.ask, WorkerOracle):
            return self.ask(subject)
        return self.ask.ask(subject, self.guess(subject), replace(self.ask.case, stages=FORWARD))

    def _wanted(self, subject: Subject, meant: Sequence[Signature]) -> Signature:
        """Return which of several failures of a graph is the culprit's own; the first where it shows none by itself."""
        culprits = nodes_of(self.culprit, subject) if self.culprit is not None and len(meant) > 1 else ()
        alone = kept_only(subject, culprits[:1]).applied_to(subject) if culprits else None
        if alone is None:
            return meant[0]
        answer = self.ask(alone)
        self.alone = alone, answer
        return next((signature for signature in meant if answer.shows(signature)), meant[0])

    def _chosen(self, number: int, subjects: Sequence[Subject], found: FailingGraph) -> FailingGraph:
        """Ask from now on only what this failure needs."""
        if len(subjects) > 1:
            which = f" ({found.subject.origin})" if found.subject.origin else ""
            self.notes.append(f"the failure is in graph {number} of {len(subjects)}{which}")
        self.ask.case = replace(self.ask.case, stages=stages_of(found.wanted, found.subject))
        if self.alone is not None and isinstance(self.ask, WorkerOracle):
            self.ask.remember(*self.alone)  # the reduction begins with it
        return found

    def patient(self, subject: Subject, wanted: Signature) -> Oracle:
        """Return who asks as often as it takes about a failure that this subject showed once, and once not."""
        ask = self.ask
        shown = 1 + sum(ask(subject).shows(wanted) for _ in range(TRIALS - 2))
        self.rate = shown / TRIALS
        if self.rate < RARE:
            raise NothingToMinify(
                f"{wanted}: it came in {shown} of {TRIALS} runs of the same graph on the same inputs, which is too "
                "rare to tell a smaller graph that does not fail from one that did not fail this time"
            )
        times = math.ceil(math.log(SURE) / math.log(1 - self.rate))
        self.notes.append(f"it fails in {shown} of {TRIALS} runs: each smaller graph was run up to {times} times")

        def ask_again(subject: Subject) -> Answer:
            answer = ask(subject)
            for _ in range(times - 1):
                if answer.shows(wanted):
                    break
                answer = ask(subject)
            return answer

        return ask_again
