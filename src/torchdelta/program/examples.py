"""The same values, lying otherwise in memory: as `t` makes a tensor, a slice, or a kernel for images.

Fresh inputs of the same kind: dtype, shape, strides, aliasing and value range stay, the values do not.

A value that was baked into a trace shows as soon as the inputs change.

Other inputs for a program: fresh values, other sizes, other layouts. Whether it takes them only running it tells.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.pytree import tree_leaves, tree_map_only
from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import leaves_of
from torchdelta.program.copies import copy_together
from torchdelta.program.programs import Program

Layout = Callable[[torch.Tensor, int], torch.Tensor]
"""Lays a tensor out anew, the n-th of several."""


def contiguous(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return it row by row."""
    return tensor.contiguous()


def transposed(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return a copy whose last axis is the outermost in memory, and so on."""
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def transposed_by_turns(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return every other tensor transposed: none has the strides of its neighbour."""
    return transposed(tensor, place) if place % 2 else tensor


def with_gaps(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return a copy with something else before each element."""
    if tensor.is_floating_point() or tensor.is_complex():
        gap = torch.full_like(tensor, torch.nan)
    else:
        gap = (tensor == 0).to(tensor.dtype)  # as small as an index has to be
    return torch.stack((gap, tensor), dim=-1)[..., 1]


def channels_last(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return images with their channels innermost, and what is no image as it is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


STRIDED: Mapping[str, Layout] = {
    "transposed": transposed,
    "transposed by turns": transposed_by_turns,
    "with gaps": with_gaps,
    "channels last": channels_last,
}
"""Those that are not contiguous."""
LAYOUTS: Mapping[str, Layout] = {"contiguous": contiguous, **STRIDED}


def randomise(inputs: Any, *, seed: int) -> None:
    """Overwrite every tensor of the inputs in place; a single integer and a constant stay."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for value in leaves_of(inputs).values():
        if not isinstance(value, torch.Tensor) or not (key := tensors.storage_key(value)) or key in done:
            continue
        done.add(key)
        # the whole storage is drawn anew, so that views of one another still agree
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        with torch.no_grad():
            whole.copy_(_drawn_like(whole, generator))


def _drawn_like(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if values.is_complex():
        return torch.view_as_complex(_drawn_like(torch.view_as_real(values), generator).contiguous())
    flat = values.detach().cpu()
    if flat.dtype is torch.bool:
        both = bool(flat.any()) and not bool(flat.all())
        return torch.rand(flat.shape, generator=generator) < flat.double().mean() if both else flat
    if not flat.is_floating_point():
        wide = flat.to(torch.int64)  # the unsigned types have no minimum of their own
        low, high = int(wide.min()), int(wide.max())
        return torch.randint(low, high + 1, flat.shape, generator=generator) if low < high else flat
    wide = flat.double()
    finite = wide[torch.isfinite(wide)]
    if wide.numel() == 1:
        return wide * (0.5 + torch.rand((), generator=generator, dtype=torch.float64))
    if finite.numel() < 2:
        return wide
    drawn = finite.mean() + finite.std() * torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.isfinite(wide), drawn.clamp(finite.min(), finite.max()), wide)


ATTEMPTS = 6
"""How often values are drawn: each draw lies nearer to the given inputs, which the program does take."""
MOST_ELEMENTS = 2**20
"""A tensor is made larger up to here, and four times as large in any case."""


def fresh(program: Program, *, seed: int) -> Iterator[Program]:
    """Yield the program with other values of the same kind; nothing where no tensor has any to change."""
    given = _inputs(program)
    for attempt in range(ATTEMPTS):
        drawn = _drawn(program, given, seed + attempt, nearness=attempt)
        if not _is_same(given, drawn):
            yield _with(program, drawn)


def resized(program: Program, *, seed: int) -> Iterator[Iterator[Program]]:
    """Yield two kinds of the program with other sizes, each as tries of which one is enough; 0 and 1 stay.

    In the first, sizes that are equal stay equal. In the second they leap, each its own way if it may: what holds
    only because two sizes are the same, or for sizes nearby, shows there. Beside integers they leap together: few
    kernels look whether there are as many indices as there should be.
    """
    given = _inputs(program)
    # memory that inputs share has no other size
    if not are_shared(program):
        yield _tries(program, _together(_sizes(given)), seed)
        may_part = not any(isinstance(leaf, torch.Tensor) and _counts(leaf) for leaf in tree_leaves(given))
        yield _tries(program, [*([_leap_apart] if may_part else []), lambda size, _: 3 * size + 2], seed)


def laid_out(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield the program with the same values in each other layout, by its name."""
    given = _inputs(program)
    # memory that inputs share lies as it lies
    if are_shared(program):
        return
    laid = {id(leaf): leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    for name, lay_out in LAYOUTS.items():
        held = {key: _laid_out(leaf, lay_out, place) for place, (key, leaf) in enumerate(laid.items())}
        other = tree_map_only(torch.Tensor, _swapping(held), given)
        if _strides(other) != _strides(given):
            yield name, _with(program, other)


def can_be_resized(program: Program) -> bool:
    """Tell whether any input has a size to change."""
    return bool(_sizes(_inputs(program)))


def can_vary(program: Program) -> bool:
    """Tell whether any input has values that a trace could depend on."""
    return any(leaf.numel() for leaf in tree_leaves(_inputs(program)) if isinstance(leaf, torch.Tensor))


Change = Callable[[int, int], int]
"""Makes of a size, and of its place among all axes of all inputs, another size."""


def _together(sizes: list[int]) -> Iterator[Change]:
    yield lambda size, _: size + 1
    yield lambda size, _: 2 * size
    for chosen in sizes if len(sizes) > 1 else ():
        yield functools.partial(_one_of, chosen, lambda size: size + 1)
        yield functools.partial(_one_of, chosen, lambda size: 2 * size)


def _one_of(chosen: int, change: Callable[[int], int], size: int, _: int) -> int:
    return change(size) if size == chosen else size


def _leap_apart(size: int, place: int) -> int:
    return 3 * size + 2 + place


def _tries(program: Program, changes: Iterable[Change], seed: int) -> Iterator[Program]:
    given = _inputs(program)
    for change in changes:
        grown: dict[int, torch.Tensor] = {}
        places = itertools.count()
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in grown:
                if _is_out_of_proportion(leaf, change):
                    break
                grown[id(leaf)] = _grown(leaf, change, places)
        else:
            larger = tree_map_only(torch.Tensor, _swapping(grown), given)
            for nearness in (0, ATTEMPTS):
                yield _with(program, _drawn(program, larger, seed, nearness=nearness))


def _swapping(grown: Mapping[int, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: grown[id(tensor)]


def _sizes(given: Any) -> list[int]:
    found = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf))
    return sorted({size for tensor in found for size in tensor.shape if size > 1})


def are_shared(program: Program) -> bool:
    """Tell whether two of the inputs have the same memory."""
    found = {id(leaf): leaf for leaf in tree_leaves(_inputs(program)) if isinstance(leaf, torch.Tensor)}
    keys = [key for leaf in found.values() if (key := tensors.storage_key(leaf))]
    return len(set(keys)) < len(keys)


def _grown(tensor: torch.Tensor, change: Change, places: Iterator[int]) -> torch.Tensor:
    """Return a larger tensor that repeats the values: an index that was in range still is."""
    if not tensors.has_own_buffer(tensor):
        return tensor
    grown = tensor.detach()
    for axis, size in enumerate(tensor.shape):
        if size > 1:
            repeated = torch.arange(change(size, next(places)), device=tensor.device) % size
            grown = grown.index_select(axis, repeated)
    if _is_sorted(tensor):
        grown = grown.sort(dim=-1).values
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    laid_out = grown.permute(order).contiguous().permute(back)
    return laid_out.requires_grad_(tensor.requires_grad)


def _laid_out(tensor: torch.Tensor, lay_out: Layout, place: int) -> torch.Tensor:
    # a subclass may have its own mind, and an attribute would be lost
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or vars(tensor) or not tensors.has_own_buffer(tensor):
        return tensor
    return lay_out(tensor.detach(), place).requires_grad_(tensor.requires_grad)


def _strides(given: Any) -> list[tuple[int, ...]]:
    found = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf))
    return [tensor.stride() for tensor in found if tensor.numel() > 1]


def _is_out_of_proportion(tensor: torch.Tensor, change: Change) -> bool:
    if not tensors.has_own_buffer(tensor):
        return False
    larger = math.prod(change(size, 0) if size > 1 else size for size in tensor.shape)
    return larger > max(MOST_ELEMENTS, 4 * tensor.numel())


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _is_sorted(tensor: torch.Tensor) -> bool:
    """Tell whether these are integers in order, as offsets and boundaries are: out of order they mean nothing."""
    if not _counts(tensor) or not tensors.has_own_buffer(tensor) or not tensor.dim() or tensor.shape[-1] < 2:
        return False
    return bool((tensor[..., 1:] >= tensor[..., :-1]).all())


def _drawn(program: Program, given: Any, seed: int, *, nearness: int) -> Any:
    drawn = copy_together(given, name=program.name)
    if nearness < ATTEMPTS:
        randomise(drawn, seed=seed)
        _stir(given, drawn, seed)
        _put_in_order(given, drawn)
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


def _stir(given: Any, drawn: Any, seed: int) -> None:
    """Move what is all the same value, which says nothing of the kind that it is of: a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for old, new in zip(tree_leaves(given), tree_leaves(drawn), strict=True):
            if not isinstance(new, torch.Tensor) or not tensors.has_own_buffer(new) or not new.numel():
                continue
            if not _has_same_values(old, new):
                continue
            if new.dtype is torch.bool:
                new.logical_not_()
            elif _counts(new):
                # downwards where that may be: what is an index stays one
                new.copy_(torch.where(old > 0, old - 1, old + 1))
            elif new.is_floating_point() and new.numel() > 1:
                noise = torch.randn(new.shape, generator=generator).to(new.device)
                scale = 0.1 * float(old.abs().max().double()) or 0.1
                new.copy_((old.double() + scale * noise).to(new.dtype))


def _put_in_order(given: Any, drawn: Any) -> None:
    for old, new in zip(tree_leaves(given), tree_leaves(drawn), strict=True):
        if isinstance(new, torch.Tensor) and _is_sorted(old):
            new.copy_(new.sort(dim=-1).values)


def _is_same(given: Any, drawn: Any) -> bool:
    pairs = zip(tree_leaves(given), tree_leaves(drawn), strict=True)
    return all(
        not isinstance(old, torch.Tensor) or not tensors.has_own_buffer(old) or _has_same_values(old, new)
        for old, new in pairs
    )


def _has_same_values(old: torch.Tensor, new: torch.Tensor) -> bool:
    return measure(old.detach(), new.detach()).mismatches == 0


def _inputs(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return program.args, dict(program.kwargs)


def _with(program: Program, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Program:
    return replace(program, args=inputs[0], kwargs=inputs[1])
