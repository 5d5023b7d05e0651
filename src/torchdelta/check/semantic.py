"""The semantic question: is the transform still the same function if both sides run in float64?

In float64 almost nothing is rounded, so that a difference which noise hides natively shows. The transform is applied to
the lifted program, both are run, and `compare.semantic.Semantic` judges the pair. A program that still is another
function in float64, as its distance from the reference shows, gets inconclusive answers. Start with `run_lifted`, then
`judge_lifted` and `add_answers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchdelta._torch.modes.lift import BITS
from torchdelta._torch.tensors import has_own_buffer, has_values
from torchdelta.check.baseline import Baseline
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.decisions import reach_of_steps, settle_steps
from torchdelta.check.pairing import complete, has_differences, is_state, pair_stage, state_name
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.noise import unit_roundoff
from torchdelta.compare.objects import as_tensor
from torchdelta.compare.protocol import (
    Answers,
    Yardstick,
    answer_in_float64,
    as_answered,
    is_coarse_answer,
    select_answers,
)
from torchdelta.compare.semantic import KEPT_IN_FLOAT32, Semantic
from torchdelta.compare.spread import sizes, spread
from torchdelta.errors import ProgramError, UsageError
from torchdelta.program.stages import Observation
from torchdelta.records.case import IGNORABLE
from torchdelta.records.comparison import Comparison, Scalar
from torchdelta.records.report import ASKED, Stage
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform

FOREIGN = 100.0
"""A reference that is so many times its noise away from the truth is another function in float64."""
FOREIGN_NARROW = 16.0
"""The same for bfloat16 and float16, whose sums are taken in float32 and do not drift away."""
_WIDEST = (torch.float64, torch.complex128)
_FOREIGN_TRUTH = "in float64 the reference is another function too, further off than rounding takes it"


@dataclass(frozen=True, kw_only=True)
class LiftedRun:
    """The candidate run in float64, or the reason why it was not."""

    asked: str = ASKED
    reference: Observation = field(default_factory=Observation)
    candidate: Observation = field(default_factory=Observation)
    native: Observation | None = None
    """The candidate run natively, if that is known."""
    is_by_graph: bool = False
    """Whether the program cannot be asked as a whole, but its graphs can: see `graphwise`."""
    is_told: bool = True
    """Whether the reference was told the dtypes of the native run when it asked for them."""

    @property
    def differs(self) -> bool:
        """Whether anything in float64 is not bitwise the same, as `has_differences` tells."""
        return has_differences(self.reference, self.candidate)


def run_lifted(baseline: Baseline, transform: Transform, native: CandidateRun | None = None) -> LiftedRun:
    """Apply the transform to the program in float64, and run both; return the runs, or why there are none.

    Without runs, `asked` has the reason, such as that the transform lowers precision, that something has no float64, or
    that the candidate fails or runs untransformed there. `native` is the candidate's native run. If parts of it ran
    between a compiler's graphs, if it has several graphs and there are no runs, or if its graphs have another form in
    float64, the graphs have to be asked one by one, and `is_by_graph` says so.
    """
    if transform.traits.lowered_to is not None:
        return LiftedRun(asked="not asked: the transform lowers precision on purpose")
    is_compiler = transform.traits.is_compiler and transform.traits.has_seam and native is not None
    if is_compiler and native is not None and native.is_partly_eager:
        return LiftedRun(asked="not asked: parts of the program run between the compiler's graphs", is_by_graph=True)
    lifted = _run_whole(baseline, transform, native)
    if lifted.asked != ASKED and is_compiler and native is not None and len(native.forms) > 1:
        return replace(lifted, is_by_graph=True)
    return lifted


def _run_whole(baseline: Baseline, transform: Transform, native: CandidateRun | None) -> LiftedRun:
    """Run the whole program and its candidate in float64; return both runs, or an empty one whose `asked` says why not.

    There are no runs if the program or a part of it has no float64, or if the candidate fails there, runs
    untransformed, or has other operations than in its `native` run. With other operations `is_by_graph` is set if the
    transform has a seam.
    """
    reference = baseline.lifted_reference
    if reference is None:
        why = baseline.no_truth or "the program does not run in float64 when it draws in it"
        return LiftedRun(asked=f"not asked: {why}")
    if baseline.unlifted:
        return LiftedRun(asked=f"not asked: {', '.join(sorted(baseline.unlifted))} has no float64")
    try:
        with baseline.timed("semantic"):
            candidate = baseline.run(transform, lifted=True, answers=native.dtype_answers if native else ())
    except (ProgramError, UsageError) as error:  # natively it was not an error
        return LiftedRun(asked=f"not asked: {error}")
    own = set(baseline.unlifted)  # of the candidate alone
    baseline.unlifted.clear()
    # a cast to float8 does not prevent the question: it rounds in float64 too, and so shows as another function
    if names := sorted(name for name in own if name == BITS or "::" in name):
        return LiftedRun(asked=f"not asked: the candidate has {', '.join(names)}, which has no float64")
    if failure := candidate.failure:
        # a compiler says in its first line that a backend failed, and in the second how
        message = " ".join(f"{failure}".splitlines()[:2])
        return LiftedRun(asked=f"not asked: the transform fails on the program in float64 ({message})")
    if why := candidate.untransformed():
        return LiftedRun(asked=f"not asked: in float64 {why}")
    # before asking whether the pass changed anything: in another branch it may have nothing to change
    if native is not None and native.forms != candidate.forms:
        is_by_graph = transform.traits.has_seam
        return LiftedRun(asked="not asked: in float64 the program has other operations", is_by_graph=is_by_graph)
    if native is not None and not native.unchanged() and (why := candidate.unchanged()):
        return LiftedRun(asked=f"not asked: in float64 {why}")
    if native is not None and native.result_forms != candidate.result_forms:
        return LiftedRun(asked="not asked: the pass makes other operations of the program in float64")
    observation = native.observation if native is not None else None
    return LiftedRun(reference=reference, candidate=candidate.observation, native=observation)


def judge_lifted(lifted: LiftedRun, baseline: Baseline, *, keeps_names: bool) -> tuple[str, Answers]:
    """Return the text `asked`, or why the semantic question was not asked, and its answers by stage and path.

    Without runs in `lifted` there are no answers. Noisy runs in float64 are made only if, by the noise of a native run,
    an answer diverges or is coarse. Without `keeps_names`, differences as small as the rounding of constants pass.
    """
    # natively compared are the contract and integers; another implementation may have constants in float32
    policy = Semantic(0.0 if keeps_names else _rounding_of_constants(lifted, baseline))
    judge = Judge(policy=policy, terms=Terms(ignore=frozenset(IGNORABLE)))

    def compare(yardstick: Yardstick[Observation]) -> Answers:
        """Return the answers of all stages of the candidate, each held against the yardstick."""
        return {
            stage: _compare_stage(
                judge, stage, lifted.candidate, yardstick, baseline, _unwritten(stage, lifted, baseline), keeps_names
            )
            for stage in lifted.candidate.stages
        }

    def in_float64() -> Yardstick[Observation] | None:
        runs = baseline.noisy(1, lifted=True, told=lifted.is_told)
        return Yardstick(reference=lifted.reference, truth=lifted.reference, noisy=runs) if runs else None

    noisy = [_without_float64(run) for run in baseline.noisy(1)] if lifted.differs else []
    native = Yardstick(reference=lifted.reference, truth=baseline.truth, noisy=noisy)
    return lifted.asked, answer_in_float64(compare, native, in_float64)


def _without_float64(run: Observation) -> Observation:
    """Return a native run without its leaves in float64: their noise may be that of a lower dtype that was cast up.

    So are numbers of Python and NumPy, such as the result of `item()`.
    """
    stages = {
        stage: {path: leaf for path, leaf in leaves.items() if not _is_in_float64(leaf)}
        for stage, leaves in run.stages.items()
    }
    return replace(run, stages=stages)


def _is_in_float64(leaf: object) -> bool:
    """Tell whether a leaf is a tensor, array or number of float64 or complex128."""
    tensor = leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf)
    return tensor is not None and tensor.dtype in _WIDEST


def _rounding_of_constants(lifted: LiftedRun, baseline: Baseline) -> float:
    """Return the relative error that the constants of another implementation may have in float64.

    It is that of float32. If one side has state that the other lacks or starts with other values, it is that of the
    program's dtype if that is coarser: a fold has rounded tensors that it left out into the others. Attributes without
    a tensor do not count, nor does state under other names if each side's tensors are copies of the other's
    (`_are_copies`).
    """
    reference, candidate = lifted.reference, lifted.candidate
    own = candidate.other_starts | (candidate.state_names ^ reference.state_names)
    # an attribute that is a text or a number is not rounded to the program's dtype
    states = {id(run): _state_tensors(run) for run in (reference, candidate)}
    tensors = {state_name(path) for state in states.values() for path in state if is_state(path)}
    if not any(not is_state(name) or name in tensors for name in own):
        return KEPT_IN_FLOAT32
    of_reference, of_candidate = (
        [tensor for path, tensor in states[id(run)].items() if state_name(path) in own]
        for run in (reference, candidate)
    )
    if _are_copies(of_candidate, of_reference):
        return KEPT_IN_FLOAT32
    return max(KEPT_IN_FLOAT32, float(torch.finfo(baseline.drawn_in).eps))


def _state_tensors(run: Observation) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and tensors of unregistered state after a run's forward, by path."""
    return {
        path: leaf
        for stages in (run.stages, run.untouched)
        for path, leaf in stages.get("forward", {}).items()
        if isinstance(leaf, torch.Tensor) and state_name(path) is not None and not path.endswith(".grad")
    }


