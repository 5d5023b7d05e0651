"""The reducer: passes propose edits, and it alone tests them, remembers what came of them and keeps the best.

What a pass proposes is taken when the changed subject is simpler and still shows the failure that is looked for.
Another failure is kept under "also seen", and never followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from torchdelta.minify.edits import Edit
from torchdelta.minify.search import (
    Answer,
    Foresee,
    Oracle,
    Pass,
    QueryHandle,
    QueryPool,
    Search,
    applied,
    measure,
    next_of,
)
from torchdelta.minify.speculation import Speculation
from torchdelta.minify.subject import Subject
from torchdelta.records.failure import Signature

T = TypeVar("T")
PATIENCE = 3
"""So many queries in a row that break end a reduction."""
AGAIN = 2
"""So often a failure has to come again after the leaps; small steps that were taken meanwhile are given up otherwise.

A leap that shows it counts, as long as none was refused: then what was followed was not chosen for showing it.
"""
Kept = Callable[[Subject, Answer], None]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much a reduction may cost; None is without end."""

    queries: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a reduction has come."""

    nodes: int
    """Of the best so far."""
    queries: int
    doing: str
    workers: int = 0
    """How many are asked at the moment, besides the one that is asked next."""

    def __str__(self) -> str:
        at_work = self.workers + 1
        return (
            f"best so far {self.nodes} nodes, {self.queries} {'query' if self.queries == 1 else 'queries'}, "
            f"{at_work} {'worker' if at_work == 1 else 'workers'} ({self.doing})"
        )


class BudgetExhausted(Exception):
    """The budget is used up."""


class FlakyFailure(Exception):
    """A subject that showed the failure once does not show it again."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject


