"""The longest common subsequence of two sequences: what occurs once on both sides splits it, so that it is fast."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
Span = tuple[int, int, int, int]
"""From where to where, in the first sequence and in the second."""
_Ints = NDArray[Any]

_LARGEST_TABLE = 1_000_000
"""Cells; a larger one is halved until it is not, which takes twice the time and hardly any memory."""


def common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Pair]:
    """Return the positions of equal items, rising on both sides."""
    numbers: dict[Hashable, int] = {}
    ours = [numbers.setdefault(item, len(numbers)) for item in first]
    theirs = [numbers.setdefault(item, len(numbers)) for item in second]
    found: list[Pair] = []
    open_spans: list[Span] = [(0, len(ours), 0, len(theirs))]
    while open_spans:
        pairs, rest = _trimmed(ours, theirs, open_spans.pop())
        found += pairs
        if rest[0] == rest[1] or rest[2] == rest[3]:
            continue
        if anchors := _anchors(ours, theirs, rest):
            found += anchors
            open_spans += _between(anchors, rest)
            continue
        start, end, their_start, their_end = rest
        inner = _by_table(np.array(ours[start:end]), np.array(theirs[their_start:their_end]))
        found += [(start + one, their_start + other) for one, other in inner]
    return sorted(found)


def _trimmed(ours: list[int], theirs: list[int], span: Span) -> tuple[list[Pair], Span]:
    start, end, their_start, their_end = span
    pairs: list[Pair] = []
    while start < end and their_start < their_end and ours[start] == theirs[their_start]:
        pairs.append((start, their_start))
        start, their_start = start + 1, their_start + 1
    while start < end and their_start < their_end and ours[end - 1] == theirs[their_end - 1]:
        end, their_end = end - 1, their_end - 1
        pairs.append((end, their_end))
    return pairs, (start, end, their_start, their_end)


def _anchors(ours: list[int], theirs: list[int], span: Span) -> list[Pair]:
    """Return what occurs once on either side, as much of it as rises on both."""
    start, end, their_start, their_end = span
    counts, their_counts = Counter(ours[start:end]), Counter(theirs[their_start:their_end])
    single = {item for item, count in counts.items() if count == 1 and their_counts.get(item) == 1}
    where = {item: index for index, item in enumerate(theirs[their_start:their_end], their_start) if item in single}
    return _rising([(index, where[ours[index]]) for index in range(start, end) if ours[index] in single])


def _rising(pairs: list[Pair]) -> list[Pair]:
    """Return a longest part of the pairs, whose first places rise, in which the second places rise too."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(tails, place)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [place]
        ends[length : length + 1] = [index]
    chosen: list[Pair] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chosen.append(pairs[index])
        index = before[index]
    return chosen[::-1]


def _between(anchors: list[Pair], span: Span) -> Iterator[Span]:
    start, end, their_start, their_end = span
    for ours, theirs in (*anchors, (end, their_end)):
        yield start, ours, their_start, theirs
        start, their_start = ours + 1, theirs + 1


def _by_table(ours: _Ints, theirs: _Ints) -> list[Pair]:
    if not len(ours) or not len(theirs):
        return []
    if len(ours) == 1 or len(ours) * len(theirs) <= _LARGEST_TABLE:
        return _traced_back(ours, theirs)
    middle = len(ours) // 2
    before = _lengths(ours[:middle], theirs)[-1]
    behind = _lengths(ours[middle:][::-1], theirs[::-1])[-1][::-1]
    cut = int((before + behind).argmax())
    rest = _by_table(ours[middle:], theirs[cut:])
    return [*_by_table(ours[:middle], theirs[:cut]), *((middle + one, cut + other) for one, other in rest)]


def _lengths(ours: _Ints, theirs: _Ints, *, keeps_all: bool = False) -> list[_Ints]:
    """Return how long the common subsequence with each prefix of `theirs` is: for all of `ours`, or each prefix."""
    row = np.zeros(len(theirs) + 1, dtype=np.int32)
    rows = [row]
    for item in ours:
        longer = np.zeros_like(row)
        np.maximum.accumulate(np.maximum(row[1:], row[:-1] + (theirs == item)), out=longer[1:])
        row = longer
        if not keeps_all:
            rows.clear()
        rows.append(row)
    return rows


def _traced_back(ours: _Ints, theirs: _Ints) -> list[Pair]:
    rows = _lengths(ours, theirs, keeps_all=True)
    one, other = len(ours), len(theirs)
    found: list[Pair] = []
    while one and other:
        if ours[one - 1] == theirs[other - 1]:
            one, other = one - 1, other - 1
            found.append((one, other))
        elif rows[one - 1][other] >= rows[one][other - 1]:
            one -= 1
        else:
            other -= 1
    return found[::-1]
