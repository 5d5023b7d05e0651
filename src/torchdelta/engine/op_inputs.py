"""What an operator is asked with: the given inputs, fresh values, other sizes; each with what it does eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from torchdelta._torch.trees import tree_leaves
from torchdelta.engine.baseline import Baseline
from torchdelta.engine.operated import operated
from torchdelta.errors import ProgramError
from torchdelta.execute import examples
from torchdelta.execute.optimizers import OPTIMIZERS
from torchdelta.execute.programs import Program
from torchdelta.execute.stages import Plan


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
    """What the backward raises eagerly, so that nothing can be asked about it."""

    @cached_property
    def given(self) -> Baseline:
        """The operator with the inputs that were given; ProgramError where it does not take them."""
        program = operated(self.op, self.args, self.kwargs)
        baseline = self._baseline(program)
        try:
            baseline.reference  # noqa: B018
        except ProgramError as error:
            # its forward alone may do
            self.stages, stages = ("forward",), self.stages
            alone = self._baseline(program)
            if stages == self.stages:
                raise
            alone.reference  # noqa: B018
            self.no_backward = f"{type(error.__cause__).__name__}: {error.__cause__}".partition("\n")[0]
            return alone
        return baseline

    @cached_property
    def fresh(self) -> list[Baseline]:
        """The same with fresh values that the operator takes."""
        return list(self._accepted(examples.fresh(self.given.program, seed=self.seed + 1)))

    @cached_property
    def resized(self) -> list[Baseline]:
        """The same with other sizes; empty where the operator takes none, and `no_other_sizes` says why."""
        if self.others:
            return [self._baseline(operated(self.op, tuple(args), kwargs)) for args, kwargs in self.others]
        return list(self._accepted(examples.resized(self.given.program, seed=self.seed + 1)))

    @property
    def can_be_resized(self) -> bool:
        """Whether any input has a size to change."""
        return examples.can_be_resized(self.given.program)

    @property
    def no_other_sizes(self) -> str:
        """Why there are no other sizes."""
        if not self.can_be_resized:
            return "no input has a size that could be another"
        return "it rejects every other size that was tried"

    @property
    def floats(self) -> list[torch.Tensor]:
        """The inputs that could have gradients."""
        found = (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))
        return [leaf for leaf in found if leaf.is_floating_point() or leaf.is_complex()]

    def _accepted(self, programs: Iterator[Program]) -> Iterator[Baseline]:
        """Yield the first that the operator takes: what it rejects before is nobody's fault."""
        for program in programs:
            baseline = self._baseline(program)
            try:
                baseline.reference  # noqa: B018
            except ProgramError:
                continue
            yield baseline
            return

    def _baseline(self, program: Program) -> Baseline:
        plan = Plan(stages=self.stages, seed=self.seed, iterations=1, steps=1, optimizer=OPTIMIZERS.get("adamw"))
        return Baseline(program=program, plan=plan)