@dataclass(kw_only=True)
class Reducer:
    """One reduction; `run` makes the subject small."""

    ask: Oracle
    wanted: Signature
    budget: Budget = field(default_factory=Budget)
    crew: QueryPool | None = None
    """Who can be asked several things at once; None where nobody can."""
    again: list[tuple[Subject, QueryHandle]] = field(default_factory=list)
    """Whom it is waited for, whether the failure comes again."""
    leaps: int = 0
    """How many showed the failure."""
    has_chosen: bool = False
    """Whether a leap was refused, so that what was followed was chosen among several."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """What was seen after leaps, by the keys of their subjects."""
    is_patient: bool = False
    """Whether it is known that the failure comes only now and then, and asked for as often as it takes."""
    keep: Kept = lambda _, __: None
    """Told of each subject that is the best so far."""
    expect: Kept = lambda _, __: None
    """Told what it will most likely end with, while it is still asked whether the failure comes each time."""
    tell: Callable[[Progress], None] = lambda _: None
    known: dict[str, bool] = field(default_factory=dict)
    """Which subjects showed the failure, by their keys."""
    queries: int = 0
    also_seen: dict[Signature, int] = field(default_factory=dict)
    twin: Subject | None = None
    """The last neighbour of the best subject that passed."""
    broken: list[str] = field(default_factory=list)
    """What queries broke by, since the last that did not."""
    gap: str = ""
    """What the last query about an edit broke by: nothing is known about that edit."""
    is_minimal: bool = False
    """Whether no single edit is left that still shows the failure."""
    started: float = field(default_factory=time.monotonic)

    def run(
        self,
        subject: Subject,
        answer: Answer,
        *,
        strategies: Sequence[Pass],
        passes: Sequence[Pass],
        culprits: Sequence[str] = (),
    ) -> Subject:
        """Reduce: strategies make great leaps once, passes small steps until none is left.

        In between it is asked whether the failure comes again: that is cheap by then. Wavering where it does not, which
        gives up what small steps have been taken: what comes only now and then must not be followed in them.
        """
        self.search = Search(subject=subject, answer=answer, wanted=self.wanted, culprits=tuple(culprits))
        self.passes = passes
        self.known[subject.key] = True
        has_budget = self._is_done(lambda: self._leap_all(strategies))
        self._ask_again()
        if has_budget:
            self.is_minimal = self._is_done(self._take_steps) and not self.gap
        self._settle()
        if self.again:
            self.expect(self.search.subject, self.search.answer)
        self._settle(is_over=True)
        return self.search.subject

    def _is_done(self, work: Callable[[], object]) -> bool:
        """Work; False where the budget was spent first."""
        try:
            work()
        except BudgetExhausted:
            return False
        return True

    def _leap_all(self, strategies: Sequence[Pass]) -> None:
        for place, strategy in enumerate(strategies):
            # whoever looks ahead goes the same way once more, from where this strategy began
            foresight = self._foresight(strategies[place:])
            self._leap(strategy, foresight)

    def _foresight(self, strategies: Sequence[Pass]) -> Foresee | None:
        if self.crew is None:
            return None
        crew = self.crew
        foresight = Speculation(
            find=crew.find,
            search=replace(self.search),
            strategies=strategies,
            passes=self.passes,
            answers=self.answers,
            known=self.known,
        )

        def foresee() -> Subject | None:
            most = self.budget.queries
            return foresight() if most is None or self.queries + crew.waiting < most else None

        return foresee

    def _take_steps(self) -> None:
        before = None
        while self.search.subject is not before:
            before = self.search.subject
            for each in self.passes:
                self._drive(each, None, is_leaping=False)

    def _ask_again(self) -> None:
        """Begin to ask whether the failure comes again; the first small step is asked beside it.

        That is not a question of the budget: who was told nothing else takes a failure to come each time.
        """
        subject = self.search.subject
        owed = AGAIN if self.has_chosen else max(0, AGAIN - self.leaps)
        for _ in range(0 if self.is_patient else owed):
            self.queries += 1
            begun = self._tried(partial(self._begin, subject))
            if begun is not None:
                self.again.append((subject, begun))

    def _begin(self, subject: Subject) -> QueryHandle:
        return self.crew.begin(subject) if self.crew is not None else _Later(partial(self.ask, subject))

    def _settle(self, *, is_over: bool = False) -> None:
        """Look at whether the failure came again, at the end of all of them."""
        for subject, asked in [each for each in self.again if is_over or each[1].is_done()]:
            self.again.remove((subject, asked))
            answer = self._tried(asked)
            if answer is not None and not answer.shows(self.wanted):
                raise FlakyFailure(subject)

    def _leap(self, strategy: Pass, foresee: Foresee | None) -> None:
        """Follow a strategy, which may make a subject larger on its way, and come back when it did not end smaller."""
        before = self.search.subject, self.search.answer
        try:
            self._drive(strategy, foresee, is_leaping=True)
        finally:
            if measure(self.search.subject) >= measure(before[0]):
                self.search.subject, self.search.answer = before
            else:
                self.keep(self.search.subject, self.search.answer)

    def _drive(self, propose: Pass, foresee: Foresee | None, *, is_leaping: bool) -> None:
        proposals, told = propose(self.search), None
        name = propose.__module__.rpartition(".")[2]
        while (edit := next_of(proposals, told)) is not None:
            told = self._take(edit, name, foresee, is_leaping=is_leaping)

    def _take(self, edit: Edit, name: str, foresee: Foresee | None, *, is_leaping: bool) -> bool:
        made = applied(edit, self.search, is_leaping=is_leaping)
        if isinstance(made, bool):
            return made
        if made.key in self.known:
            return False
        self._require_budget()
        self.tell(Progress(nodes=self.search.subject.size, queries=self.queries, doing=name))
        self.queries += 1
        # where nobody would bet on this edit, nobody can tell what is asked after it
        answer = self._tried(partial(self._asked, made, foresee if edit.guess is not None else None))
        if answer is None:
            self.gap = self.broken[-1]
            if len(self.broken) >= PATIENCE:
                raise BudgetExhausted
            return False
        self._settle()
        shows = self.known[made.key] = answer.shows(self.wanted)
        if is_leaping:
            self.leaps += shows
            self.has_chosen |= not shows
            self.answers[made.key] = answer
        for signature in answer.signatures:
            if not self.wanted.is_same_as(signature):
                self.also_seen[signature] = self.also_seen.get(signature, 0) + 1
        if shows:
            self.search.subject, self.search.answer = made, answer
            if not is_leaping:
                self.keep(made, answer)
        elif answer.has_passed:
            self.twin = made
        return shows

    def _asked(self, subject: Subject, foresee: Foresee | None) -> Answer:
        return self.crew.ask(subject, foresee) if self.crew is not None and foresee is not None else self.ask(subject)

    def _tried(self, ask: Callable[[], T]) -> T | None:
        """Ask; a query that breaks tells nothing."""
        try:
            answer = ask()
        except Exception as error:
            self.broken.append(f"{type(error).__name__}: {error}")
            return None
        self.broken.clear()
        return answer

    def _require_budget(self) -> None:
        spent = time.monotonic() - self.started
        if self.budget.queries is not None and self.queries >= self.budget.queries:
            raise BudgetExhausted
        if self.budget.seconds is not None and spent >= self.budget.seconds:
            raise BudgetExhausted


@dataclass(frozen=True)
class _Later:
    """A question that is put when its answer is needed."""

    ask: Callable[[], Answer]

    def is_done(self) -> bool:
        """Tell that nobody else is waited for."""
        return True

    def __call__(self) -> Answer:
        """Ask."""
        return self.ask()
