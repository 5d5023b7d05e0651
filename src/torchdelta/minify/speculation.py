"""Predict the next query of a reduction, so that an idle worker can start on it early.

The idea: a reduction is deterministic, given its answers. So the prediction replays the strategies and passes from a
saved state with the answers that are known, and guesses the rest (`Edit.guess`). The first subject on that way without
a query is the prediction. It decides nothing: if a guess was wrong, the early answer is simply not used.

Start reading at `Speculation.__call__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchdelta.minify.edits import Edit
from torchdelta.minify.search import Answer, Pass, QueryHandle, Search, apply_edit, complexity, next_edit
from torchdelta.minify.subject import Subject


@dataclass(kw_only=True)
class Speculation:
    """A predictor that starts from a saved state of a reduction.

    Each call replays the whole way, because answers that arrived since the last call replace guesses.
    """

    find: Callable[[Subject], QueryHandle | None]
    """Returns the query about a subject, or None if none was started."""
    search: Search
    """The search as it was before the first of the strategies."""
    strategies: Sequence[Pass]
    """The strategy that is running, and those after it."""
    passes: Sequence[Pass]
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """The answers to the strategies' queries, by subject key."""
    outcomes: Mapping[str, bool] = field(default_factory=dict)
    """Whether each subject that was asked about showed the failure, by subject key."""
    applied: dict[tuple[Any, ...], tuple[Subject | bool, Subject]] = field(default_factory=dict)
    """For each history, the result of its next edit and the best subject after it. A large subject is slow to edit."""

    def __call__(self) -> Subject | None:
        """Return the next subject to ask about, or None if it cannot be predicted or all predicted queries are begun.

        The strategies and passes are replayed on a copy of `search`, with known answers and guesses.
        """
        replay = _Replay(**vars(self.search))
        try:
            for strategy in self.strategies:
                before = replace(replay)
                self._follow(strategy, replay, is_strategy=True)
                if complexity(replay.subject) >= complexity(before.subject):
                    replay = replace(before, is_guessed=replay.is_guessed, history=replay.history)
            for propose in self.passes:
                self._follow(propose, replay, is_strategy=False)
        except _EndOfReplay as end:
            return end.prediction
        return None

    def _follow(self, propose: Pass, replay: _Replay, *, is_strategy: bool) -> None:
        """Run a pass on the replay, and send it the known or guessed result of each edit.

        Every result, also a rejection, is appended to the replay's history; an accepted edit becomes its subject, and
        the edit's answer, if it is known, its answer. Raise _EndOfReplay, with or without a prediction, if the replay
        cannot go on.
        """
        proposals, was_accepted = propose(replay), None
        while (edit := next_edit(proposals, was_accepted)) is not None:
            edited = self._apply(edit, replay, is_strategy=is_strategy)
            if isinstance(edited, bool):
                was_accepted = edited
            else:
                was_accepted = self._test(edit, edited, replay, is_strategy=is_strategy)
            replay.history = (*replay.history, (was_accepted, replay.is_guessed))

    def _apply(self, edit: Edit, replay: _Replay, *, is_strategy: bool) -> Subject | bool:
        """Return what `apply_edit` returns, and set the replay's subject as it does; both are cached by the history."""
        # the history determines the edit, because a pass depends only on the results that it was sent
        key = (replay.wanted, *replay.history)
        if key not in self.applied:
            self.applied[key] = apply_edit(edit, replay, is_strategy=is_strategy), replay.subject
        edited, replay.subject = self.applied[key]
        return edited

    def _test(self, edit: Edit, edited: Subject, replay: _Replay, *, is_strategy: bool) -> bool:
        """Tell whether the reducer accepts the edit: by its answer, or by the edit's guess while the query runs.

        If accepted, `edited`, the edited subject, becomes the replay's best one. A guess sets `is_guessed`. False for a
        subject that `outcomes` has and `answers` has not. Raise _EndOfReplay with the subject as prediction if it has
        no query yet. Raise it without one if the query broke; if this is a pass and there was a guess before; if there
        was one and the answer contradicts this edit's guess of True; and while the query runs, if the edit's guess is
        None, or is True and several operations are left.
        """
        answer = self.answers.get(edited.key)
        if answer is None and edited.key in self.outcomes:
            return False
        if answer is None:
            answer = self._read_answer(edited)
        if replay.is_guessed and not is_strategy:
            raise _EndOfReplay  # only the first step of the first pass is worth a guess
        if answer is not None:
            was_accepted = answer.shows(replay.wanted)
            if replay.is_guessed and edit.guess and not was_accepted:
                raise _EndOfReplay  # an earlier guess was wrong, because this edit should have shown the failure
        elif edit.guess is None or (edit.guess and len(edited.nodes) > 1):
            # the edits after an answer about several operations depend on which of them it names
            raise _EndOfReplay
        else:
            was_accepted, replay.is_guessed = edit.guess, True
        if was_accepted:
            replay.subject, replay.answer = edited, answer or replay.answer
        return was_accepted

    def _read_answer(self, edited: Subject) -> Answer | None:
        """Return the answer about a subject, or None if its query is still running; it never waits.

        Raise _EndOfReplay, with the subject as prediction if no query was started, and without one if the query broke.
        """
        query = self.find(edited)
        if query is None:
            raise _EndOfReplay(edited)
        if not query.is_done():
            return None
        try:
            return query()
        except Exception as error:  # the reducer will read the same query and handle the error
            raise _EndOfReplay from error


@dataclass(kw_only=True)
class _Replay(Search):
    """A search that runs on known and guessed answers."""

    is_guessed: bool = False
    """Whether an answer on the way was a guess."""
    history: tuple[tuple[bool, bool], ...] = ()
    """For each edit so far: whether it was accepted, and whether there had been a guess by then."""


class _EndOfReplay(Exception):
    """The replay cannot go on; `prediction` is the subject to ask about, or None if there is nothing to ask."""

    def __init__(self, prediction: Subject | None = None) -> None:
        self.prediction = prediction
