"""Passes that make the values plainer: literals, contiguous float32 inputs, generated numbers and small sizes.

They leave the operations as they are. Most failures do not depend on the user's values, so `plain_values` tries all of
it with a single query; the passes after it find out which value matters if that is refused. Generated inputs also keep
the user's data out of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from torchdelta.minify.edits import Edit, input_sizes, merge_edits
from torchdelta.minify.search import Proposals, Search, propose_by_halves
from torchdelta.minify.subject import Draw

SMALL = 2
"""The size to reach: small enough to read, and large enough to tell two elements apart."""
SMALL_ODD = 3
"""The size to try for an odd size that cannot be halved: some failures are in the remainder of a vectorised loop."""


def fix_shapes(search: Search) -> Proposals:
    """Propose to replace each number that is an input or is computed, such as a size, by the literal of its value.

    All at once, then by halves.
    """
    values = search.subject.values
    names = [
        node.name
        for node in search.subject.graph.graph.nodes
        if node.op != "output" and isinstance(values[node.name], (bool, int, float))
    ]
    yield from propose_by_halves([Edit(replacements={name: values[name]}) for name in names])


def plain_strides(search: Search) -> Proposals:
    """Propose to make non-contiguous inputs contiguous: all at once, then by halves."""
    strided = {name: value for name, value in _tensor_inputs(search).items() if not value.is_contiguous()}
    yield from propose_by_halves(_change_each(strided, torch.Tensor.contiguous))


def plain_dtypes(search: Search) -> Proposals:
    """Propose float32, with values cast, for inputs of another floating-point dtype: all at once, then by halves."""
    other = {
        name: value
        for name, value in _tensor_inputs(search).items()
        if value.is_floating_point() and value.dtype is not torch.float32
    }
    yield from propose_by_halves(_change_each(other, torch.Tensor.float))


def _change_each(inputs: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Edit]:
    """Return for each input the edit that replaces it by its changed value, and keeps its `requires_grad`.

    `change` gets the detached tensor and returns the new one.
    """
    return [
        Edit(inputs={name: change(value.detach()).requires_grad_(value.requires_grad)})
        for name, value in inputs.items()
    ]


def _tensor_inputs(search: Search) -> dict[str, torch.Tensor]:
    """Return the inputs of the best subject that are tensors, by name."""
    return {name: value for name, value in search.subject.named_inputs.items() if isinstance(value, torch.Tensor)}


def plain_values(search: Search) -> Proposals:
    """Propose one edit for all inputs: random numbers for floats, zeros for integers and booleans, and small sizes.

    Complex inputs get random numbers too. Inputs that are drawn already or not contiguous, and inexact ones that
    `_is_drawable` refuses, only get small sizes.
    """
    yield merge_edits([*_draw_random(search), *_draw_constant(search, "zeros"), _shrink_all(search)])


def random_numbers(search: Search) -> Proposals:
    """Propose seeded random numbers for the floating-point and complex inputs that are not drawn yet.

    All inputs that `_is_drawable` allows at once, then by halves.
    """
    yield from propose_by_halves(list(_draw_random(search)))


def plain_constants(search: Search) -> Proposals:
    """Propose zeros, then ones, for the contiguous integer and boolean inputs that are not drawn yet.

    Each of both for all inputs at once, then by halves.
    """
    for function in ("zeros", "ones"):
        yield from propose_by_halves(list(_draw_constant(search, function)))


def _draw_random(search: Search) -> Iterator[Edit]:
    """Yield an edit that draws random numbers for each input that `_is_drawable` allows and that is not drawn yet.

    The seed is the place of the input.
    """
    for index, (name, value) in enumerate(search.subject.named_inputs.items()):
        if name not in search.subject.drawn and _is_drawable(value):
            yield Edit(draws={name: Draw(by="randn", seed=index)})


def _is_drawable(value: object) -> bool:
    """Tell whether `randn` can stand for a value: a contiguous floating-point or complex tensor.

    Tensors that torch conjugates or negates lazily do not count.
    """
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    return value.is_floating_point() or value.is_complex()


def _draw_constant(search: Search, function: str) -> Iterator[Edit]:
    """Yield for each contiguous integer or boolean input that is not drawn yet an edit that fills it.

    `function` is what it is filled with: `zeros` or `ones`.
    """
    for name, value in _tensor_inputs(search).items():
        is_exact = not (value.is_floating_point() or value.is_complex())
        if is_exact and name not in search.subject.drawn and value.is_contiguous():
            yield Edit(draws={name: Draw(by=function)})


def shrink_sizes(search: Search) -> Proposals:
    """Propose all sizes small at once, and end if that is accepted; else all sizes halved as often as that is accepted.

    Then each size by itself: halved, and if that is accepted small or halved further; if it is refused, `SMALL_ODD` for
    a larger odd size. Sizes up to `SMALL` are left alone.
    """
    if (yield _shrink_all(search)):
        return
    # halved together, so that sizes which depend on each other keep their ratio
    while (yield Edit(sizes={size: _half(size) for size in _large_sizes(search)})):
        pass
    for size in _large_sizes(search):
        if (yield Edit(sizes={size: _half(size)})):
            yield from _shrink_further(_half(size))
        elif size % 2 and size > SMALL_ODD:
            yield Edit(sizes={size: SMALL_ODD})


def _shrink_all(search: Search) -> Edit:
    """Return the edit that makes every size of the inputs above `SMALL` equal to `SMALL`."""
    return Edit(sizes=dict.fromkeys(_large_sizes(search), SMALL))


def _shrink_further(size: int) -> Proposals:
    """Propose the small size for a size that was just halved; if that is refused, halve it as often as accepted."""
    if (yield Edit(sizes={size: SMALL})):
        return
    while (yield Edit(sizes={size: _half(size)})):
        size = _half(size)


def _large_sizes(search: Search) -> list[int]:
    """Return the sizes of the inputs' axes that are above `SMALL`, the largest first."""
    return sorted((size for size in input_sizes(search.subject) if size > SMALL), reverse=True)


def _half(size: int) -> int:
    """Return half of a size, rounded down, but at least `SMALL`."""
    return max(SMALL, size // 2)
