"""Other inputs for a candidate that is meant for more than the user's own: other values, or other sizes.

An exported program is called with inputs that it was not traced with, one that was compiled with `dynamic=true` with
inputs of other sizes and with other whole numbers. A value, a size or an alias that was baked into it shows only there.
So the plan of such a check has further iterations, with inputs that the program itself accepts when it runs eagerly.
Start with `extend`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from torchdelta._torch.pytree import tree_map_only
from torchdelta._torch.tensors import has_values
from torchdelta.check.baseline import Baseline
from torchdelta.compare.spread import is_finite
from torchdelta.errors import EagerFails, ProgramError, TorchDeltaError
from torchdelta.program.examples import (
    FAR,
    NEAR,
    are_shared,
    can_be_resized,
    can_vary,
    has_numbers,
    input_leaves,
    redraw,
    resize_alike,
    resize_symbols,
)
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.transforms.base import OtherInputs, Transform

ATTEMPTS = 20
"""How often inputs are drawn before the question is given up."""


def extend(baseline: Baseline, transform: Transform, notes: list[str]) -> Baseline:
    """Return the baseline with further iterations on other inputs, if the transform is meant for them, and add notes.

    It is a new baseline without runs, which shares the notes and the seconds; a note says for each iteration what is
    other about its inputs. There is one for other values, and two for other sizes: neighbouring ones, and about twice
    as large ones, of which halves and quarters are others too. The inputs are the first of up to `ATTEMPTS` that the
    program accepts, with finite outputs if those of its own inputs are finite. If no other inputs can be made or the
    program accepts none, the baseline itself is returned, and a note says why. Without a note, it is returned itself if
    the transform is not meant for other inputs, if the plan has some already, or if the program raises eagerly.
    """
    kind = transform.traits.other_inputs
    if kind is None or baseline.plan.further:
        return baseline
    kinds = ("other sizes", "sizes at least twice as large") if kind is OtherInputs.SIZES else ("other values",)
    try:
        tries = _tries(baseline, transform)
    except (TorchDeltaError, NotApplicable) as error:
        notes.append(f"the candidate was not asked about {kinds[0]}: {error}")
        return baseline
    program = baseline.program
    if (expected := _forward(baseline, program)) is None:
        return baseline  # the check itself will say that the program fails
    accepted: list[Program] = []
    for what, programs in zip(kinds, tries, strict=True):
        other = _first_accepted(baseline, programs, is_finite=_is_finite(expected))
        if other is None:
            notes.append(f"the candidate was not asked about {what}: the program accepts none that were drawn")
            break  # one that refuses neighbouring sizes refuses larger ones
        if all(_sizes(other) != _sizes(each) for each in accepted) or kind is OtherInputs.VALUES:
            notes.append(f"iterations[{baseline.plan.iterations + len(accepted)}] has {_told(program, other)}")
            accepted.append(other)
    if not accepted:
        return baseline
    further = (*baseline.plan.further, *((other.args, dict(other.kwargs)) for other in accepted))
    return Baseline(
        program=program,
        plan=replace(baseline.plan, further=further, cotangent_dtypes=None),
        deterministic=baseline.deterministic,
        anomaly=baseline.anomaly,
        progress=baseline.progress,
        notes=baseline.notes,
        seconds=baseline.seconds,
    )


def _first_accepted(baseline: Baseline, programs: Iterator[Program], *, is_finite: bool) -> Program | None:
    """Return the first of up to `ATTEMPTS` programs that accepts its inputs, or None if none does.

    With `is_finite`, its outputs have to be finite.
    """
    for other in itertools.islice(programs, ATTEMPTS):
        outputs = _forward(baseline, other)
        if outputs is not None and _is_finite(outputs) >= is_finite:
            return other
    return None


class NotApplicable(Exception):
    """There is nothing in the inputs that could be other."""


def _tries(baseline: Baseline, transform: Transform) -> list[Iterator[Program]]:
    """Return for each further iteration programs with other inputs, the best first; there may be any number of them.

    NotApplicable if no input can be other: it has no elements, no size or whole number above 1, or no size that the
    result leaves open.
    """
    program, seed = baseline.program, baseline.plan.seed + 1
    apart = _with_own_memory(program)
    if transform.traits.other_inputs is OtherInputs.VALUES:
        if not can_vary(program):
            raise NotApplicable("it has no input with elements")
        return [_redraws(apart, seed)]
    if not can_be_resized(program) and not has_numbers(program):
        raise NotApplicable("no input has a size above 1")
    symbols = transform.open_sizes(Side.copied_from(apart))
    if symbols is None:
        return [resize_alike(apart, growths, seed=seed) for growths in (NEAR, FAR)]
    if not any(any(axes) for axes in symbols.values()):
        raise NotApplicable("no size of its inputs is dynamic")
    return [resize_symbols(apart, symbols, growths, seed=seed) for growths in (NEAR, FAR)]


def _redraws(program: Program, seed: int) -> Iterator[Program]:
    """Yield programs with other input values, until no draw of a turn differs from the given values."""
    for turn in itertools.count():
        has_drawn = False
        for draw in redraw(program, seed=seed + ATTEMPTS * turn):
            has_drawn = True
            yield draw
        if not has_drawn:  # such as a single zero, which is drawn by a factor
            return


def _with_own_memory(program: Program) -> Program:
    """Return the program with copies of its inputs that do not share memory, and of which none is passed twice.

    A program whose inputs are so already is returned itself.
    """
    if not are_shared(program) and not _is_passed_twice(program):
        return program

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, own, (program.args, dict(program.kwargs)))
    return replace(program, args=args, kwargs=kwargs)


def _is_passed_twice(program: Program) -> bool:
    """Tell whether one tensor is passed at two places of the inputs."""
    tensors = [id(leaf) for leaf in input_leaves(program).values() if isinstance(leaf, torch.Tensor)]
    return len(set(tensors)) < len(tensors)


def _forward(baseline: Baseline, program: Program) -> list[torch.Tensor] | None:
    """Return the tensors that the program returns in one eager call, or None if it fails."""
    plan = replace(baseline.plan, stages=("forward",), iterations=1, further=())
    runs = Baseline(program=program, plan=plan, deterministic=baseline.deterministic)
    try:
        leaves = runs.reference.stages["forward"]
    except (EagerFails, ProgramError):
        return None
    return [leaf for path, leaf in leaves.items() if path.startswith("outputs") and isinstance(leaf, torch.Tensor)]


def _is_finite(outputs: list[torch.Tensor]) -> bool:
    """Tell whether all outputs of floats are finite; other outputs, and those without values, do not count."""
    return all(is_finite(output) for output in outputs if output.is_floating_point() and has_values(output))


def _told(program: Program, other: Program) -> str:
    """Return in words which inputs have other sizes or numbers, up to three, or else that they have other values."""
    before, after = _sizes(program), _sizes(other)
    changed = [f"{path} {before[path]} → {after[path]}" for path in before if before[path] != after[path]]
    if changed:
        return f"other sizes: {', '.join(changed[:3])}" + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    is_apart = _with_own_memory(program) is not program
    return "other values" + (", and none of its inputs shares memory with another" if is_apart else "")


def _sizes(program: Program) -> dict[str, list[int] | int]:
    """Return the shapes of the input tensors, and the whole numbers among the inputs, by path."""
    leaves = input_leaves(program).items()
    shapes = {path: list(leaf.shape) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {**shapes, **{path: leaf for path, leaf in leaves if type(leaf) is int}}
