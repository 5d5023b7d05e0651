"""The reducer: passes propose edits, and it alone tests them, remembers what came of them and keeps the best.

What a pass proposes is taken when the changed subject is simpler and still shows the failure that is looked for.
Another failure is kept under "also seen", and never followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from torchdelta.minify.edit import Edit, merged
from torchdelta.minify.oracle import Answer, Begin, Oracle, guilty_outputs
from torchdelta.minify.subject import Subject
from torchdelta.records.failure import Signature

T = TypeVar("T")
PATIENCE = 3
"""So many queries in a row that break end a reduction."""
AGAIN = 2
"""So often a failure has to come again before small steps are taken.

A leap that shows it counts, as long as none was refused: then what was followed was not chosen for showing it.
"""
FEW = 3
"""So few operations are halved into single ones."""
Proposals = Generator[Edit, bool, None]
"""A pass yields edits, and is told of each whether it was taken."""
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


class Spent(Exception):
    """The budget is used up."""


class Wavering(Exception):
    """A subject that showed the failure once does not show it again."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject


@dataclass(kw_only=True)
class Search:
    """What a pass may look at: the best subject so far, what it showed, and where the failure is said to be."""

    subject: Subject
    answer: Answer
    wanted: Signature
    culprits: tuple[str, ...] = ()


Pass = Callable[[Search], Proposals]


