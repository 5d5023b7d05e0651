"""A program that asks for a dtype gets the same answer in float64 as it got natively, and so takes the same branch.

`if x.dtype == torch.bfloat16`, `torch.finfo(x.dtype).eps` and `x.to(y.dtype)` would make another program of the one
that runs in float64, and its result would not be the truth of the original. So the reference's answers are recorded, in
order, and the lifted run is told them again:

    with DtypeRecord() as record:
        reference = program(inputs)
    with Lift(), DtypeReplay(record.answers):
        truth = program(lifted_inputs)

The attributes and methods of `torch.Tensor` that tell a dtype are replaced while a block runs: a mode for torch
functions would switch off fast paths of torch itself. A cast that returned its own tensor, because nothing had to be
cast, does so again. Questions from inside of an operation, which a dispatch mode runs, are answered truly. Start with
`_DtypeQuestions`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchdelta._torch.modes.base import is_inside_operation

_ATTRIBUTES = ("dtype", "itemsize", "nbytes")
_METHODS = ("element_size", "type")
_CASTS = ("bfloat16", "double", "float", "half", "to", "type_as")

Answer = tuple[str, Any]
"""The attribute or method that was asked, and its answer; of a cast, whether it returned its own tensor."""


class _DtypeQuestions:
    """While active, every question of the program for a dtype goes to `answer`; active blocks must not overlap."""

    def __init__(self) -> None:
        self._thread = 0
        """The thread of the program: others may run other programs."""

    @abstractmethod
    def answer(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return the answer to one question of the program; `ask` asks the tensor itself."""

    @abstractmethod
    def cast(self, name: str, tensor: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Return the result of one cast of the program; `run` casts the tensor."""

    def __enter__(self) -> Any:
        """Replace the attributes and methods of `torch.Tensor` that tell a dtype or cast; return this object."""
        self._thread = threading.get_ident()
        for name in _ATTRIBUTES:
            setattr(torch.Tensor, name, property(self._reader(name)))
        for name in _METHODS:
            setattr(torch.Tensor, name, self._method(name))
        for name in _CASTS:
            setattr(torch.Tensor, name, self._caster(name))
        return self

    def __exit__(self, *_: object) -> None:
        """Put torch's own attributes and methods back."""
        # they are inherited from the base class again
        for name in (*_ATTRIBUTES, *_METHODS, *_CASTS):
            delattr(torch.Tensor, name)

    def _is_asked_by_program(self) -> bool:
        """Tell whether the question comes from the program: from its thread, and not from inside of an operation."""
        return threading.get_ident() == self._thread and not is_inside_operation()

    def _reader(self, name: str) -> Callable[[torch.Tensor], Any]:
        """Return the getter that replaces an attribute of tensors: it passes questions of the program to `answer`.

        Other questions are answered by the tensor itself.
        """
        read = getattr(torch._C.TensorBase, name).__get__

        def reader(tensor: torch.Tensor) -> Any:
            return self.answer(name, lambda: read(tensor)) if self._is_asked_by_program() else read(tensor)

        return reader

    def _method(self, name: str) -> Callable[..., Any]:
        """Return the method that replaces one of tensors: it passes questions of the program to `answer`.

        Other questions are answered by the tensor itself. A call with arguments is a cast, which is run unchanged.
        """
        call = getattr(torch._C.TensorBase, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # `type` with an argument is a cast
            if args or kwargs or not self._is_asked_by_program():
                return call(tensor, *args, **kwargs)
            return self.answer(name, lambda: call(tensor))

        return method

    def _caster(self, name: str) -> Callable[..., Any]:
        """Return the method that replaces a cast of tensors: it passes casts of the program to `cast`.

        Other casts run unchanged.
        """
        call = getattr(torch._C.TensorBase, name)

        def caster(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_asked_by_program():
                return call(tensor, *args, **kwargs)
            return self.cast(name, tensor, lambda: call(tensor, *args, **kwargs))

        return caster


class DtypeRecord(_DtypeQuestions):
    """Keeps the answers that a program gets while the mode is active, in order; it changes none."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def answer(self, name: str, ask: Callable[[], Any]) -> Any:
        """Ask the tensor, append the question's name and the answer to `answers`, and return the answer."""
        answer = ask()
        self.answers.append((name, answer))
        return answer

    def cast(self, name: str, tensor: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Cast the tensor, add to `answers` whether the tensor itself came back, and return the result.

        The entry comes before those of questions that the cast asked.
        """
        place = len(self.answers)
        result = run()
        # before the answers to questions that the cast itself asked
        self.answers.insert(place, (name, result is tensor))
        return result


class DtypeReplay(_DtypeQuestions):
    """Gives a program recorded answers, in order, while the mode is active."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        """Begin at the first of the recorded answers, which are copied to a list."""
        super().__init__()
        self.answers = list(answers)
        self.count = 0
        """Answers that were given."""
        self.astray = ""
        """The first question that was not the recorded one, in words: the program took another path."""

    @property
    def strayed(self) -> str:
        """In words, how the program asked otherwise than in the record; empty if it asked the same questions."""
        if self.astray or self.count == len(self.answers):
            return self.astray
        return f"it asked {self.count} questions of {len(self.answers)}"

    def answer(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return the recorded answer, or the tensor's own if this or an earlier question is not the recorded one."""
        recorded, answer = self._next(name)
        return answer if recorded else ask()

    def cast(self, name: str, tensor: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Return the tensor itself if the recorded cast did, or else cast it and return the result.

        It is also cast if this or an earlier question is not the recorded one. If the recorded cast made a new tensor,
        the result is a new one too.
        """
        recorded, is_same = self._next(name)
        if recorded and is_same:
            return tensor
        result = run()
        # in float64 a cast may have nothing to do, and a later write must not reach the original all the same
        return result.clone() if recorded and result is tensor else result

    def _next(self, name: str) -> tuple[bool, Any]:
        """Return whether the record has this question next, and the recorded answer; (False, None) if it has not.

        A recorded question is counted. The first one that the record does not have next is described in `astray`; after
        it, the result is always (False, None).
        """
        if self.astray:
            return False, None
        if self.count == len(self.answers) or self.answers[self.count][0] != name:
            expected = self.answers[self.count][0] if self.count < len(self.answers) else "nothing"
            self.astray = f"it asked for {name} where it had asked for {expected}"
            return False, None
        answer = self.answers[self.count][1]
        self.count += 1
        return True, answer
