"""The reducer: it tests the edits that passes propose, and keeps the simplest subject that still fails in the same way.

The idea: passes only propose (see `search.py`); the reducer alone asks queries. It accepts an edit if the changed
subject still shows the wanted failure. Any other failure is counted in `also_seen` and never followed, so that a
reduction cannot slide from one bug to another.

    reducer = Reducer(ask=oracle, wanted=signature)
    smallest = reducer.run(subject, answer, strategies=STRATEGIES, passes=PASSES)

Start reading at `Reducer.run`; `Reducer._test` decides about a single edit.
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
    Oracle,
    Pass,
    Predictor,
    QueryHandle,
    QueryPool,
    Search,
    apply_edit,
    complexity,
    next_edit,
)
from torchdelta.minify.speculation import Speculation
from torchdelta.minify.subject import Subject
from torchdelta.records.failure import Signature

T = TypeVar("T")
MAX_BROKEN_QUERIES = 3
"""A reduction ends after so many broken queries in a row, because the workers themselves are then at fault."""
REPEATS = 2
"""How often a failure has to show again after the strategies, before it counts as steady.

A strategy's query that showed it counts as a repeat, as long as no strategy's edit was refused. After a refusal the
subject was selected because it failed, so its failing is not evidence any more.
"""
SubjectCallback = Callable[[Subject, Answer], None]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that a reduction may cost; None means no limit."""

    queries: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a reduction, for a progress line."""

    nodes: int
    """The number of nodes of the best subject so far."""
    queries: int
    doing: str
    """The pass that is running."""
    workers: int = 0
    """The number of workers that are busy, besides the one that gets the next query."""

    def __str__(self) -> str:
        """Return one line: the best subject's nodes, the queries, the workers (`workers` and one more) and the pass."""
        at_work = self.workers + 1
        return (
            f"best so far {self.nodes} nodes, {self.queries} {'query' if self.queries == 1 else 'queries'}, "
            f"{at_work} {'worker' if at_work == 1 else 'workers'} ({self.doing})"
        )


class BudgetExhausted(Exception):
    """The budget is spent, or too many queries broke."""


