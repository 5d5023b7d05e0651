"""The runs of a program in a check: the reference, the truth, noisy runs, and every candidate.

A run is a fresh copy of the program, observed under the plan of the case. There are two ways to make one:
`Baseline.observe` runs the program itself, eagerly, natively or in float64, with noise or within other modes;
`Baseline.run` runs what a transform makes of it. Reference, truth and noisy runs are kept, so that several candidates
can be held against one baseline.

    baseline = Baseline(program=program, plan=plan)
    baseline.reference                        # the same as baseline.observe(), run once
    baseline.observe(lifted=True)             # once more in float64
    baseline.run(transform).observation       # a candidate
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from torchdelta._torch.compile import stances
from torchdelta._torch.modes import lift
from torchdelta._torch.modes.dtype_answers import Answer, DtypeRecord, DtypeReplay
from torchdelta._torch.modes.elided_casts import coarser
from torchdelta._torch.modes.noisy import Noisy
from torchdelta._torch.process import runtime
from torchdelta._torch.tensors import has_own_buffer, has_values
from torchdelta.check import steadiness
from torchdelta.check.candidate import CandidateRun, run_candidate
from torchdelta.check.decisions import SignFlips
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.errors import EagerFails, ProgramError
from torchdelta.program.copies import Convert, originals_unchanged, shared_state_unchanged
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side, started_from, varied_in
from torchdelta.program.stages import BeforeStep, Keeps, Observation, Plan, Scope, SideFailed, observe
from torchdelta.transforms.base import Transform

TOUCHED = (
    "the candidate changed how this process runs the program itself, as an overridden kernel or a patched function "
    "does: only runs before it count"
)

_LARGE = 2**24
"""So many bytes of parameters and inputs make a program large."""

_ROUNDINGS = 4
"""A few roundings."""


class YardstickTouched(SideFailed):
    """A run of the program would say nothing now, because a candidate changed how this process runs it."""


Progress = Callable[[str], None]
Mode = AbstractContextManager[object]


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
    """Why fewer iterations ran than the plan has."""
    has_chosen: bool = False
    """Whether the program chooses among floats (topk, argmax, sort), as its noisy runs showed."""
    narrowed_to: torch.dtype | None = None
    """The coarsest dtype that the program casts finer values to, as its noisy runs showed."""
    unlifted: set[str] = field(default_factory=set)
    """Operations and casts that have no float64, and run in the truth as they do natively."""
    no_truth: str = ""
    """Why there is no truth."""
    noisy_runs: dict[tuple[int, bool, torch.dtype | None, bool], Observation | None] = field(default_factory=dict)
    has_run_candidate: bool = False
    """Whether a candidate ran after the reference, in this process, which it may have changed."""
    recorded_answers: list[Answer] | None = None
    """What the reference was told when it asked for dtypes; None before it ran."""

    def observe(
        self,
        *modes: Mode,
        lifted: bool = False,
        told: bool = True,
        noise: Noisy | None = None,
        draws: torch.dtype | None = None,
        plan: Plan | None = None,
        keeps: Keeps = lambda *_: True,
        before_step: BeforeStep = lambda *_: None,
    ) -> Observation:
        """Run a copy of the program eagerly within these modes, and return the observation of its stages.

        With `lifted` it runs in float64, and draws random numbers in the dtype `draws`, or in `drawn_in` if that is
        None; the reference runs first if it did not yet, because cotangents have its dtypes. If the program asks for a
        dtype there, it is told that of the reference, unless `told` is False. With `noise` its roundings are moved.
        `plan` replaces the baseline's own; `keeps` and `before_step` are those of `stages.observe`. Raise SideFailed if
        the program raises, or if it is told dtypes and asks a question about them that the reference did not ask there,
        because then it takes another path; a program with a `lifted_call` may ask any. Raise YardstickTouched if a
        candidate changed how this process runs it, and ProgramError if it cannot be copied.
        """
        self._require_untouched()
        _ = self.reference if lifted else None
        replay = self._replay() if lifted and told else None
        modes = modes if replay is None else (*modes, replay)
        side, convert, scope = self._prepare(modes, lifted=lifted, noise=noise, draws=draws)
        run = observe(side, plan or self.plan, self.original, scope, convert, keeps=keeps, before_step=before_step)
        if replay is not None and replay.astray:
            raise SideFailed("forward", 0, run, _other_path(replay))
        return run

    def outputs(self, *modes: Mode, lifted: bool = False, noise: Noisy | None = None) -> Leaves:
        """Call a copy of the program once, as `observe` would; return the leaves of its outputs by path, not copied.

        The plan's seed is set before the call, and state that all sides share is put back after it. An exception of the
        program is raised as it is, and not as SideFailed; ProgramError if in float64 it asks a question about dtypes
        that the reference did not ask there. Raise YardstickTouched if a candidate changed how this process runs the
        program.
        """
        self._require_untouched()
        replay = self._replay() if lifted else None
        modes = modes if replay is None else (*modes, replay)
        side, _, scope = self._prepare(modes, lifted=lifted, noise=noise)
        shared = self.original.unrun.shared
        runtime.seed_everything(self.plan.seed)
        try:
            with scope():
                returned = side.call(*side.args, **side.kwargs)
        finally:
            shared.put_back()
        if replay is not None and replay.astray:
            raise _other_path(replay)
        return leaves_of(returned, "outputs")

    def run(
        self,
        transform: Transform,
        *,
        lifted: bool = False,
        plan: Plan | None = None,
        draws_random: bool | None = None,
        is_eager: bool = False,
        answers: Sequence[Answer] = (),
    ) -> CandidateRun:
        """Apply a transform to a copy of the program, in float64 if `lifted`, and return the candidate's run.

        If the candidate raises, the run has the failure, but a TorchDeltaError is raised, as by `run_candidate`.
        `draws_random` says whether the candidate has to draw the reference's random numbers; None asks the reference,
        which then has to run. `plan` replaces the baseline's own. With `is_eager`, a program that compiles parts of
        itself runs these parts eagerly. `answers` are the dtypes that the candidate's native run was told; a lifted run
        is told them again, and a native run ignores them. Sets `has_run_candidate` if the reference has run before.
        """
        if draws_random is None:
            draws_random = self.reference.draws_random
        convert, program = (lift.widened, self.program.lifted) if lifted else (_unchanged, self.program)
        # without a reference from before there is nothing to notice a change by
        self.has_run_candidate |= "reference" in vars(self)
        shared = self.original.unrun.shared  # a transform may run the program when it is applied
        try:
            return run_candidate(
                transform,
                Side.copied_from(program, convert=convert, with_callable=transform.traits.reads_program),
                plan or self.plan,
                original=self.original,
                scope=self.eager_scope if is_eager else self.scope,
                draws_random=draws_random,
                lifted=self.lifted_scope(self.lifted_draws) if lifted else None,
                answers=answers,
            )
        finally:
            shared.put_back()

    def _prepare(
        self,
        modes: tuple[Mode, ...],
        *,
        lifted: bool,
        noise: Noisy | None,
        draws: torch.dtype | None = None,
    ) -> tuple[Side, Convert, Scope]:
        """Return a fresh copy of the program, the conversion of its dtypes, and a maker of the context to run it in.

        The copy is in float64 if `lifted`. `noise` is told, in place, to depend on the copy's parameters and inputs.
        The context has the flags of the case, the noise, the modes, and float64 if `lifted`, with random numbers drawn
        in `draws`, or in `drawn_in` if that is None.
        """
        convert = lift.widened if lifted else _unchanged
        outer = self.lifted_scope(draws or self.drawn_in) if lifted else self.eager_scope
        side = Side.copied_from(self.program.lifted if lifted else self.program, convert=convert)
        if noise is not None:
            noise.depend_on(varied_in(side))
            modes = (noise, *modes)

        @contextmanager
        def scope() -> Iterator[None]:
            """Enter the outer context, and in it each mode in its order."""
            with ExitStack() as stack:
                stack.enter_context(outer())
                for mode in modes:
                    stack.enter_context(mode)
                yield

        return side, convert, scope

    @cached_property
    def original(self) -> Side:
        """The program itself. It is never run: its tensors stand for those that a run left unchanged."""
        return Side.of(self.program.call, self.program.args, dict(self.program.kwargs))

    @cached_property
    def own_tensors(self) -> frozenset[int]:
        """The ids of the tensors that the program starts from; a leaf that a run did not change is one of them."""
        return frozenset(map(id, started_from(self.original)))

    @cached_property
    def reference(self) -> Observation:
        """The observation of the program run eagerly, which runs once; raise EagerFails if its first iteration raises.

        `_run_reference` says what else a failure does.
        """
        with self.timed("reference"):
            return self._run_reference()

    @property
    def _dtype_answers(self) -> list[Answer]:
        """What the reference was told when it asked for dtypes; it runs first if it did not yet."""
        if self.recorded_answers is None:
            _ = self.reference
        return self.recorded_answers or []

    def _replay(self) -> DtypeReplay | None:
        """Return the mode that tells a run in float64 the dtypes that the reference was told.

        None for a program that has a callable of its own for float64: it asks for none, and casts otherwise.
        """
        return DtypeReplay(self._dtype_answers) if self.program.lifted_call is None else None

    @cached_property
    def second_reference(self) -> Observation:
        """The observation of one more eager run, made once; it differs from the first if the program is unsteady.

        It raises as `_run_again` does.
        """
        with self.timed("second reference"):
            return self._run_again()

    @cached_property
    def is_touched(self) -> bool:
        """Whether a candidate changed how this process runs the program, as an overridden kernel does.

        It did if two more runs of the reference agree with each other, but not with the first, or if one of them fails;
        a note then says so. If the two differ as well, the program is not deterministic, and the answer is False. The
        answer is found once and kept.
        """
        try:
            if not steadiness.differing_runs(self.reference, self.second_reference):
                return False
            with self.timed("second reference"):
                third = self._run_again()
        except (SideFailed, ProgramError) as failed:
            self.notes.append(f"{TOUCHED} (after the candidate it fails: {failed})")
            return True
        if steadiness.differing_runs(self.second_reference, third):
            return False
        self.notes.append(TOUCHED)
        return True

    def _run_again(self) -> Observation:
        """Run the reference once more, even in a process that a candidate changed, and return its observation.

        It raises as `_observe_reference` does.
        """
        has_run, self.has_run_candidate = self.has_run_candidate, False
        try:
            return self._observe_reference()[0]
        finally:
            self.has_run_candidate = has_run

    def _require_untouched(self) -> None:
        """Raise YardstickTouched if a candidate changed how this process runs the program.

        If a candidate ran after the reference, the reference runs again to tell. Otherwise nothing happens.
        """
        if self.has_run_candidate and self.is_touched:
            raise YardstickTouched("forward", 0, Observation(), ProgramError(TOUCHED))

    def measure_ahead(self, *, lowered_to: torch.dtype | None = None) -> None:
        """Make and keep the runs that most verdicts rest on, before a candidate can change anything; return nothing.

        They are the truth, the `lifted_reference` and the first noisy run. Without a truth, the other two are not made.
        `lowered_to` is the dtype that the candidate computes in on purpose, if it does; the noisy run then has its
        roundings.
        """
        if self.truth is not None:
            _ = self.lifted_reference
            self.noisy(1, lowered_to=lowered_to)

    @cached_property
    def truth(self) -> Observation | None:
        """The program run in float64, or None if it does not run there; `no_truth` then has the reason.

        Operations and dtypes without float64 are added to `unlifted`. If the program runs, a note names them.
        """
        with self.timed("truth"):
            run, self.no_truth = self._run_lifted(self.drawn_in)
            dtypes = {tensor.dtype for tensor in started_from(self.original) if tensor.is_floating_point()}
            coarse = (dtype for dtype in dtypes if lift.widened(dtype) is not torch.float64)
            self.unlifted |= {f"what is given in {str(dtype).removeprefix('torch.')}" for dtype in coarse}
            if run is not None and self.unlifted:
                names = ", ".join(sorted(self.unlifted))
                self.notes.append(f"the truth is not all in float64: {names} is as in the reference")
            return run

    @cached_property
    def lifted_reference(self) -> Observation | None:
        """The truth with random numbers drawn as a lifted candidate draws them; None if the program does not run so.

        It is the truth itself if the program draws none, or draws in float64 already.
        """
        if self.truth is None or self.lifted_draws == self.drawn_in:
            return self.truth
        with self.timed("semantic"):
            return self._run_lifted(self.lifted_draws)[0]

    @cached_property
    def untold_reference(self) -> Observation | None:
        """The program in float64, with random numbers drawn as a lifted candidate draws them, and not told any dtype.

        A program that a compiler captures in float64 is not told the reference's dtypes either. None if the program
        asks for no dtype, or does not run so.
        """
        if not self._dtype_answers or self.program.lifted_call is not None:
            return None
        with self.timed("semantic"):
            return self._run_lifted(self.lifted_draws, told=False)[0]

    def noisy(
        self, count: int, *, lifted: bool = False, lowered_to: torch.dtype | None = None, told: bool = True
    ) -> list[Observation]:
        """Return the first `count` noisy runs, without those that failed.

        They are native, or in float64 if `lifted`, or in float64 with roundings as large as those of the dtype
        `lowered_to`. In float64 they are told the reference's dtypes, unless `told` is False. Each run is made once and
        kept in `noisy_runs`.
        """
        keys = [(index, lifted, lowered_to, told) for index in range(count)]
        for key in keys:
            if key not in self.noisy_runs:
                with self.timed("noise"):
                    self.noisy_runs[key] = self._run_noisy(*key)
        return [run for key in keys if (run := self.noisy_runs[key]) is not None]

    @property
    def drawn_in(self) -> torch.dtype:
        """The dtype in which the program probably draws random numbers: that of its first tensor of floats.

        It is torch's default dtype if the program is given no floats.
        """
        floats = (tensor.dtype for tensor in started_from(self.original) if tensor.is_floating_point())
        return next(floats, torch.get_default_dtype())

    @cached_property
    def _is_large(self) -> bool:
        """Whether the tensors that the program is given take more than `_LARGE` bytes of memory."""
        return sum(tensor.nbytes for tensor in started_from(self.original) if has_own_buffer(tensor)) > _LARGE

    @property
    def is_narrow(self) -> bool:
        """Whether a tensor that the program is given is of floats with fewer than four bytes."""
        tensors = started_from(self.original)
        return any(tensor.is_floating_point() and tensor.itemsize < 4 for tensor in tensors)

    @property
    def coarsest_dtype(self) -> torch.dtype:
        """The coarsest dtype of floats that the program is given, or casts finer values to.

        It is torch's default dtype if there is none.
        """
        coarsest = self.narrowed_to
        for tensor in started_from(self.original):
            if tensor.is_floating_point():
                coarsest = coarser(coarsest, tensor.dtype)
        return coarsest or torch.get_default_dtype()

    @property
    def rounding_of_inputs(self) -> float:
        """How far a few roundings of the arguments may take a result: a few units of rounding of the largest one.

        The unit is that of `coarsest_dtype`. Only finite elements count; without an argument of floats that has values
        it is 0.
        """
        sizes = (
            float(torch.nan_to_num(leaf.detach().double(), 0.0, 0.0, 0.0).abs().max())
            for leaf in leaves_of((self.program.args, dict(self.program.kwargs)), "inputs").values()
            if isinstance(leaf, torch.Tensor) and has_values(leaf) and leaf.is_floating_point() and leaf.numel()
        )
        return _ROUNDINGS * float(torch.finfo(self.coarsest_dtype).eps) * max(sizes, default=0.0)

    @property
    def lifted_draws(self) -> torch.dtype:
        """The dtype in which a lifted candidate draws: float64 if the reference draws at all, or else `drawn_in`."""
        return torch.float64 if self.reference.draws_random else self.drawn_in

    def _run_reference(self) -> Observation:
        """Run the reference and return its observation; if it raises, change `plan` and retry, or raise EagerFails.

        The first retry that fits is taken. If it raises with further inputs in a stage other than `steps`, the plan
        loses these and later ones, with a note. If a stage after the forward raises, only outputs have cotangents from
        then on: the state that a program keeps may be overwritten where its gradient needs it; a note says so if the
        retry runs. If it raises in a later iteration in a stage other than `steps`, the plan is cut to the iterations
        before, and `shortfall` says so. Raise ProgramError if the run changes a tensor of the original, or one that all
        copies share. Sets `recorded_answers`, and the plan's dtypes of cotangents.
        """
        try:
            run, self.recorded_answers = self._observe_reference()
            self.plan = replace(self.plan, cotangent_dtypes=run.cotangent_dtypes)
            return run
        except SideFailed as failed:
            if self.plan.further and failed.stage != "steps" and failed.iteration >= self.plan.iterations:
                # the forward alone was tried with them
                accepted = self.plan.further[: failed.iteration - self.plan.iterations]
                self.notes.append(
                    f"iterations[{failed.iteration}] was not asked: the program does not accept its inputs ({failed})"
                )
                self.plan = replace(self.plan, further=accepted)
                return self._run_reference()
            if failed.stage != "forward" and self.plan.differentiates_state:
                self.plan = replace(self.plan, differentiates_state=False)
                run = self._run_reference()
                self.notes.append(f"no gradients flow from state that the program keeps: eagerly that fails ({failed})")
                return run
            if failed.stage != "steps" and failed.iteration:
                self.shortfall = (
                    f"iteration {failed.iteration} did not run: the program rejects random inputs ({failed})"
                )
                self.plan = replace(self.plan, iterations=failed.iteration)
                return self._run_reference()
            remedy = "" if failed.stage == "forward" else f", or leave the stage {failed.stage} out"
            raise EagerFails(
                f"{self.program.name} fails when run eagerly, before any transform: {failed}. Mend it{remedy}",
                stage=failed.stage,
            ) from failed.error

    def _observe_reference(self) -> tuple[Observation, list[Answer]]:
        """Run the program eagerly; return its observation, and what it was told when it asked for dtypes.

        Raise SideFailed if it raises, and ProgramError if the run changes a tensor of the original, or one that all
        copies share.
        """
        name = self.program.name
        with (
            originals_unchanged(list(started_from(self.original)), name=name),
            shared_state_unchanged(self.program.call, name=name),
        ):
            record = DtypeRecord()
            return self.observe(record), record.answers

    def _run_lifted(self, draws: torch.dtype, *, told: bool = True) -> tuple[Observation | None, str]:
        """Return the program run in float64 and an empty text, or None and the reason why it does not run there.

        Random numbers are drawn in the dtype `draws`. The run is `told` the dtypes of the reference, or not.
        """
        try:
            return self.observe(lifted=True, draws=draws, told=told), ""
        except (SideFailed, ProgramError) as error:
            return None, f"the program does not run in float64 ({error})"

    def _run_noisy(self, index: int, lifted: bool, lowered_to: torch.dtype | None, told: bool) -> Observation | None:
        """Make one noisy run and return its observation, or add a note and return None if the program fails in it.

        Return None without a note if a candidate changed how this process runs the program. `index` is added to the
        seed. The run is native, or in float64 if `lifted`, or in float64 with roundings of the dtype `lowered_to`. In
        float64 it is `told` the reference's dtypes, or not. Before an optimizer step, gradients within noise of zero
        get random signs. Inputs, parameters and buffers that the reference left unchanged are not recorded. Updates
        `has_chosen`, and after a native run `narrowed_to`.
        """
        in_float64 = lifted or lowered_to is not None
        unit = None if lowered_to is None else float(torch.finfo(lowered_to).eps)
        noise = Noisy(seed=self.plan.seed + index, unit=unit)
        reference = self.reference
        signs = SignFlips(reference, self.truth, seed=self.plan.seed + index)
        try:
            run = self.observe(
                lifted=in_float64,
                told=told,
                noise=noise,
                draws=self.lifted_draws if lifted else self.drawn_in,
                keeps=lambda stage, path: id(reference.stages[stage].get(path)) not in self.own_tensors,
                before_step=signs.flip,
            )
        except YardstickTouched:  # noted already
            return None
        except SideFailed as failed:
            self.notes.append(f"a noisy run of the program failed, so its noise is not known: {failed}")
            return None
        self.has_chosen |= noise.has_chosen
        if noise.narrowed_to is not None and not in_float64:
            self.narrowed_to = coarser(self.narrowed_to, noise.narrowed_to)
        return run

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run the block with the flags that the case asks for, and restore torch's flags afterwards.

        These are `deterministic` algorithms and `anomaly` detection of autograd.
        """
        with runtime.preserved_flags():
            if self.deterministic:
                runtime.use_deterministic()
            if self.anomaly:
                torch.autograd.set_detect_anomaly(True)
            yield

    @contextmanager
    def eager_scope(self) -> Iterator[None]:
        """Run the block with the flags of `scope`, and keep a program that compiles parts of itself from doing so."""
        with self.scope(), stances.eager_here():
            yield

    def lifted_scope(self, draws: torch.dtype) -> Scope:
        """Return a maker of a context in which operations run in float64, and random numbers are drawn in `draws`.

        The context includes `eager_scope`. Operations without float64 run in `draws`, and are added to `unlifted`.
        """

        @contextmanager
        def lifted() -> Iterator[None]:
            with self.eager_scope(), lift.Lift(draws, self.unlifted):
                yield

        return lifted

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Report the part to `progress`, run the block, and add its seconds to `seconds` under the name of the part.

        The time of a part that is timed within the block counts for that inner part alone. Afterwards, even if the
        block raises, cached accelerator memory is released, and if the program is large, garbage is collected.
        """
        self.progress(part)
        started = time.perf_counter()
        inner = sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - inner
            elapsed = time.perf_counter() - started - within
            self.seconds[part] = self.seconds.get(part, 0.0) + elapsed
            # memory that a side left in cycles and caches must not add to the peak of the next side; for a small
            # program, looking for it would take longer than the run
            if self._is_large:
                gc.collect()
            runtime.release_memory()


def _other_path(replay: DtypeReplay) -> ProgramError:
    """Return the error that says by which dtype a run in float64 left the path of the reference."""
    return ProgramError(f"it takes another path: {replay.astray}")


def _unchanged(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype itself: the conversion of a native run."""
    return dtype
