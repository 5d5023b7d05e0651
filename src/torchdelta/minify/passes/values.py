"""Write numbers down: what is only needed for its size goes, and sizes become literals.

Lay inputs out in memory as plainly as possible.

Give real numbers in float32, which everybody reads as the plain case.

Replace the user's numbers by random ones, which a line of code draws.

Replace the user's integers and truths by zeros or ones, which a line of code makes.

Make tensors small.

Make every value plain at once: most failures are a matter of the graph alone, and this is all there is to ask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchdelta.minify.edits import Edit, merged, sizes_of
from torchdelta.minify.search import Proposals, Search, merging
from torchdelta.minify.subject import Draw


def fix_shapes(search: Search) -> Proposals:
    """Propose the value itself for each number that is computed or given."""
    numbers = [
        node.name
        for node in search.subject.graph.graph.nodes
        if node.op != "output" and isinstance(search.subject.values[node.name], (bool, int, float))
    ]
    yield from merging([Edit(instead={name: search.subject.values[name]}) for name in numbers])


def plain_strides(search: Search) -> Proposals:
    """Propose contiguous inputs."""
    strided = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and not value.is_contiguous()
    }
    yield from merging(
        [
            Edit(inputs={name: value.detach().contiguous().requires_grad_(value.requires_grad)})
            for name, value in strided.items()
        ]
    )


def plain_dtypes(search: Search) -> Proposals:
    """Propose float32 for inputs of another floating-point dtype, all at once first: they are often of one kind."""
    odd = {
        name: value
        for name, value in search.subject.named_inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float32
    }
    yield from merging(
        [
            Edit(inputs={name: value.detach().to(torch.float32).requires_grad_(value.requires_grad)})
            for name, value in odd.items()
        ]
    )


def random_numbers(search: Search) -> Proposals:
    """Propose a seeded draw for each input of real or complex numbers."""
    yield from merging(list(drawn(search)))


def drawn(search: Search) -> Iterator[Edit]:
    """Return a draw for each input of real or complex numbers that has none."""
    for index, (name, value) in enumerate(search.subject.named_inputs.items()):
        if name not in search.subject.drawn and _can_be_drawn(value):
            yield Edit(drawn={name: Draw(by="randn", seed=index)})


def _can_be_drawn(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    return value.is_floating_point() or value.is_complex()


def plain_constants(search: Search) -> Proposals:
    """Propose zeros, then ones, for each input that has no real numbers."""
    for make in ("zeros", "ones"):
        yield from merging(list(made(search, make)))


def made(search: Search, make: str) -> Iterator[Edit]:
    """Return zeros or ones for each input that has no real numbers."""
    for name, value in search.subject.named_inputs.items():
        is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        if not is_whole or name in search.subject.drawn or not value.is_contiguous():
            continue
        yield Edit(drawn={name: Draw(by=make)})


SMALL = 2
"""Small enough to read, and large enough to tell elements apart."""
LEAST_ODD = 3


def shrink_sizes(search: Search) -> Proposals:
    """Propose all sizes small, then all half as large, then each."""
    if (yield all_small(search)):
        return
    # what hangs together is halved together, and a failure that needs much of something loses nothing on the way
    while (yield Edit(sizes={size: _half(size) for size in _large(search)})):
        pass
    for size in _large(search):
        if (yield Edit(sizes={size: _half(size)})):
            yield from _smaller(_half(size))
        elif size % 2 and size > LEAST_ODD:  # some fail for what is left over
            yield Edit(sizes={size: LEAST_ODD})


def all_small(search: Search) -> Edit:
    """Return the edit by which nothing is large any more."""
    return Edit(sizes=dict.fromkeys(_large(search), SMALL))


def _smaller(size: int) -> Proposals:
    """Propose what is left of a size that could be halved."""
    if (yield Edit(sizes={size: SMALL})):
        return
    while (yield Edit(sizes={size: _half(size)})):
        size = _half(size)


def _large(search: Search) -> list[int]:
    return sorted((size for size in sizes_of(search.subject) if size > SMALL), reverse=True)


def _half(size: int) -> int:
    return max(SMALL, size // 2)


def plain_values(search: Search) -> Proposals:
    """Propose drawn numbers, zeros and small sizes together."""
    yield merged([*drawn(search), *made(search, "zeros"), all_small(search)])