def _are_copies(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Tell whether the tensors are made of the others alone, and of all of them, so that no value was rounded anew.

    Each is one of the others, transposed or not, or several in a row: such is the weight of a linear layer that does
    the work of three. False for complex tensors and those without a plain buffer.
    """
    if not all(has_own_buffer(each) and not each.is_complex() for each in (*tensors, *others)):
        return False
    flipped = [each.t() if each.dim() == 2 else each for each in others]
    used: list[torch.Tensor] = []
    for tensor in tensors:
        parts = _parts_of(tensor, others) or _parts_of(tensor, flipped)
        if parts is None:
            return False
        used += [others[index] for index in parts]
    # of equal ones, the first is used
    return all(any(_is_copy(part, other) for part in used) for other in others)


def _parts_of(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[int] | None:
    """Return which parts make up a tensor, one after the other along its first dimension; None if none do.

    Of several that fit, the longest is taken: zeros begin with any shorter zeros.
    """
    if tensor.dim() == 0:
        return next(([index] for index, part in enumerate(parts) if _is_copy(part, tensor)), None)
    indices = [index for index, part in enumerate(parts) if part.dim() and len(part)]
    indices.sort(key=lambda index: len(parts[index]), reverse=True)
    found: list[int] = []
    while len(tensor):
        fitting = (index for index in indices if _begins_with(tensor, parts[index]))
        index = next(fitting, None)
        if index is None:
            return None
        found.append(index)
        tensor = tensor[len(parts[index]) :]
    return found


def _begins_with(tensor: torch.Tensor, part: torch.Tensor) -> bool:
    """Tell whether a tensor begins, along its first dimension, with all values of another one."""
    if tensor.shape[1:] != part.shape[1:] or len(part) > len(tensor):
        return False
    # most tensors differ in their first row
    return all(_has_values_of(part[:size], tensor[:size]) for size in (1, len(part)))


def _is_copy(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape and values, in any dtype."""
    if tensor is other or tensor.shape != other.shape:
        return tensor is other
    return _begins_with(tensor, other) if tensor.dim() else _has_values_of(tensor, other)


def _has_values_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape and values, in any dtype; all values are compared."""
    if tensor.dtype != other.dtype:
        tensor, other = tensor.double(), other.double()
    return torch.equal(tensor, other)


def _unwritten(stage: str, lifted: LiftedRun, baseline: Baseline) -> frozenset[str]:
    """Return the paths of leaves that the candidate's native run left unchanged in a stage; none if that is unknown."""
    leaves = lifted.native.stages.get(stage, {}) if lifted.native is not None else {}
    return frozenset(path for path, leaf in leaves.items() if id(leaf) in baseline.own_tensors)


def _compare_stage(
    judge: Judge,
    stage: str,
    lifted: Observation,
    yardstick: Yardstick[Observation],
    baseline: Baseline,
    unwritten: frozenset[str],
    keeps_names: bool,
) -> dict[str, Comparison]:
    """Return the answers of float64 for one stage, by path: each compares the candidate with the yardstick's reference.

    `lifted` is the candidate in float64. A single number that the candidate left unchanged and the reference did not is
    not compared, unless it is in `unwritten`: the paths that the candidate leaves unchanged natively, too.
    `select_answers` says which leaves have answers. In the stage `steps`, parameters whose gradient is within noise of
    zero are settled by `settle_steps`.
    """
    complete(stage, [run for run in (lifted, yardstick.reference, yardstick.truth, *yardstick.noisy) if run])
    reference, candidate, _ = pair_stage(stage, yardstick.reference, lifted, keeps_names=keeps_names)
    # torch 2.13 drops some writes of single numbers in float64 alone
    dropped = {
        path
        for path, leaf in candidate.items()
        if id(leaf) in baseline.own_tensors
        and leaf.numel() == 1
        and leaf is not reference.get(path)
        and path not in unwritten
    }
    reference, candidate = (
        {path: leaf for path, leaf in leaves.items() if path not in dropped} for leaves in (reference, candidate)
    )
    if stage == "steps":
        # the difference of both sides is all the noise that a gradient has in float64; it is judged by itself
        reach = reach_of_steps(baseline.original.state.parameters, (yardstick.reference, baseline.reference))
        (reference, candidate), _ = settle_steps((reference, candidate), yardstick.reference, (lifted,), reach)
    comparisons, _ = judge.compare(
        reference,
        candidate,
        yardstick.truth.stages.get(stage) if yardstick.truth else None,
        noisy=[run.stages.get(stage, {}) for run in yardstick.noisy],
    )
    return select_answers(comparisons)


def add_answers(stage: Stage, answers: Mapping[str, Comparison], baseline: Baseline) -> Stage:
    """Return the stage with the float64 answers, which are by path, added to its leaves, as `_add_answer` does.

    A stage without comparisons is returned unchanged.
    """
    if not stage.comparisons:
        return stage

    @functools.cache
    def is_foreign(path: str) -> bool:
        return _is_of_another_program(baseline, stage.name, path)

    def is_decided(path: str) -> bool:
        """Tell whether correct runs in float64 all have one shape, so that another one is another function."""
        runs = [baseline.lifted_reference, *baseline.noisy(3, lifted=True)]
        leaves = [run.stages.get(stage.name, {}).get(path) for run in runs if run is not None]
        return len({leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)}) == 1 < len(leaves)

    # after a step all leaves have one answer
    is_foreign_at = is_foreign if stage.name != "steps" else lambda _: is_foreign("")
    comparisons = tuple(
        _add_answer(each, answers.get(each.path), stage.name, is_foreign_at, is_decided) for each in stage.comparisons
    )
    return Stage.of(stage.name, comparisons, stage.reason)


