"""Other inputs for a program: fresh values, other sizes. Whether the program takes them, only running it tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.trees import tree_leaves, tree_map_only
from torchdelta.execute.copies import copy_together
from torchdelta.execute.inputs import randomise
from torchdelta.execute.programs import Program

ATTEMPTS = 6
"""How often values are drawn: each draw lies nearer to the given inputs, which the program does take."""


def fresh(program: Program, *, seed: int) -> Iterator[Program]:
    """Yield the program with other values of the same kind; nothing where no tensor has any to change."""
    given = _inputs(program)
    for attempt in range(ATTEMPTS):
        drawn = _drawn(program, given, seed + attempt, nearness=attempt)
        if not _is_same(given, drawn):
            yield _with(program, drawn)


def resized(program: Program, *, seed: int) -> Iterator[Program]:
    """Yield the program with other sizes: those that are equal stay equal, and 0 and 1 stay what they are."""
    given = _inputs(program)
    for changes in _changes(given):
        made: dict[int, torch.Tensor] = {}

        def grown(
            tensor: torch.Tensor, changes: Mapping[int, int] = changes, made: dict[int, torch.Tensor] = made
        ) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = _grown(tensor, changes)
            return made[id(tensor)]

        larger = tree_map_only(torch.Tensor, grown, given)
        for nearness in (0, ATTEMPTS):
            yield _with(program, _drawn(program, larger, seed, nearness=nearness))


def can_be_resized(program: Program) -> bool:
    """Tell whether any input has a size to change."""
    return bool(_sizes(_inputs(program)))


def _changes(given: Any) -> Iterator[dict[int, int]]:
    sizes = _sizes(given)
    yield {size: size + 1 for size in sizes}
    yield {size: 2 * size for size in sizes}
    if len(sizes) > 1:
        for size in sizes:
            yield {size: size + 1}
            yield {size: 2 * size}


def _sizes(given: Any) -> list[int]:
    found = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf))
    return sorted({size for tensor in found for size in tensor.shape if size > 1})


def _grown(tensor: torch.Tensor, changes: Mapping[int, int]) -> torch.Tensor:
    """Return a larger tensor that repeats the values: an index that was in range still is."""
    if not tensors.has_own_buffer(tensor) or not any(size in changes for size in tensor.shape):
        return tensor
    grown = tensor.detach()
    for axis, size in enumerate(tensor.shape):
        if size in changes:
            grown = grown.index_select(axis, torch.arange(changes[size], device=tensor.device) % size)
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    laid_out = grown.permute(order).contiguous().permute(back)
    return laid_out.requires_grad_(tensor.requires_grad)


def _drawn(program: Program, given: Any, seed: int, *, nearness: int) -> Any:
    drawn = copy_together(given, name=program.name)
    if nearness < ATTEMPTS:
        randomise(drawn, seed=seed)
    if not nearness:
        return drawn
    share = 0.5**nearness if nearness < ATTEMPTS else 0.0
    with torch.no_grad():
        for old, new in zip(tree_leaves(given), tree_leaves(drawn), strict=True):
            if not isinstance(new, torch.Tensor) or not tensors.has_own_buffer(new):
                continue
            if not (new.is_floating_point() or new.is_complex()):
                new.copy_(old)  # between two integers there is nothing
            elif share:
                new.copy_(old + share * (new - old))
    return drawn


def _is_same(given: Any, drawn: Any) -> bool:
    pairs = zip(tree_leaves(given), tree_leaves(drawn), strict=True)
    return all(
        not isinstance(old, torch.Tensor) or not tensors.has_own_buffer(old) or bool(torch.equal(old, new))
        for old, new in pairs
    )


def _inputs(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return program.args, dict(program.kwargs)


def _with(program: Program, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Program:
    return replace(program, args=inputs[0], kwargs=inputs[1])
