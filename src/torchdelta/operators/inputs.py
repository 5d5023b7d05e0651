"""An operator as a program: called as its users call it.

What an operator is asked with: the given inputs, fresh values, other sizes, other layouts; each as it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

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


def operated(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Return the call of an operator.

    A copy of an input is a leaf, and a leaf that requires grad cannot be written to: what is none of the caller's, or
    what the operator declares to change, is made one that is not inside of the call, and returned besides.
    """
    inside = _not_leaves(op, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def call_inside(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf.clone() if place in inside else leaf for place, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = tree_unflatten(given, spec)
        return op(*inner_args, **inner_kwargs), [given[place] for place in inside]

    name = lookup.name_of(op)
    return Program(name=name, call=call_inside if inside else call, args=args, kwargs=dict(kwargs))


def called(side: Side, baseline: Baseline, *, seed: int | None = None) -> Leaves:
    """Call it once on copies, and return what it returns with what it leaves in its inputs."""
    args, kwargs = copy_together((side.args, side.kwargs), name=baseline.program.name)
    runtime.seed_everything(baseline.plan.seed if seed is None else seed)
    with baseline.eager_scope():
        returned = side.call(*args, **kwargs)
    # its memory may be written to by the next call
    returned, args, kwargs = copy_together((returned, args, kwargs), name="the outputs")
    left = {**leaves_of(args, "args"), **leaves_of(kwargs, "kwargs")}
    kept = {path: leaf for path, leaf in left.items() if isinstance(leaf, torch.Tensor)}
    return {**leaves_of(returned, "outputs"), **kept}


def _not_leaves(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    positions = schemas.positions_of(op)
    written = [
        kwargs[name] if name in kwargs else args[positions[name]]
        for name in schemas.written_by(op)
        if name in kwargs or positions[name] < len(args)
    ]
    changed = {id(leaf) for leaf in tree_leaves(written)}
    met: set[int] = set()
    found = []
    for place, leaf in enumerate(tree_leaves((args, dict(kwargs)))):
        is_inside = isinstance(leaf, torch.Tensor) and leaf.requires_grad and (not leaf.is_leaf or id(leaf) in changed)
        if is_inside and id(leaf) not in met:
            found.append(place)
        met.add(id(leaf))
    return tuple(found)


FORWARD = ("forward",)


@dataclass(kw_only=True)
class OpInputs:
    """An operator with its arguments, and with those that are made of them."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
    """Arguments of other sizes that the user gave."""
    stages: tuple[str, ...]
    seed: int

    no_backward: str = ""
    """What the backward raises eagerly, so that nothing can be asked about it; known once `given` was run."""
    rejected_backward: str = ""
    """What it raises with other inputs that the forward takes."""
    rejected_layout: str = ""
    """What the forward raises for another layout of the given inputs; known once `laid_out` was asked for."""

    @cached_property
    def given(self) -> Baseline:
        """The operator with the inputs that were given; ProgramError where it does not take them."""
        program = operated(self.op, self.args, self.kwargs)
        baseline = self._baseline(program)
        try:
            baseline.reference  # noqa: B018
        except ProgramError as error:
            alone = self._forward_of(program)
            if alone is None:
                raise
            self.stages, self.no_backward = FORWARD, _cause_of(error)
            return alone
        return baseline

    @cached_property
    def fresh(self) -> list[Baseline]:
        """The same with fresh values that the operator takes."""
        found = self._accepted(examples.redraw(self.given.program, seed=self.seed + 1))
        return [found] if found else []

    @cached_property
    def resized(self) -> list[Baseline]:
        """The same with other sizes; empty where the operator takes none, and `no_other_sizes` says why."""
        if self.others:
            return [self._other(place) for place in range(len(self.others))]
        kinds = examples.resize(self.given.program, seed=self.seed + 1)
        return [found for tries in kinds if (found := self._accepted(tries))]

    @cached_property
    def laid_out(self) -> dict[str, Baseline]:
        """The same values in other layouts that the operator takes, each by its name: forward only."""
        found = {}
        for name, program in examples.relayout(self.given.program):
            baseline = self._baseline(program, FORWARD)
            try:
                baseline.reference  # noqa: B018
            except ProgramError as error:
                self.rejected_layout = f"it rejects inputs that are {name} in memory: {_cause_of(error)}"
                continue
            found[name] = baseline
        return found

    @property
    def no_other_layouts(self) -> str:
        """Why there are no other layouts."""
        if self.are_shared:
            return "what shares memory has no other layout"
        return self.rejected_layout or "it has no input that could lie otherwise in memory"

    @property
    def resized_alike(self) -> list[Baseline]:
        """Those that differ from the given ones in sizes and values of tensors only."""
        kinds = _kinds_of(self.given.program)
        return [baseline for baseline in self.resized if _kinds_of(baseline.program) == kinds]

    def _other(self, place: int) -> Baseline:
        args, kwargs = self.others[place]
        baseline = self._baseline(operated(self.op, tuple(args), dict(kwargs or {})))
        try:
            baseline.reference  # noqa: B018
        except ProgramError as error:
            raise ProgramError(f"others[{place}]: {error}") from error
        return baseline

    @property
    def can_be_resized(self) -> bool:
        """Whether any input has a size to change."""
        return examples.can_be_resized(self.given.program)

    @property
    def can_vary(self) -> bool:
        """Whether any input has values that a trace could depend on."""
        return examples.can_vary(self.given.program)

    @property
    def are_shared(self) -> bool:
        """Whether two of the inputs have the same memory."""
        return examples.are_shared(self.given.program)

    @property
    def no_other_sizes(self) -> str:
        """Why there are no other sizes."""
        if not self.can_be_resized:
            return "no input has a size that could be another"
        if self.are_shared:
            return "what shares memory has no other size"
        return "it rejects every other size that was tried"

    @property
    def floats(self) -> list[torch.Tensor]:
        """The inputs that could have gradients."""
        found = (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))
        return [leaf for leaf in found if leaf.is_floating_point() or leaf.is_complex()]

    def _accepted(self, programs: Iterator[Program]) -> Baseline | None:
        """Return the first that the operator takes: what it rejects before is nobody's fault.

        One that its forward takes and its backward does not is kept with its forward alone.
        """
        alone: Baseline | None = None
        for program in programs:
            baseline = self._baseline(program)
            try:
                baseline.reference  # noqa: B018
            except ProgramError as error:
                if alone is None and (alone := self._forward_of(program)):
                    self.rejected_backward = _cause_of(error)
                continue
            return baseline
        return alone

    def _forward_of(self, program: Program) -> Baseline | None:
        if self.stages == FORWARD:
            return None
        baseline = self._baseline(program, FORWARD)
        try:
            baseline.reference  # noqa: B018
        except ProgramError:
            return None
        return baseline

    def _baseline(self, program: Program, stages: tuple[str, ...] | None = None) -> Baseline:
        plan = Plan(
            stages=stages or self.stages, seed=self.seed, iterations=1, steps=1, optimizer=OPTIMIZERS.get("adamw")
        )
        return Baseline(program=program, plan=plan)


def _cause_of(error: ProgramError) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".partition("\n")[0]


def _kinds_of(program: Program) -> list[Any]:
    leaves = tree_leaves((program.args, dict(program.kwargs)))
    return [(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