def _add_answer(
    native: Comparison,
    answer: Comparison | None,
    stage: str,
    is_foreign: Callable[[str], bool],
    is_decided: Callable[[str], bool],
) -> Comparison:
    """Return a native comparison with its float64 answer; unchanged if it has diverged.

    If it was not measured, it diverges only if the answer did and `is_decided` says of the path that correct runs in
    float64 agree. An answer that was not measured makes it inconclusive, even if the answer diverged; a measured one
    without an error changes nothing. One that is not equivalent replaces verdict, reason and numbers, and makes it
    inconclusive if `is_foreign` says of the path that the program is another function in float64. An equivalent one
    adds its error, noise, resolution and whether it is coarse to the details. After that, and also without an answer, a
    leaf that passed becomes inconclusive if its truth is that of another program (`_doubt_foreign`).
    """
    if native.verdict is Verdict.DIVERGED:
        return native
    if native.measurement is None:
        if answer is None or answer.verdict is not Verdict.DIVERGED or not is_decided(native.path):
            return native
        return replace(native, verdict=Verdict.DIVERGED, reason=f"{native.reason}; but in float64 too: {answer.reason}")
    if answer is None:
        return _doubt_foreign(native, native.details, is_foreign)
    if answer.measurement is None:
        reason = f"{native.reason}; but in float64 it cannot be compared: {answer.reason}"
        return replace(native, verdict=Verdict.INCONCLUSIVE, reason=reason)
    if answer.error is None:
        return native
    errors: dict[str, Scalar] = {"semantic_error": answer.error, "semantic_noise": answer.noise or 0.0}
    if answer.resolution is not None:
        errors["semantic_resolution"] = answer.resolution
    if is_coarse_answer(answer, stage):
        errors["semantic_coarse"] = True
    if answer.verdict is not Verdict.EQUIVALENT:
        native_errors = {"native_error": native.error or 0.0, "native_allowed": native.allowed or 0.0}
        answered = as_answered(native, answer, **errors, **native_errors)
        if is_foreign(native.path):
            reason = f"{answer.reason}; but {_FOREIGN_TRUTH}"
            return replace(answered, verdict=Verdict.INCONCLUSIVE, reason=reason)
        return answered
    return _doubt_foreign(native, {**native.details, **errors}, is_foreign)


