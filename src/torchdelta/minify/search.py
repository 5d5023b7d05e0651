"""A search for something smaller: what a pass may look at, what it proposes, and which of two subjects is simpler."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdelta.minify.edit import Edit, merged
from torchdelta.minify.oracle import Answer
from torchdelta.minify.subject import Subject
from torchdelta.records.failure import Signature

Proposals = Generator[Edit, bool, None]
"""A pass yields edits, and is told of each whether it was taken."""


@dataclass(kw_only=True)
class Search:
    """What a pass may look at: the best subject so far, what it showed, and where the failure is said to be."""

    subject: Subject
    answer: Answer
    wanted: Signature
    culprits: tuple[str, ...] = ()


Pass = Callable[[Search], Proposals]


def merging(edits: Sequence[Edit]) -> Proposals:
    """Propose all edits as one, and where that is too much each half by itself, down to single ones."""
    if not edits:
        return
    if (yield merged(edits)) or len(edits) == 1:
        return
    half = len(edits) // 2
    yield from merging(edits[:half])
    yield from merging(edits[half:])


def next_of(proposals: Proposals, told: bool | None) -> Edit | None:
    """Return what is proposed next, after what became of the last; None at the end."""
    try:
        return next(proposals) if told is None else proposals.send(told)
    except StopIteration:
        return None


def applied(edit: Edit, search: Search, *, is_leaping: bool) -> Subject | bool:
    """Return what an edit makes of the best subject; where nothing has to be asked about that, whether it is taken."""
    made = edit.applied_to(search.subject)
    if made is None:
        return False
    is_simpler = measure(made) < measure(search.subject)
    if made.key == search.subject.key:
        if is_simpler:
            search.subject = made  # the same, told more simply
        return is_simpler
    return made if is_leaping or is_simpler else False


def measure(subject: Subject) -> tuple[float, ...]:
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