class FlakyFailure(Exception):
    """A subject that showed the failure once did not show it again."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject


@dataclass(kw_only=True)
class Reducer:
    """One reduction; `run` returns the smallest subject."""

    ask: Oracle
    wanted: Signature
    """The failure to keep."""
    budget: Budget = field(default_factory=Budget)
    most_repeats: int = REPEATS
    """How many queries may ask whether the failure shows again, besides the budget."""
    pool: QueryPool | None = None
    """Workers that answer several queries at once; None if there is only `ask`."""
    is_flaky: bool = False
    """Whether the failure is known to be intermittent. `ask` then repeats by itself, so the reducer does not."""
    save_best: SubjectCallback = lambda _, __: None
    """Called with each subject that becomes the best so far."""
    on_likely_result: SubjectCallback = lambda _, __: None
    """Called with the result before the last repeats have confirmed that the failure is steady."""
    tell: Callable[[Progress], None] = lambda _: None

    outcomes: dict[str, bool] = field(default_factory=dict)
    """Whether each subject that was asked about showed the failure, by subject key."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """The answers to the strategies' queries, by subject key."""
    repeats: list[tuple[Subject, QueryHandle]] = field(default_factory=list)
    """Unread queries that ask whether the failure shows again."""
    strategy_hits: int = 0
    """How many of the strategies' queries showed the failure."""
    has_refusals: bool = False
    """Whether one of the strategies' queries did not show the failure."""
    queries: int = 0
    """How many queries were asked."""
    also_seen: dict[Signature, int] = field(default_factory=dict)
    """How often each other failure was seen."""
    twin: Subject | None = None
    """The last subject that passed and was one edit away from the best."""
    query_errors: list[str] = field(default_factory=list)
    """The errors of the broken queries since the last query that was answered."""
    unanswered: str = ""
    """The error of the last broken query about an edit, for which the answer is unknown; empty if there is none."""
    is_minimal: bool = False
    """Whether no pass has an edit left that still shows the failure."""
    start_time: float = field(default_factory=time.monotonic)

    def run(
        self,
        subject: Subject,
        answer: Answer,
        *,
        strategies: Sequence[Pass],
        passes: Sequence[Pass],
        culprits: Sequence[str] = (),
    ) -> Subject:
        """Return the smallest subject found: run each strategy once, then all passes until none makes progress.

        `answer` is the one about `subject`, which shows the failure; `culprits` are names of suspected nodes. After the
        strategies, queries ask whether the failure shows again; raise FlakyFailure if it does not. If some of them
        still run at the end, `on_likely_result` is called before they are waited for. If the budget is spent, the best
        subject so far is returned. `is_minimal` is set to true only if all passes came to their end and no query about
        an edit broke.
        """
        self.search = Search(subject=subject, answer=answer, wanted=self.wanted, culprits=tuple(culprits))
        self.passes = passes
        self.outcomes[subject.key] = True
        has_budget = self._is_within_budget(lambda: self._run_strategies(strategies))
        self._begin_repeats()
        if has_budget:
            self.is_minimal = self._is_within_budget(self._run_passes) and not self.unanswered
        self._check_repeats()
        if self.repeats:
            self.on_likely_result(self.search.subject, self.search.answer)
        self._check_repeats(wait=True)
        return self.search.subject

    def _is_within_budget(self, work: Callable[[], object]) -> bool:
        """Do the work and return True, or False if it raised BudgetExhausted before its end."""
        try:
            work()
        except BudgetExhausted:
            return False
        return True

    def _run_strategies(self, strategies: Sequence[Pass]) -> None:
        """Run each strategy once, in order, with a predictor of the queries from there on.

        BudgetExhausted of a query ends it and passes through.
        """
        for place, strategy in enumerate(strategies):
            # a prediction replays the strategies from here on, so it is built before this one changes the search
            predict = self._predictor(strategies[place:])
            self._run_strategy(strategy, predict)

    def _predictor(self, strategies: Sequence[Pass]) -> Predictor | None:
        """Return a predictor of the queries to come, or None without a pool; `strategies` are those still to run.

        It starts from a copy of the search as it is now, and predicts nothing once the queries so far, with those on
        unused predictions, have reached the budget.
        """
        if self.pool is None:
            return None
        pool = self.pool
        speculation = Speculation(
            find=pool.find,
            search=replace(self.search),
            strategies=strategies,
            passes=self.passes,
            answers=self.answers,
            outcomes=self.outcomes,
        )

        def predict() -> Subject | None:
            most = self.budget.queries
            return speculation() if most is None or self.queries + pool.unused_count < most else None

        return predict

    def _run_strategy(self, strategy: Pass, predict: Predictor | None) -> None:
        """Run a strategy, which may make the subject larger on its way; undo it if the subject is not simpler then.

        If it is simpler, it is saved as the new best subject. Both also happen if the budget is spent or an error is
        raised on the way.
        """
        before = self.search.subject, self.search.answer
        try:
            self._run_pass(strategy, predict, is_strategy=True)
        finally:
            if complexity(self.search.subject) >= complexity(before[0]):
                self.search.subject, self.search.answer = before
            else:
                self.save_best(self.search.subject, self.search.answer)

    def _run_passes(self) -> None:
        """Run all passes, in order, again and again until a round leaves the subject as it was.

        BudgetExhausted and FlakyFailure of a query end it and pass through.
        """
        before = None
        while self.search.subject is not before:
            before = self.search.subject
            for propose in self.passes:
                self._run_pass(propose, None, is_strategy=False)

    def _run_pass(self, propose: Pass, predict: Predictor | None, *, is_strategy: bool) -> None:
        """Test every edit that a pass proposes, and send it whether each was accepted."""
        proposals, was_accepted = propose(self.search), None
        name = propose.__name__.replace("_", " ")
        while (edit := next_edit(proposals, was_accepted)) is not None:
            was_accepted = self._test(edit, name, predict, is_strategy=is_strategy)

    def _test(self, edit: Edit, name: str, predict: Predictor | None, *, is_strategy: bool) -> bool:
        """Ask about one edit, and return whether it was accepted: whether the edited subject is the new best one.

        Nothing is asked if `apply_edit` decides, or about a subject that was asked about before, which is refused. A
        broken query refuses the edit and sets `unanswered`. Raise BudgetExhausted if the budget is spent or too many
        queries in a row broke; FlakyFailure if a repeat has ended without the failure. `name` is the pass, for the
        progress.
        """
        edited = apply_edit(edit, self.search, is_strategy=is_strategy)
        if isinstance(edited, bool):
            return edited
        if edited.key in self.outcomes:
            return False
        self._require_budget()
        self.tell(Progress(nodes=self.search.subject.size, queries=self.queries, doing=name))
        self.queries += 1
        # without a guess about this edit, the queries that follow it cannot be predicted
        answer = self._attempt(partial(self._query, edited, predict if edit.guess is not None else None))
        if answer is None:
            self.unanswered = self.query_errors[-1]
            if len(self.query_errors) >= MAX_BROKEN_QUERIES:
                raise BudgetExhausted
            return False
        self._check_repeats()
        return self._record(edited, answer, is_strategy=is_strategy)

    def _record(self, edited: Subject, answer: Answer, *, is_strategy: bool) -> bool:
        """Remember an answer, make the subject the best one if it shows the failure, and return whether it does.

        Other failures are counted in `also_seen`, and a subject that passes becomes the `twin`. A strategy's answer is
        also kept in `answers` and counted for the repeats; its best subject is not saved here, because the strategy may
        be undone.
        """
        shows = self.outcomes[edited.key] = answer.shows(self.wanted)
        if is_strategy:
            self.strategy_hits += shows
            self.has_refusals |= not shows
            self.answers[edited.key] = answer
        for signature in answer.signatures:
            if not self.wanted.is_same_as(signature):
                self.also_seen[signature] = self.also_seen.get(signature, 0) + 1
        if shows:
            self.search.subject, self.search.answer = edited, answer
            if not is_strategy:
                self.save_best(edited, answer)
        elif answer.has_passed:
            self.twin = edited
        return shows

    def _query(self, subject: Subject, predict: Predictor | None) -> Answer:
        """Return the answer about a subject; with a pool and `predict`, predicted queries are started meanwhile."""
        return self.pool.ask(subject, predict) if self.pool is not None and predict is not None else self.ask(subject)

    def _begin_repeats(self) -> None:
        """Start the queries that ask whether the failure shows again, and keep them in `repeats`.

        There are `REPEATS` of them, less the strategies' queries that showed it if none was refused, and at most
        `most_repeats`; none for a failure that is known to be flaky. They count in `queries`, but are not bound by the
        budget, because without them an intermittent failure would be reported as steady. A query that cannot be started
        is skipped.
        """
        subject = self.search.subject
        missing = REPEATS if self.has_refusals else max(0, REPEATS - self.strategy_hits)
        for _ in range(0 if self.is_flaky else min(missing, self.most_repeats)):
            self.queries += 1
            query = self._attempt(partial(self._begin_query, subject))
            if query is not None:
                self.repeats.append((subject, query))

    def _begin_query(self, subject: Subject) -> QueryHandle:
        """Start a query about a subject in the pool and return its handle; without a pool, reading it asks."""
        return self.pool.begin(subject) if self.pool is not None else _LazyQuery(partial(self.ask, subject))

    def _check_repeats(self, *, wait: bool = False) -> None:
        """Read and remove the repeats that are done, or all if `wait`; FlakyFailure if one does not show the failure.

        A repeat that broke is ignored.
        """
        for subject, query in [each for each in self.repeats if wait or each[1].is_done()]:
            self.repeats.remove((subject, query))
            answer = self._attempt(query)
            if answer is not None and not answer.shows(self.wanted):
                raise FlakyFailure(subject)

    def _attempt(self, query: Callable[[], T]) -> T | None:
        """Return the result of calling `query`, or None if it raises an exception.

        The text of the exception is appended to `query_errors`; a query that raises nothing clears `query_errors`.
        BudgetExhausted of an oracle that repeats by itself passes through.
        """
        try:
            result = query()
        except BudgetExhausted:
            raise
        except Exception as error:
            self.query_errors.append(f"{type(error).__name__}: {error}")
            return None
        self.query_errors.clear()
        return result

    def _require_budget(self) -> None:
        """Raise BudgetExhausted if all queries or all seconds of the budget are spent."""
        seconds = time.monotonic() - self.start_time
        if self.budget.queries is not None and self.queries >= self.budget.queries:
            raise BudgetExhausted
        if self.budget.seconds is not None and seconds >= self.budget.seconds:
            raise BudgetExhausted


@dataclass(frozen=True)
class _LazyQuery:
    """A query that is asked in this process when its answer is read."""

    ask: Callable[[], Answer]

    def is_done(self) -> bool:
        """Return True, because no worker has to be waited for."""
        return True

    def __call__(self) -> Answer:
        """Ask and return the answer."""
        return self.ask()