@dataclass(kw_only=True)
class Reducer:
    """One reduction; `run` makes the subject small."""

    ask: Oracle
    wanted: Signature
    budget: Budget = field(default_factory=Budget)
    begin: Begin | None = None
    """Asks while something else is asked; None where nobody can."""
    foresee: Callable[[Subject], None] | None = None
    """Begins to ask what will be asked, or most likely will be; None where nobody can."""
    foreseen: set[str] = field(default_factory=set)
    """The subjects that were begun to be asked about so."""
    again: list[Callable[[], Answer]] = field(default_factory=list)
    """The answers that are waited for, whether the failure comes again."""
    leaps: int = 0
    """How many showed the failure."""
    was_refused: bool = False
    """Whether the last leap was."""
    has_chosen: bool = False
    """Whether a leap was refused, so that what was followed was chosen among several."""
    is_patient: bool = False
    """Whether it is known that the failure comes only now and then, and asked for as often as it takes."""
    keep: Kept = lambda _, __: None
    """Told of each subject that is the best so far."""
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

        In between the failure has to come again: to ask for it is cheap by then, and what comes only now and then must
        not be followed in small steps. Wavering where it does not.
        """
        self.search = Search(subject=subject, answer=answer, wanted=self.wanted, culprits=tuple(culprits))
        self.passes = passes
        self.known[subject.key] = True
        has_budget = self._is_done(lambda: self._leap_all(strategies))
        self._ask_again()
        if has_budget:
            self.is_minimal = self._is_done(self._take_steps) and not self.gap
        self._settle()
        return self.search.subject

    def _is_done(self, work: Callable[[], object]) -> bool:
        """Work; False where the budget was spent first."""
        try:
            work()
        except Spent:
            return False
        return True

    def _leap_all(self, strategies: Sequence[Pass]) -> None:
        for strategy in strategies:
            self._leap(strategy)

    def _take_steps(self) -> None:
        before = None
        while self.search.subject is not before:
            before = self.search.subject
            for each in self.passes:
                self._drive(each, is_leaping=False)

    def _ask_again(self) -> None:
        """Begin to ask whether the failure comes again; the first small step is asked beside it.

        That is not a question of the budget: who was told nothing else takes a failure to come each time.
        """
        subject = self.search.subject
        owed = AGAIN if self.has_chosen else max(0, AGAIN - self.leaps)
        for _ in range(0 if self.is_patient else owed):
            self.queries += 1
            begun = self._tried(partial(self.begin, subject)) if self.begin is not None else partial(self.ask, subject)
            if begun is not None:
                self.again.append(begun)

    def _settle(self) -> None:
        while self.again:
            answer = self._tried(self.again.pop())
            if answer is not None and not answer.shows(self.wanted):
                raise Wavering(self.search.subject)

    def _leap(self, strategy: Pass) -> None:
        """Follow a strategy, which may make a subject larger on its way, and come back when it did not end smaller."""
        before = self.search.subject, self.search.answer
        try:
            self._drive(strategy, is_leaping=True)
        finally:
            if _measure(self.search.subject) >= _measure(before[0]):
                self.search.subject, self.search.answer = before
            else:
                self.keep(self.search.subject, self.search.answer)

    def _drive(self, propose: Pass, *, is_leaping: bool) -> None:
        proposals, told = propose(self.search), None
        name = propose.__module__.rpartition(".")[2]
        while (edit := _next(proposals, told)) is not None:
            told = self._take(edit, name, is_leaping=is_leaping)

    def _take(self, edit: Edit, name: str, *, is_leaping: bool) -> bool:
        made = self._made(edit, self.search, is_leaping=is_leaping)
        if isinstance(made, bool):
            return made
        self._require_budget()
        self.tell(Progress(nodes=self.search.subject.size, queries=self.queries, doing=name))
        self.queries += 1
        ahead = self._next_after(edit, made) if is_leaping else None
        answer = self._tried(partial(self._ask_beside, made, ahead))
        if answer is None:
            self.gap = self.broken[-1]
            if len(self.broken) >= PATIENCE:
                raise Spent
            return False
        self._settle()
        shows = self.known[made.key] = answer.shows(self.wanted)
        if is_leaping:
            self.leaps += shows
            self.was_refused = not shows
            self.has_chosen |= not shows
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

    def _next_after(self, edit: Edit, made: Subject) -> Subject | None:
        """Return what will most likely be asked after a leap; None where nothing is."""
        if self.foresee is None or self.queries == self.budget.queries or made.key in self.foreseen:
            return None
        # no leap is left from a single operation: if it shows the failure, the first small step is next
        if len(made.nodes) == 1 and self._is_likely:
            return self._first_step(replace(self.search, subject=made))
        if edit.otherwise is None:
            return None
        other = self._made(edit.otherwise, replace(self.search), is_leaping=True)
        return None if isinstance(other, bool) else other

    @property
    def _is_likely(self) -> bool:
        """Whether a leap to a single operation will most likely be taken."""
        is_named = bool(guilty_outputs(self.search.subject, self.search.answer, self.wanted))
        # of a few that are halved, the first is as likely as not
        return is_named or self.was_refused or len(self.search.subject.nodes) > FEW

    def _made(self, edit: Edit, search: Search, *, is_leaping: bool) -> Subject | bool:
        """Return what has to be asked about; whether the edit was taken, where nothing has to."""
        made = edit.applied_to(search.subject)
        if made is None:
            return False
        if made.key == search.subject.key and _measure(made) < _measure(search.subject):
            search.subject = made  # the same, told more simply
            return True
        if made.key in self.known:
            return False
        return made if is_leaping or _measure(made) < _measure(search.subject) else False

    def _ask_beside(self, subject: Subject, ahead: Subject | None) -> Answer:
        """Ask about a subject, and beside it about another one."""
        if self.foresee is not None and ahead is not None:
            self.foresee(subject)
            self.foresee(ahead)
            self.foreseen.add(ahead.key)
        return self.ask(subject)

    def _first_step(self, search: Search) -> Subject | None:
        for each in self.passes:
            proposals, told = each(search), None
            while (edit := _next(proposals, told)) is not None:
                made = self._made(edit, search, is_leaping=False)
                if not isinstance(made, bool):
                    return made
                told = made
        return None

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
            raise Spent
        if self.budget.seconds is not None and spent >= self.budget.seconds:
            raise Spent


def merging(edits: Sequence[Edit]) -> Proposals:
    """Propose all edits as one, and where that is too much each half by itself, down to single ones."""
    if not edits:
        return
    if (yield merged(edits)) or len(edits) == 1:
        return
    half = len(edits) // 2
    yield from merging(edits[:half])
    yield from merging(edits[half:])


def _next(proposals: Proposals, told: bool | None) -> Edit | None:
    """Return what is proposed next, after what became of the last; None at the end."""
    try:
        return next(proposals) if told is None else proposals.send(told)
    except StopIteration:
        return None


def _measure(subject: Subject) -> tuple[float, ...]:
    """Say how simple a subject is: fewer nodes first, then fewer inputs and outputs, then plainer values."""
    held = [value for value in subject.inputs if isinstance(value, torch.Tensor)]
    plain = sum(value.is_contiguous() for value in held)
    odd = sum(value.is_floating_point() and value.dtype is not torch.float32 for value in held)
    asked = sum(value.requires_grad for value in held)
    return (
        len(subject.nodes),
        len(subject.inputs) + len(subject.outputs),
        sum(_numbers(node.args) + _numbers(node.kwargs) for node in subject.nodes),
        sum(value.numel() for value in held),
        len(held) - plain,
        odd,
        asked,
        len(held) - len(subject.drawn),
    )


def _numbers(value: Any) -> int:
    """Return how large the integers in an argument are together."""
    if isinstance(value, (tuple, list)):
        return sum(_numbers(item) for item in value)
    if isinstance(value, dict):
        return sum(_numbers(item) for item in value.values())
    return abs(value) if type(value) is int and abs(value) < 2**31 else 0
