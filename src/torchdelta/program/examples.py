"""Other example inputs for a program: other values (`redraw`), other sizes (`resize`), other layouts (`relayout`).

They show mistakes that the user's own inputs hide: a value, a size or a stride that was baked into a trace. New inputs
are of the same kind as the given ones: dtype, aliasing and value range stay, and an index stays in range. The program
may reject them when it runs, so each function yields several tries.

Start reading at `redraw`; `randomise` overwrites inputs in place.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.graphs.export_sizes import Size
from torchdelta._torch.pytree import tree_leaves, tree_map_only
from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.program.copies import copy_together
from torchdelta.program.programs import Program

ATTEMPTS = 6
"""How often values are drawn. Each draw lies nearer to the given inputs, which the program does accept."""
LARGEST_NUMBER = 2**16
"""Larger whole numbers among the inputs do not grow: a program may make a tensor of so many elements."""
MOST_ELEMENTS = 2**20
"""A tensor may grow to so many elements, or to four times its size if that is more."""


def redraw(program: Program, *, seed: int) -> Iterator[Program]:
    """Yield up to `ATTEMPTS` programs with other input values of the same kind, each nearer to the given values.

    Integers and booleans change only in the first draw. A draw that equals the given values is skipped. The inputs are
    copies.
    """
    inputs = _inputs(program)
    for attempt in range(ATTEMPTS):
        drawn = _draw(program, inputs, seed + attempt, nearness=attempt)
        if not _is_same(inputs, drawn):
            yield _with(program, drawn)


Growth = Callable[[int], int]
"""Returns another size, given a size."""
NEAR: Sequence[Growth] = (lambda size: size + 1, lambda size: 2 * size, lambda size: size - 1)
"""Growths to a neighbouring size, the best first; later ones are for programs that refuse it."""
FAR: Sequence[Growth] = (lambda size: 2 * size + 1, lambda size: 4 * size, lambda size: 3 * size)
"""Growths to a size of which the half, the third and the quarter are others too, the best first."""


def resize(program: Program, *, seed: int) -> Iterator[Iterator[Program]]:
    """Yield two kinds of resized programs, each as an iterator of tries of which one is enough.

    In the first kind, equal sizes stay equal. In the second, sizes more than triple; its first tries also make equal
    sizes different, unless an input has integers, and its last tries keep them equal. Sizes 0 and 1 stay. Nothing is
    yielded if inputs share memory.
    """
    inputs = _inputs(program)
    if not are_shared(program):
        yield _tries(program, _equal_changes(_sizes(inputs), NEAR[:2]), seed)
        may_differ = not any(isinstance(leaf, torch.Tensor) and _is_integer(leaf) for leaf in tree_leaves(inputs))
        yield _tries(program, [*([_grow_apart] if may_differ else []), lambda size, _: 3 * size + 2], seed)


def resize_alike(program: Program, growths: Sequence[Growth], *, seed: int) -> Iterator[Program]:
    """Yield programs in which sizes, and whole numbers among the inputs, change by one of the growths.

    Equal ones stay equal. First all change, then each size or number by itself. Where numbers change, the same sizes
    are tried without that next. Sizes and numbers below 2 stay. A change is skipped if a tensor would grow too large.
    Nothing is yielded if inputs share memory.
    """
    if not are_shared(program):
        inputs = _inputs(program)
        sizes = sorted({*_sizes(inputs), *_numbers(inputs)})
        yield from _tries(program, _equal_changes(sizes, growths), seed, with_numbers=True)


def resize_symbols(
    program: Program, symbols: Mapping[str, Sequence[Size | None]], growths: Sequence[Growth], *, seed: int
) -> Iterator[Program]:
    """Yield programs in which sizes with a symbol change, all sizes of one symbol alike; all other sizes stay.

    `symbols` has for each input tensor, by its path, the symbol of each axis, or None if its size is fixed. Sizes
    change by one of the growths, first for all symbols at once and then for each alone, within the bounds of the
    symbol. Sizes 0 and 1 stay. Each change is yielded twice, or skipped if a tensor would grow too large (`_tries`).
    """
    inputs = _inputs(program)
    known = {symbol.name: symbol for axes in symbols.values() for symbol in axes if symbol is not None}
    paths = {id(leaf): path for path, leaf in input_leaves(program).items() if isinstance(leaf, torch.Tensor)}
    places = [
        symbols[paths[id(leaf)]][axis]
        for leaf in {id(leaf): leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}.values()
        if tensors.has_own_buffer(leaf)
        for axis, size in enumerate(leaf.shape)
        if size > 1
    ]

    def change(names: Collection[str], by: Growth, size: int, place: int) -> int:
        symbol = places[place]
        if symbol is None or symbol.name not in names:
            return size
        return min(max(by(size), symbol.least), symbol.most)

    choices = [tuple(known), *((name,) for name in known if len(known) > 1)]
    yield from _tries(program, [functools.partial(change, names, by) for names in choices for by in growths], seed)


def relayout(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield the name of each layout in `LAYOUTS`, with the program in that layout; its input values are unchanged.

    A layout that changes no input's strides is left out. Nothing is yielded if inputs share memory. Subclasses, and
    tensors with attributes or without a plain buffer, stay as they are. An input that has the layout already may share
    memory with the program's own.
    """
    inputs = _inputs(program)
    if are_shared(program):
        return
    leaves = {id(leaf): leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
    for name, lay_out in LAYOUTS.items():
        changed = {key: _apply_layout(leaf, lay_out, place) for place, (key, leaf) in enumerate(leaves.items())}
        other = tree_map_only(torch.Tensor, _replace_by(changed), inputs)
        if _strides(other) != _strides(inputs):
            yield name, _with(program, other)


def can_be_resized(program: Program) -> bool:
    """Tell whether any input tensor with a plain buffer has a size above 1; shared memory is not looked for."""
    return bool(_sizes(_inputs(program)))


def has_numbers(program: Program) -> bool:
    """Tell whether any input is a whole number that may grow, which a compiler may leave open like a size."""
    return bool(_numbers(_inputs(program)))


def can_vary(program: Program) -> bool:
    """Tell whether any input is a tensor with elements, which a trace could depend on."""
    return any(leaf.numel() for leaf in tree_leaves(_inputs(program)) if isinstance(leaf, torch.Tensor))


Change = Callable[[int, int], int]
"""Returns another size, given a size and its place among all axes of all inputs."""


def _equal_changes(sizes: list[int], growths: Sequence[Growth]) -> Iterator[Change]:
    """Yield functions from a size to another size, under which equal sizes stay equal; `sizes` are those of the inputs.

    The first ones change all sizes by each of the growths. If there are several sizes, the others do so for one size at
    a time.
    """
    for by in growths:
        yield functools.partial(_change_all, by)
    for chosen in sizes if len(sizes) > 1 else ():
        for by in growths:
            yield functools.partial(_change_one, chosen, by)


def _change_all(change: Growth, size: int, _: int) -> int:
    """Return the changed size."""
    return change(size)


def _change_one(chosen: int, change: Growth, size: int, _: int) -> int:
    """Return the changed size if it is the chosen one, and any other size itself."""
    return change(size) if size == chosen else size


def _grow_apart(size: int, place: int) -> int:
    """Return more than triple the size, plus its place, so that equal sizes at different places become different."""
    return 3 * size + 2 + place


def _tries(program: Program, changes: Iterable[Change], seed: int, *, with_numbers: bool = False) -> Iterator[Program]:
    """Yield the program twice for each change of its sizes: first with new values, then with repeated old ones.

    A change is skipped if a tensor would grow too large (`MOST_ELEMENTS`). A tensor that is passed twice stays one
    tensor. `with_numbers`, the change is also made to whole numbers above 1 among the inputs, if there are any, and
    then yielded again without that.
    """
    inputs = _inputs(program)
    for change in changes:
        grown: dict[int, torch.Tensor] = {}
        place = 0
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in grown:
                if _grows_too_large(leaf, change, place):
                    break
                grown[id(leaf)] = _grown(leaf, change, place)
                place += sum(size > 1 for size in leaf.shape) if tensors.has_own_buffer(leaf) else 0
        else:
            resized = tree_map_only(torch.Tensor, _replace_by(grown), inputs)
            numbered = tree_map_only(int, _changed_number(change), resized) if with_numbers else resized
            is_same = _numbers(numbered) == _numbers(resized)
            for larger in (resized,) if is_same else (numbered, resized):
                for nearness in (0, ATTEMPTS):
                    yield _with(program, _draw(program, larger, seed, nearness=nearness))


def _changed_number(change: Change) -> Callable[[int], int]:
    """Return a function that changes whole numbers that may grow; other values stay."""
    return lambda value: change(value, 0) if _may_grow(value) else value


def _numbers(inputs: Any) -> list[int]:
    """Return the whole numbers among the inputs that may grow, in order."""
    return [leaf for leaf in tree_leaves(inputs) if _may_grow(leaf)]


def _may_grow(value: Any) -> bool:
    """Tell whether a value is a whole number above 1, and not so large that twice as much may be too much memory."""
    return type(value) is int and 1 < value <= LARGEST_NUMBER


def _replace_by(tensors_by_id: Mapping[int, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from a tensor to the tensor that has its id as the key; KeyError if there is none."""
    return lambda tensor: tensors_by_id[id(tensor)]


def _sizes(inputs: Any) -> list[int]:
    """Return the different sizes above 1 of all input tensors with a plain buffer, in ascending order."""
    plain = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf))
    return sorted({size for tensor in plain for size in tensor.shape if size > 1})


def are_shared(program: Program) -> bool:
    """Tell whether two different input tensors share a storage; one tensor that is passed twice does not count."""
    leaves = {id(leaf): leaf for leaf in tree_leaves(_inputs(program)) if isinstance(leaf, torch.Tensor)}
    keys = [key for leaf in leaves.values() if (key := tensors.storage_key(leaf))]
    return len(set(keys)) < len(keys)


def _grown(tensor: torch.Tensor, change: Change, place: int) -> torch.Tensor:
    """Return a tensor of changed sizes that repeats the values, so that indices stay in range.

    Each size above 1 is changed; `place` is that of the first of them among those of all inputs. The order of strides
    stays, and sorted integers are sorted again. The result is a leaf with the same `requires_grad`. A tensor without a
    plain buffer is returned itself.
    """
    if not tensors.has_own_buffer(tensor):
        return tensor
    grown = tensor.detach()
    for axis, size in enumerate(tensor.shape):
        if size > 1:
            repeated = torch.arange(change(size, place), device=tensor.device) % size
            place += 1
            grown = grown.index_select(axis, repeated)
    if _is_sorted(tensor):
        grown = grown.sort(dim=-1).values
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    permuted = grown.permute(order).contiguous().permute(back)
    return permuted.requires_grad_(tensor.requires_grad)


def _apply_layout(tensor: torch.Tensor, lay_out: Layout, place: int) -> torch.Tensor:
    """Return the values of a tensor in another layout, as a leaf with its `requires_grad`.

    `place` is its place among the inputs. A subclass, a tensor with attributes (which would be lost), and one without a
    plain buffer are returned themselves.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or vars(tensor) or not tensors.has_own_buffer(tensor):
        return tensor
    return lay_out(tensor.detach(), place).requires_grad_(tensor.requires_grad)


def _strides(inputs: Any) -> list[tuple[int, ...]]:
    """Return the strides of each input tensor that has a plain buffer and more than one element, in order."""
    plain = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf))
    return [tensor.stride() for tensor in plain if tensor.numel() > 1]


def _grows_too_large(tensor: torch.Tensor, change: Change, place: int) -> bool:
    """Tell whether a change gives a tensor more elements than `MOST_ELEMENTS` and than four times its own.

    `place` is that of its first axis with a size above 1. False for a tensor without a plain buffer.
    """
    if not tensors.has_own_buffer(tensor):
        return False
    places = itertools.count(place)
    larger = math.prod(change(size, next(places)) if size > 1 else size for size in tensor.shape)
    return larger > max(MOST_ELEMENTS, 4 * tensor.numel())


def _is_integer(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of integers; booleans and unsigned integers of more than 8 bits do not count."""
    return tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _is_sorted(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has integers that never descend along its last axis, as offsets do.

    False if that axis has fewer than two elements, or if the tensor has no axis or no plain buffer.
    """
    if not _is_integer(tensor) or not tensors.has_own_buffer(tensor) or not tensor.dim() or tensor.shape[-1] < 2:
        return False
    return bool((tensor[..., 1:] >= tensor[..., :-1]).all())


def _draw(program: Program, inputs: Any, seed: int, *, nearness: int) -> Any:
    """Return a copy of the inputs with new values: random for nearness 0, and unchanged for `ATTEMPTS`.

    In between, each step of `nearness` halves the distance of floats to the given ones, and integers and booleans are
    unchanged. Sorted integers are drawn sorted, and constants are varied a little. Tensors without a plain buffer are
    copied unchanged. ProgramError if the inputs cannot be copied.
    """
    drawn = copy_together(inputs, name=program.name)
    if nearness < ATTEMPTS:
        randomise(drawn, seed=seed)
        _vary_constants(inputs, drawn, seed)
        _sort_where_sorted(inputs, drawn)
    if not nearness:
        return drawn
    share = 0.5**nearness if nearness < ATTEMPTS else 0.0
    with torch.no_grad():
        for old, new in zip(tree_leaves(inputs), tree_leaves(drawn), strict=True):
            if not isinstance(new, torch.Tensor) or not tensors.has_own_buffer(new):
                continue
            old, new = _unexpanded(old), _unexpanded(new)
            if not (new.is_floating_point() or new.is_complex()):
                new.copy_(old)  # there is nothing between two integers
            elif share:
                # torch has no arithmetic for floats of 8 bits
                old, other = (old.float(), new.float()) if new.itemsize == 1 else (old, new)
                nearer = old + share * (other - old)
                # an infinity stays one, and minus itself it would be NaN
                new.copy_(torch.where(torch.isfinite(old), nearer, old))
    return drawn


def _vary_constants(inputs: Any, drawn: Any, seed: int) -> None:
    """Change the drawn tensors that equal their inputs a little, in place: a constant has no range to draw from.

    Booleans are negated, and integers moved by one, downwards where they are positive. Floats get normal noise, whose
    deviation is a tenth of their largest magnitude, or 0.1 if all are zeros. Others, such as a single float, stay.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for old, new in zip(tree_leaves(inputs), tree_leaves(drawn), strict=True):
            if not isinstance(new, torch.Tensor) or not tensors.has_own_buffer(new) or not new.numel():
                continue
            if not _has_same_values(old, new):
                continue
            old, new = _unexpanded(old), _unexpanded(new)
            if new.dtype is torch.bool:
                new.logical_not_()
            elif _is_integer(new):
                # downwards if possible, so that an index stays in range
                new.copy_(torch.where(old > 0, old - 1, old + 1))
            elif new.is_floating_point() and new.numel() > 1:
                noise = torch.randn(new.shape, generator=generator).to(new.device)
                scale = 0.1 * float(old.abs().max().double()) or 0.1
                new.copy_((old.double() + scale * noise).to(new.dtype))


def _sort_where_sorted(inputs: Any, drawn: Any) -> None:
    """Sort the drawn tensors along their last axis, in place, where the input has sorted integers (`_is_sorted`)."""
    for old, new in zip(tree_leaves(inputs), tree_leaves(drawn), strict=True):
        if isinstance(new, torch.Tensor) and _is_sorted(old):
            elements = _unexpanded(new)
            elements.copy_(elements.sort(dim=-1).values)


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with one place of each expanded axis, because torch refuses to write to the places of all."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _is_same(inputs: Any, drawn: Any) -> bool:
    """Tell whether all tensors have the same values in both inputs.

    Tensors without a plain buffer and non-tensors are not compared.
    """
    pairs = zip(tree_leaves(inputs), tree_leaves(drawn), strict=True)
    return all(
        not isinstance(old, torch.Tensor) or not tensors.has_own_buffer(old) or _has_same_values(old, new)
        for old, new in pairs
    )


def _has_same_values(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Tell whether two tensors have the same bits, any NaN being equal to any NaN."""
    return measure(old.detach(), new.detach()).mismatches == 0


def input_leaves(program: Program) -> Leaves:
    """Return the leaves of a program's inputs by path, such as `args[0]` and `kwargs['mask']`."""
    return {**leaves_of(program.args, "args"), **leaves_of(dict(program.kwargs), "kwargs")}


def _inputs(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return program.args, dict(program.kwargs)


def _with(program: Program, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Program:
    """Return a copy of the program with these inputs, a pair of args and kwargs."""
    return replace(program, args=inputs[0], kwargs=inputs[1])


def randomise(inputs: Any, *, seed: int) -> None:
    """Overwrite the tensors among the inputs with random values of the same range, in place.

    The whole storage of a tensor is overwritten, each storage once. Real values that are all equal stay, and so do NaN
    and infinities; a single float is multiplied by 0.5 to 1.5. Tensors without a plain buffer stay.
    """
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for value in leaves_of(inputs).values():
        if not isinstance(value, torch.Tensor) or not (key := tensors.storage_key(value)) or key in done:
            continue
        done.add(key)
        # the whole storage at once, so that two views of it still agree
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        with torch.no_grad():
            whole.copy_(_draw_like(whole, generator))


def _draw_like(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random values within the range of the given ones, for floats with about their mean and deviation.

    The result is on the CPU and may have a wider dtype. Booleans keep about their share of True. NaN, infinities and
    real values that are all equal stay; a single float is multiplied by 0.5 to 1.5. Of complex values the components
    are drawn, as floats of one range.
    """
    if values.is_complex():
        return torch.view_as_complex(_draw_like(torch.view_as_real(values), generator).contiguous())
    flat = values.detach().cpu()
    if flat.dtype is torch.bool:
        both = bool(flat.any()) and not bool(flat.all())
        return torch.rand(flat.shape, generator=generator) < flat.double().mean() if both else flat
    if not flat.is_floating_point():
        wide = flat.to(torch.int64)  # the unsigned types have no minimum of their own
        low, high = int(wide.min()), int(wide.max())
        # the largest integer has none above it
        end = min(high + 1, torch.iinfo(torch.int64).max)
        return torch.randint(low, end, flat.shape, generator=generator) if low < high else flat
    wide = flat.double()
    finite = wide[torch.isfinite(wide)]
    if wide.numel() == 1:
        return wide * (0.5 + torch.rand((), generator=generator, dtype=torch.float64))
    if finite.numel() < 2:
        return wide
    drawn = finite.mean() + finite.std() * torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.isfinite(wide), drawn.clamp(finite.min(), finite.max()), wide)


Layout = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns a tensor's values in another memory layout; the second argument is its place among the inputs."""


def contiguous(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return the tensor in row-major order, or the tensor itself if it is so already."""
    return tensor.contiguous()


def transposed(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return the tensor in column-major order: its last axis is the outermost in memory.

    The result shares the tensor's memory if that is in this order already.
    """
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def transposed_by_turns(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return the tensor in column-major order if its place is odd, and the tensor itself if it is even.

    Neighbouring inputs then have different strides.
    """
    return transposed(tensor, place) if place % 2 else tensor


def with_gaps(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return a row-major copy with an unused element before each value, so that every stride is doubled.

    The unused element is NaN for floats and complex values. For integers and booleans it is 1 before a 0, and else 0.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        gap = torch.full_like(tensor, torch.nan)
    else:
        gap = (tensor == 0).to(tensor.dtype)  # small, so that a kernel that reads it as an index stays in range
    return torch.stack((gap, tensor), dim=-1)[..., 1]


def channels_last(tensor: torch.Tensor, _: int) -> torch.Tensor:
    """Return a tensor of 4 or 5 dimensions with its channels innermost in memory, and any other unchanged."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


STRIDED: Mapping[str, Layout] = {
    "transposed": transposed,
    "transposed by turns": transposed_by_turns,
    "with gaps": with_gaps,
    "channels last": channels_last,
}
"""The layouts that are not contiguous, by name."""
LAYOUTS: Mapping[str, Layout] = {"contiguous": contiguous, **STRIDED}
