"""The inputs that an operator is probed with: the user's own, fresh values, other sizes and other layouts.

An operator with inputs is a program, and a program that eager runs is a `Baseline`. Inputs that we draw ourselves may
not suit the operator: only those that eager accepts are used. Start with `OpInputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from torchdelta import errors
from torchdelta._torch.operators import lookup, schemas
from torchdelta._torch.process import runtime
from torchdelta._torch.pytree import tree_flatten, tree_leaves, tree_unflatten
from torchdelta.check.baseline import Baseline
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.errors import ProgramError
from torchdelta.program import examples
from torchdelta.program.copies import copy_together
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.program.stages import OPTIMIZERS, Plan


def program_of(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Return the program that calls the operator with these arguments and returns its outputs.

    A check copies the inputs, and a copy is an autograd leaf, which cannot be written to if it requires grad. So inputs
    that require grad are cloned before the call if they are not leaves or if the operator declares to change them. A
    program with such inputs returns a pair: the outputs, and a list of the clones.
    """
    cloned = _places_to_clone(op, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def call_with_clones(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        inner = [leaf.clone() if place in cloned else leaf for place, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = tree_unflatten(inner, spec)
        return op(*inner_args, **inner_kwargs), [inner[place] for place in cloned]

    name = lookup.name_of(op)
    return Program(name=name, call=call_with_clones if cloned else call, args=args, kwargs=dict(kwargs))


def call_on_copies(side: Side, baseline: Baseline, *, seed: int | None = None) -> Leaves:
    """Call a side eagerly on copies of its inputs; return copies of its outputs and of its input tensors afterwards.

    They are leaves by path, which starts with `outputs`, `args` or `kwargs`. The generators are seeded with `seed`, or
    with that of the baseline's plan if it is None. What the call raises is raised.
    """
    args, kwargs = copy_together((side.args, side.kwargs), name=baseline.program.name)
    runtime.seed_everything(baseline.plan.seed if seed is None else seed)
    with baseline.eager_scope():
        returned = side.call(*args, **kwargs)
    # the next call may write to the memory of these outputs
    returned, args, kwargs = copy_together((returned, args, kwargs), name="the outputs")
    inputs = {**leaves_of(args, "args"), **leaves_of(kwargs, "kwargs")}
    tensors = {path: leaf for path, leaf in inputs.items() if isinstance(leaf, torch.Tensor)}
    return {**leaves_of(returned, "outputs"), **tensors}


def _places_to_clone(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the places, counted over all leaves of args and then kwargs, of the inputs that `program_of` clones.

    These are tensors that require grad and either are not autograd leaves or are declared as written to. A tensor that
    occurs twice is listed at its first place only.
    """
    positions = schemas.positions_of(op)
    written = [
        kwargs[name] if name in kwargs else args[positions[name]]
        for name in schemas.written_by(op)
        if name in kwargs or positions[name] < len(args)
    ]
    changed = {id(leaf) for leaf in tree_leaves(written)}
    earlier: set[int] = set()
    places = []
    for place, leaf in enumerate(tree_leaves((args, dict(kwargs)))):
        is_to_clone = (
            isinstance(leaf, torch.Tensor) and leaf.requires_grad and (not leaf.is_leaf or id(leaf) in changed)
        )
        if is_to_clone and id(leaf) not in earlier:
            places.append(place)
        earlier.add(id(leaf))
    return tuple(places)


class RaisedOnceMore(Exception):
    """The operator raised, although it ran on these inputs before; the message says what it raised."""


@contextmanager
def calling_once_more() -> Iterator[None]:
    """Return a context manager for a further call of the operator: an exception of it becomes RaisedOnceMore.

    Errors of torchdelta pass through.
    """
    try:
        yield
    except errors.TorchDeltaError:
        raise
    except errors.caught_from_user_code() as error:
        raise RaisedOnceMore(f"called once more it raises {describe_error(error)}") from error


FORWARD = ("forward",)


@dataclass(kw_only=True)
class OpInputs:
    """An operator with its arguments, and with other inputs that are derived from them."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
    """Arguments of other sizes that the user gave."""
    stages: tuple[str, ...]
    seed: int

    backward_error: str = ""
    """What the backward raises eagerly, so that no probe can ask about it; set when `own` runs."""
    other_backward_error: str = ""
    """What the backward raises for other inputs that the forward takes; set when `fresh` or `resized` runs."""
    layout_error: str = ""
    """What the forward raises for another layout of the user's inputs; set when `laid_out` runs."""

    @cached_property
    def own(self) -> Baseline:
        """The operator with the user's own inputs, after an eager run; ProgramError if the forward raises.

        If only the backward raises, the baseline is of the forward alone, and so are those of all other inputs:
        `stages` becomes `FORWARD`, and `backward_error` says what was raised.
        """
        program = program_of(self.op, self.args, self.kwargs)
        baseline = self._baseline(program)
        try:
            baseline.reference  # noqa: B018
        except ProgramError as error:
            forward = self._run_forward(program)
            if forward is None:
                raise
            self.stages, self.backward_error = FORWARD, _cause_of(error)
            return forward
        return baseline

    @cached_property
    def fresh(self) -> list[Baseline]:
        """The operator with fresh values of the same sizes, after an eager run, as a list of one baseline.

        It is empty if the operator rejects all that were drawn, or if none differ from the user's. If only the backward
        raises for them, the baseline is of the forward alone, and `other_backward_error` is set.
        """
        accepted = self._first_accepted(examples.redraw(self.own.program, seed=self.seed + 1))
        return [accepted] if accepted else []

    @cached_property
    def resized(self) -> list[Baseline]:
        """The operator with inputs of other sizes, after eager runs: the user's `others`, or else at most two of ours.

        Without `others` it is empty if inputs share memory or if it accepts none of ours; if only the backward raises
        for ours, the baseline is of the forward alone, and `other_backward_error` is set. ProgramError if it raises for
        one of `others`.
        """
        if self.others:
            return [self._other(place) for place in range(len(self.others))]
        kinds = examples.resize(self.own.program, seed=self.seed + 1)
        return [accepted for tries in kinds if (accepted := self._first_accepted(tries))]

    @cached_property
    def laid_out(self) -> dict[str, Baseline]:
        """The forward with the same values in each other memory layout that it accepts, by the name of the layout.

        If it rejects layouts, `layout_error` becomes a text about the last of them. Empty if there is no other layout
        that it accepts, as for inputs that share memory.
        """
        baselines = {}
        for name, program in examples.relayout(self.own.program):
            baseline = self._baseline(program, FORWARD)
            try:
                baseline.reference  # noqa: B018
            except ProgramError as error:
                self.layout_error = f"it rejects inputs that are {name} in memory: {_cause_of(error)}"
                continue
            baselines[name] = baseline
        return baselines

    @property
    def why_no_layouts(self) -> str:
        """Why `laid_out` is empty; it has a meaning only then."""
        if self.are_shared:
            return "its inputs share memory, so they have no other layout"
        return self.layout_error or "no input has another layout in memory"

    @property
    def resized_alike(self) -> list[Baseline]:
        """Those of `resized` whose tensors have the dtypes and ranks of the user's, with the same other arguments."""
        kinds = _kinds_of(self.own.program)
        return [baseline for baseline in self.resized if _kinds_of(baseline.program) == kinds]

    def _other(self, place: int) -> Baseline:
        """Return the operator with the arguments `others[place]`, after an eager run of all `stages`.

        Raise ProgramError, which names the place, if the forward or the backward raises.
        """
        args, kwargs = self.others[place]
        baseline = self._baseline(program_of(self.op, tuple(args), dict(kwargs or {})))
        try:
            baseline.reference  # noqa: B018
        except ProgramError as error:
            raise ProgramError(f"others[{place}]: {error}") from error
        return baseline

    @property
    def can_be_resized(self) -> bool:
        """Whether any input tensor has a size above 1, which could change."""
        return examples.can_be_resized(self.own.program)

    @property
    def can_vary(self) -> bool:
        """Whether any input is a tensor with elements, whose values a trace could depend on."""
        return examples.can_vary(self.own.program)

    @property
    def are_shared(self) -> bool:
        """Whether two different input tensors share memory."""
        return examples.are_shared(self.own.program)

    @property
    def why_no_sizes(self) -> str:
        """Why `resized` is empty; it has a meaning only then."""
        if not self.can_be_resized:
            return "no input has a size that can change"
        if self.are_shared:
            return "its inputs share memory, so they have no other sizes"
        return "it rejects every other size that was tried"

    @property
    def floats(self) -> list[torch.Tensor]:
        """The input tensors of floating-point or complex numbers, also those in lists and dicts."""
        tensors = (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))
        return [leaf for leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]

    def _first_accepted(self, programs: Iterator[Program]) -> Baseline | None:
        """Return the baseline of the first program that runs eagerly in all stages, or else the first forward to run.

        The latter is a baseline of the forward alone. None if no forward runs. If a forward runs whose backward raises,
        `other_backward_error` is set, even if a later program is returned.
        """
        forward: Baseline | None = None
        for program in programs:
            baseline = self._baseline(program)
            try:
                baseline.reference  # noqa: B018
            except ProgramError as error:
                if forward is None and (forward := self._run_forward(program)):
                    self.other_backward_error = _cause_of(error)
                continue
            return baseline
        return forward

    def _run_forward(self, program: Program) -> Baseline | None:
        """Return the baseline of the program's forward alone, after an eager run; None if the forward raises.

        None, without a run, also if `stages` has the forward only, because the caller has tried that already.
        """
        if self.stages == FORWARD:
            return None
        baseline = self._baseline(program, FORWARD)
        try:
            baseline.reference  # noqa: B018
        except ProgramError:
            return None
        return baseline

    def _baseline(self, program: Program, stages: tuple[str, ...] | None = None) -> Baseline:
        """Return a baseline of the program, which was not run yet; `stages` are those of this record if None."""
        plan = Plan(
            stages=stages or self.stages, seed=self.seed, iterations=1, steps=1, optimizer=OPTIMIZERS.get("adamw")
        )
        return Baseline(program=program, plan=plan)


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; empty if it has none."""
    return str(error).strip().partition("\n")[0]


def _cause_of(error: ProgramError) -> str:
    """Return type and first line of the exception behind an error, or of the error itself if there is none."""
    return describe_error(error.__cause__ or error)


def _kinds_of(program: Program) -> list[Any]:
    """Return dtype and number of dimensions of each tensor input, and the `repr` of each other input, in order."""
    leaves = tree_leaves((program.args, dict(program.kwargs)))
    return [(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
