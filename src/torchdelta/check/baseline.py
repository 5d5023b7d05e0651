"""What a program does without any candidate: the reference, the truth and noisy runs, each run once and when needed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from torchdelta._torch.compile import stances
from torchdelta._torch.modes import lift
from torchdelta._torch.modes.elided_casts import coarser
from torchdelta._torch.modes.noisy import Noisy
from torchdelta._torch.process import runtime
from torchdelta.check.decisions import SignFlips
from torchdelta.errors import EagerFails, ProgramError
from torchdelta.program.copies import shared_state_unchanged
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side, started_from, varied_in
from torchdelta.program.stages import Observation, Plan, Scope, SideFailed, observe

Progress = Callable[[str], None]


@dataclass(kw_only=True)
class Baseline:
    """A program under a plan; several candidates may be held against one."""

    program: Program
    plan: Plan
    deterministic: bool = False
    anomaly: bool = False
    progress: Progress = lambda _: None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    shortfall: str = ""
    """Why less was run than was asked for."""
    has_chosen: bool = False
    """Whether noisy runs saw the program choose among floats."""
    narrowed_to: torch.dtype | None = None
    """The coarsest dtype that the program casts something finer to, as noisy runs saw it."""
    unlifted: set[str] = field(default_factory=set)
    """Operations and casts that have no float64, and ran in the truth as they do natively."""
    no_truth: str = ""
    """Why there is no truth."""
    noisy_runs: dict[tuple[int, bool, torch.dtype | None], Observation | None] = field(default_factory=dict)

    @cached_property
    def original(self) -> Side:
        """The program itself, which nobody runs: its tensors stand for those that a run left as they were."""
        return Side.of(self.program.call, self.program.args, dict(self.program.kwargs))

    @cached_property
    def reference(self) -> Observation:
        """The program run eagerly."""
        with self.timed("reference"):
            return self.run_reference()

    @cached_property
    def second_reference(self) -> Observation:
        """The program run eagerly once more: where it differs from the first run, it is not deterministic."""
        with self.timed("second reference"):
            return self.run_reference()

    @cached_property
    def truth(self) -> Observation | None:
        """The program run in float64; None where that is not possible, and `no_truth` says why."""
        with self.timed("truth"):
            run, self.no_truth = self._run_lifted(self.drawn_in)
            held = {tensor.dtype for tensor in started_from(self.original) if tensor.is_floating_point()}
            coarse = (dtype for dtype in held if lift.widened(dtype) is not torch.float64)
            self.unlifted |= {f"what is given in {str(dtype).removeprefix('torch.')}" for dtype in coarse}
            if run is not None and self.unlifted:
                named = ", ".join(sorted(self.unlifted))
                self.notes.append(f"the truth is not all in float64: {named} is as in the reference")
            return run

    @cached_property
    def lifted_reference(self) -> Observation | None:
        """The truth as a lifted candidate sees it: random numbers are drawn in float64 by both."""
        if self.truth is None or self.lifted_draws == self.drawn_in:
            return self.truth
        with self.timed("semantic"):
            return self._run_lifted(self.lifted_draws)[0]

    @property
    def lifted_draws(self) -> torch.dtype:
        """The dtype in which a lifted candidate draws random numbers, if it does."""
        return torch.float64 if self.reference.draws_random else self.drawn_in

    def noisy(self, count: int, *, lifted: bool = False, lowered_to: torch.dtype | None = None) -> list[Observation]:
        """Return noisy runs of the program, native or in float64, or lifted and rounded to a lower dtype."""
        for index in range(count):
            if (index, lifted, lowered_to) not in self.noisy_runs:
                with self.timed("noise"):
                    self.noisy_runs[index, lifted, lowered_to] = self._run_noisy(index, lifted, lowered_to)
        runs = (self.noisy_runs[index, lifted, lowered_to] for index in range(count))
        return [run for run in runs if run is not None]

    def run_reference(self) -> Observation:
        """Run the reference; random inputs that it rejects are not the program's fault, and end the iterations."""
        try:
            with shared_state_unchanged(self.program.call, name=self.program.name):
                return observe(Side.copied_from(self.program), self.plan, self.original, self.eager_scope)
        except SideFailed as failed:
            if failed.iteration:
                self.shortfall = (
                    f"iteration {failed.iteration} did not run: the program rejects random inputs ({failed})"
                )
                self.plan = replace(self.plan, iterations=failed.iteration)
                return self.run_reference()
            remedy = "" if failed.stage == "forward" else f", or leave the stage {failed.stage} out"
            raise EagerFails(
                f"{self.program.name} fails when run eagerly, before any transform: {failed}. Mend it{remedy}"
            ) from failed.error

    @property
    def drawn_in(self) -> torch.dtype:
        """The dtype in which the program draws random numbers, as far as can be told."""
        floats = (tensor.dtype for tensor in started_from(self.original) if tensor.is_floating_point())
        return next(floats, torch.get_default_dtype())

    def _run_lifted(self, drawn_in: torch.dtype) -> tuple[Observation | None, str]:
        try:
            side = Side.copied_from(self.program, convert=lift.widened)
            return observe(side, self.plan, self.original, self.lifted_scope(drawn_in), lift.widened), ""
        except (SideFailed, ProgramError) as error:
            return None, f"the program does not run in float64 ({error})"

    def _run_noisy(self, index: int, lifted: bool, lowered_to: torch.dtype | None) -> Observation | None:
        """Run the program with every rounding moved; what the reference left as it was, nobody asks about."""
        in_float64 = lifted or lowered_to is not None
        convert = lift.widened if in_float64 else lambda dtype: dtype
        unit = None if lowered_to is None else float(torch.finfo(lowered_to).eps)
        mode = Noisy(seed=self.plan.seed + index, unit=unit)
        draws = self.lifted_draws if lifted else self.drawn_in
        scope = self.lifted_scope(draws) if in_float64 else self.eager_scope
        side = Side.copied_from(self.program, convert=convert)

        @contextmanager
        def noisy_scope() -> Iterator[None]:
            with scope(), mode:
                yield

        reference = self.reference
        mode.start_from(varied_in(side))
        originals = {id(tensor) for tensor in started_from(self.original)}
        undecided = SignFlips(reference, self.truth, seed=self.plan.seed + index)
        try:
            run = observe(
                side,
                self.plan,
                self.original,
                noisy_scope,
                convert,
                keeps=lambda stage, path: id(reference.stages[stage].get(path)) not in originals,
                before_step=undecided.flip,
            )
            self.has_chosen |= mode.has_chosen
            if mode.narrowed_to is not None and not in_float64:
                self.narrowed_to = coarser(self.narrowed_to, mode.narrowed_to)
            return run
        except SideFailed as failed:
            self.notes.append(f"a noisy run of the program failed, so its noise is not known: {failed}")
            return None

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Hold the flags that the case asks for."""
        with runtime.preserved_flags():
            if self.deterministic:
                runtime.use_deterministic()
            if self.anomaly:
                torch.autograd.set_detect_anomaly(True)
            yield

    @contextmanager
    def eager_scope(self) -> Iterator[None]:
        """Run as `scope` does, and eagerly: a program that compiles a part of itself is no reference while it does."""
        with self.scope(), stances.eager_here():
            yield

    def lifted_scope(self, drawn_in: torch.dtype) -> Scope:
        """Return a scope in which nothing rounds below float64."""

        @contextmanager
        def lifted() -> Iterator[None]:
            with self.eager_scope(), lift.Lift(drawn_in, self.unlifted):
                yield

        return lifted

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a part of the work; parts within parts count once."""
        self.progress(part)
        started = time.perf_counter()
        inner = sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - inner
            elapsed = time.perf_counter() - started - within
            self.seconds[part] = self.seconds.get(part, 0.0) + elapsed
            # what a side leaves in cycles and caches must not add to the peak of the next
            gc.collect()
            runtime.release_memory()
