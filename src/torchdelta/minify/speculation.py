"""What a reduction will most likely ask next: its strategies once more, told what is known and guessing the rest.

Nothing is decided here. Whoever has a worker to spare begins to ask what is foreseen; where a guess was wrong, nobody
looks at that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchdelta.minify.edits import Edit
from torchdelta.minify.search import Answer, Pass, QueryHandle, Search, applied, measure, next_of
from torchdelta.minify.subject import Subject


@dataclass(kw_only=True)
class Speculation:
    """Where a reduction stands; called, it returns what will most likely be asked and is not asked yet, if anything.

    It goes all the way again each time: what has been answered meanwhile is known then, and no guess any more.
    """

    find: Callable[[Subject], QueryHandle | None]
    """Returns what was begun to be asked about a subject."""
    search: Search
    """As it was when the first of the strategies began."""
    strategies: Sequence[Pass]
    """The one that is followed, and those that will be."""
    passes: Sequence[Pass]
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """What subjects have shown, by their keys."""
    known: Mapping[str, bool] = field(default_factory=dict)
    """Which showed the failure, also those that were asked before all this."""
    made: dict[tuple[Any, ...], tuple[Subject | bool, Subject]] = field(default_factory=dict)
    """What edits made, by the way there, and the best subject then: to make a large one again takes long."""

    def __call__(self) -> Subject | None:
        """Return what to ask; None where nobody can tell, or all of it is being asked."""
        path = _Path(**vars(self.search))
        try:
            for strategy in self.strategies:
                before = replace(path)
                self._follow(strategy, path, is_leaping=True)
                if measure(path.subject) >= measure(before.subject):
                    path = replace(before, is_guessed=path.is_guessed, way=path.way)
            for each in self.passes:
                self._follow(each, path, is_leaping=False)
        except _End as end:
            return end.unasked
        return None

    def _follow(self, propose: Pass, path: _Path, *, is_leaping: bool) -> None:
        proposals, told = propose(path), None
        while (edit := next_of(proposals, told)) is not None:
            made = self._applied(edit, path, is_leaping=is_leaping)
            told = made if isinstance(made, bool) else self._told(edit, made, path, is_leaping=is_leaping)
            path.way = (*path.way, (told, path.is_guessed))

    def _applied(self, edit: Edit, path: _Path, *, is_leaping: bool) -> Subject | bool:
        # what is proposed follows from what was told before
        here = (path.wanted, *path.way)
        if here not in self.made:
            self.made[here] = applied(edit, path, is_leaping=is_leaping), path.subject
        made, path.subject = self.made[here]
        return made

    def _told(self, edit: Edit, made: Subject, path: _Path, *, is_leaping: bool) -> bool:
        """Return what a pass is told of its edit, and take it as the reducer would; raises where that is not known."""
        answer = self.answers.get(made.key)
        if answer is None and made.key in self.known:
            return False
        if answer is None:
            answer = self._answered(made)
        if path.is_guessed and not is_leaping:
            raise _End(None)  # the first small step is worth a guess, and no further one
        if answer is not None:
            is_taken = answer.shows(path.wanted)
            if path.is_guessed and edit.guess and not is_taken:
                raise _End(None)  # what had to show it does not: a guess was wrong
        elif edit.guess is None or (edit.guess and len(made.nodes) > 1):
            # what the answer about several operations will point to is not known either
            raise _End(None)
        else:
            is_taken, path.is_guessed = edit.guess, True
        if is_taken:
            path.subject, path.answer = made, answer or path.answer
        return is_taken

    def _answered(self, made: Subject) -> Answer | None:
        asked = self.find(made)
        if asked is None:
            raise _End(made)
        if not asked.is_done():
            return None
        try:
            return asked()
        except Exception as error:  # a query that breaks tells nothing; whoever needs it will see why
            raise _End(None) from error


@dataclass(kw_only=True)
class _Path(Search):
    is_guessed: bool = False
    """Whether an answer on the way is a guess."""
    way: tuple[tuple[bool, bool], ...] = ()
    """What was told so far, and whether a guess had been made by then."""


class _End(Exception):
    """Nothing further can be told; with what is to be asked there."""

    def __init__(self, unasked: Subject | None) -> None:
        self.unasked = unasked