def _doubt_foreign(native: Comparison, details: Mapping[str, Scalar], is_foreign: Callable[[str], bool]) -> Comparison:
    """Return a comparison with these details; inconclusive if it passed, and its truth is that of another program.

    That is so if its reference is many roundings away from its truth, and `is_foreign` says so of its path.
    """
    reference_error, floor = (float(native.details.get(name, 0.0)) for name in ("reference_error", "floor"))
    # the floor is half a unit of rounding
    is_far = reference_error > 2.0 * FOREIGN_NARROW * floor
    if is_far and native.verdict is Verdict.EQUIVALENT and is_foreign(native.path):
        reason = f"{native.reason}, but {_FOREIGN_TRUTH}"
        return replace(native, verdict=Verdict.INCONCLUSIVE, reason=reason, details=dict(details))
    return replace(native, details=dict(details))


def _is_of_another_program(baseline: Baseline, stage: str, path: str) -> bool:
    """Tell whether the truth is much further from the reference than noise is, as if the program branched on its dtype.

    `_is_further_than_noise` decides that of the leaf at the path. In the stage `steps`, where a gradient within
    rounding of zero takes correct programs apart, the leaves before the first step decide, and the path is ignored.
    """
    if stage != "steps":
        return _is_further_than_noise(baseline, stage, path)
    return any(
        _is_further_than_noise(baseline, before, leaf)
        for before, leaves in baseline.reference.stages.items()
        for leaf in leaves
        if before != "steps" or leaf.startswith("steps[0].gradients")
    )


def _is_further_than_noise(baseline: Baseline, stage: str, path: str) -> bool:
    """Tell whether a leaf of the truth is many times further from the reference than a noisy run is.

    How many, `FOREIGN` says, or `FOREIGN_NARROW` if the reference has less than 32 bits. The noisy run counts as at
    least one rounding away, in the coarser of the reference's dtype and the program's coarsest. Return False without a
    truth or a noisy run, for integers, non-tensors and tensors without values, and if the truth has another shape.
    """
    reference = baseline.reference.stages[stage].get(path)
    truth = baseline.truth.stages.get(stage, {}).get(path) if baseline.truth else None
    if not isinstance(truth, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return False
    if truth.shape != reference.shape or not is_inexact(reference.dtype) or not has_values(reference):
        return False
    runs = [run.stages.get(stage, {}).get(path) for run in baseline.noisy(1)]
    distances = [
        spread(run, reference).rms for run in runs if isinstance(run, torch.Tensor) and run.shape == reference.shape
    ]
    noise = max(distances, default=0.0)
    unit = max(map(unit_roundoff, (reference.dtype, baseline.coarsest_dtype)))
    floor = unit * sizes(truth).rms
    limit = FOREIGN_NARROW if reference.dtype.itemsize < 4 else FOREIGN
    return bool(distances) and spread(truth, reference).rms > limit * max(noise, floor)
