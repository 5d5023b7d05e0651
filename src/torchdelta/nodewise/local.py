"""The local question: is one node right when it is given the reference's inputs?

Errors do not accumulate over nodes here, so none can hide in those of the nodes before. The rule is that of whole
programs (`compare.protocol`), asked of a region of nodes: its own truth in float64 and its own noise. Both are
computed only if the two sides are not the same to the bit, which is rare. Start with `LocalJudge.judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.modes import lift
from torchdelta._torch.modes.noisy import Noisy
from torchdelta._torch.process import runtime
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.noise import Noise
from torchdelta.compare.policy import Policy, Tolerance
from torchdelta.compare.protocol import RUNS, JudgingSteps, Yardstick, excuse_integer
from torchdelta.compare.semantic import Semantic
from torchdelta.nodewise.regions import is_identical, map_leaves, tensors_of
from torchdelta.program.stages import cotangent_for
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict

FAR = 64.0
"""A node whose error is this many times the allowed error needs no second noisy run."""
FEW_ULPS = 4
"""Two correct implementations of one function may differ by this many units in the last place of float32."""

RunRegion = Callable[[Mapping[Any, Any]], Any]
"""Runs the reference's region on these values, and returns its result."""


@dataclass(frozen=True, kw_only=True)
class NodeJudgement:
    """A pair of nodes, with its errors."""

    reference: Node
    candidate: Node
    how: str
    local: tuple[Comparison, ...] = ()
    local_gradients: tuple[Comparison, ...] = ()
    inherited: tuple[Comparison, ...] = ()
    culprit: Node | None = None
    """The reference's node whose work is not done, if the pair is wrong by itself."""
    replaced: tuple[Node, ...] = ()
    """The reference's nodes up to the culprit, if the candidate has others in the place of all of them."""
    is_moved: bool = False
    """Whether the pair is right together with others: its work was moved to or from them."""


def inherited_from(name: str, reference: Any, own: Any) -> tuple[Comparison, ...]:
    """Return the comparisons of a node's two values, leaf by leaf, by torch.testing's tolerances.

    `own` is the value that the candidate computed from its own values, so that it may have inherited errors.
    """
    return tuple(Judge(policy=Tolerance()).compare(leaves_of(reference, name), leaves_of(own, name))[0])


@dataclass(frozen=True, kw_only=True)
class RegionValues:
    """The values of one region on both sides, and how the reference's region is run again."""

    path: str
    reference: Any
    candidate: Any
    again: RunRegion
    inputs: Mapping[Any, Any]
    """The values that the reference's region reads."""
    is_exact: bool = False
    """Whether the inputs are exact: a noisy run then rounds only values that are computed from them."""
    floor: float = 0.0
    """An absolute error in float32 up to which two values are the same."""
    within: object = None
    """The trial that the values come from, for judges that look at more than values."""


@dataclass(kw_only=True)
class LocalJudge:
    """Judges regions, natively or in float64, by the noise of their own roundings."""

    seed: int = 0
    is_lifted: bool = False
    """Whether both sides run in float64, where a difference is not rounding."""
    lowered_to: torch.dtype | None = None
    policy: Policy | None = None
    """The policy in place of noise, if the user named one."""
    notes: set[str] = field(default_factory=set)
    _modes: dict[int, Noisy] = field(default_factory=dict)

    def judge(
        self,
        path: str,
        reference: Any,
        candidate: Any,
        again: RunRegion,
        inputs: Mapping[Any, Any],
        *,
        is_exact: bool = False,
        floor: float = 0.0,
        within: object = None,
    ) -> tuple[Comparison, ...]:
        """Return the comparison of each leaf of a region's values; an empty tuple if both sides are `is_identical`.

        `path` is the name of the values, `again` runs the reference's region on other values, and `inputs` are those
        that it has read; `RegionValues` explains the rest. Unless the user named a policy that needs no truth, `again`
        is run for truth and noise. If such a run raises, the reason is added to `notes`.
        """
        values = RegionValues(
            path=path,
            reference=reference,
            candidate=candidate,
            again=again,
            inputs=inputs,
            is_exact=is_exact,
            floor=floor,
            within=within,
        )
        return tuple(comparison for stage in self.judging(values).judge() for comparison in stage.comparisons)

    def judging(self, values: RegionValues) -> JudgingSteps[Leaves]:
        """Return a new `NodeJudging` of these values; its method `judge` runs the steps, and nothing is run before."""
        return NodeJudging(settings=self, values=values)

    def noisy_mode(self, index: int) -> Noisy:
        """Return the mode of the noisy run number `index`; it is made at the first call, and all regions share it.

        If the candidate lowers the dtype, a step is the epsilon of the lower dtype.
        """
        if index not in self._modes:
            unit = None if self.lowered_to is None else float(torch.finfo(self.lowered_to).eps)
            mode = self._modes[index] = Noisy(seed=self.seed + index, unit=unit)
            # building a supply of random steps takes longer than running most regions; each mode reads from other
            # places of the shared supply
            mode.steps.pools = self._modes[min(self._modes)].steps.pools
        return self._modes[index]


@dataclass(kw_only=True)
class NodeJudging(JudgingSteps[Leaves]):
    """One region that is being judged.

    The semantic question is not asked here: a walk with `is_lifted` asks it of all nodes at once.
    """

    settings: LocalJudge
    values: RegionValues
    _runs: list[Leaves | None] = field(default_factory=list)

    # a node is cheap to run, so the noisy runs are added one by one
    rounds = tuple(range(2, RUNS + 1))

    @cached_property
    def reference(self) -> Leaves:
        """The leaves of the reference's value."""
        return leaves_of(self.values.reference, self.values.path)

    def judge_by_bits(self) -> list[Stage] | None:
        """Return an empty list if both values are equal, one stage if the user's policy needs no truth, or else None.

        They are equal if `is_identical` says so. The stage `forward` has the comparisons by the user's policy.
        """
        if is_identical(self.values.reference, self.values.candidate):
            return []
        policy = self.settings.policy
        if policy is None or policy.needs_truth:
            return None
        return [Stage.of("forward", self._compare(Yardstick(reference=self.reference)))]

    def truth(self) -> Leaves | None:
        """Return the leaves of the region run in float64, or None if that raises; then a note is added.

        If both sides run in float64 already, return the reference's own leaves.
        """
        if self.settings.is_lifted:
            return self.reference
        values = self.values
        try:
            with runtime.drawing_from(), lift.Lift(unlifted=set()):
                return leaves_of(values.again(_converted(values.inputs, lift.widened)), values.path)
        except Exception as error:  # the verdict is inconclusive without a truth
            self._note(f"{values.path} has no truth of its own", error)
            return None

    def noisy(self, count: int) -> list[Leaves]:
        """Return the first `count` noisy runs of the region, without those that failed."""
        while len(self._runs) < count:
            self._runs.append(self._run_noisy(len(self._runs)))
        return [run for run in self._runs[:count] if run is not None]

    def compare(self, stage: str, yardstick: Yardstick[Leaves]) -> tuple[Comparison, ...]:  # noqa: ARG002 — there is one
        """Return the comparison of each leaf of the candidate with the yardstick; `stage` is not used.

        A divergence of float32 by a few units in the last place becomes EQUIVALENT, as `_pass_few_ulps` says.
        """
        return tuple(self._pass_few_ulps(comparison) for comparison in self._compare(yardstick))

    def is_near(self, comparison: Comparison) -> bool:
        """Tell whether a comparison diverged by at most `FAR` times the allowed error.

        More noisy runs may then let it pass.
        """
        return comparison.verdict is Verdict.DIVERGED and comparison.ratio <= FAR

    def excuse_integers(self, stages: list[Stage], yardstick: Yardstick[Leaves]) -> list[Stage]:
        """Return the stages; diverged integers become INCONCLUSIVE if correct runs of the region differ in them too.

        The correct runs are the noisy ones and the truth; `excuse_integer` has the rule. Comparisons with a breach of
        the contract stay as they are.
        """
        runs = (*yardstick.noisy, yardstick.truth or {})

        def excuse(comparison: Comparison) -> Comparison:
            if _is_broken(comparison):
                return comparison
            path = comparison.path
            return excuse_integer(comparison, self.reference.get(path), (run.get(path) for run in runs))

        return [Stage.of(stage.name, tuple(map(excuse, stage.comparisons))) for stage in stages]

    def _compare(self, yardstick: Yardstick[Leaves]) -> tuple[Comparison, ...]:
        """Return the comparison of each leaf of the candidate with the yardstick, by the user's policy or by noise.

        In float64 the policy in place of noise is `Semantic`. Another device, another `requires_grad`, and a dtype that
        is lowered on purpose are not differences.
        """
        settings = self.settings
        policy = settings.policy or (Semantic() if settings.is_lifted else Noise())
        terms = Terms(ignore=frozenset({"requires_grad", "device"}), lowered_to=settings.lowered_to)
        comparisons, _ = Judge(policy=policy, terms=terms).compare(
            yardstick.reference, self._candidate, yardstick.truth, noisy=yardstick.noisy
        )
        return tuple(comparisons)

    @cached_property
    def _candidate(self) -> Leaves:
        """The leaves of the candidate's value."""
        return leaves_of(self.values.candidate, self.values.path)

    def _run_noisy(self, index: int) -> Leaves | None:
        """Return the leaves of the noisy run number `index` of the region, or None if it raises; then a note is added.

        It runs on copies of the inputs, in float64 if the candidate lowers the dtype or both sides run in float64. The
        inputs are rounded anew too, unless they are exact.
        """
        settings, values = self.settings, self.values
        mode = settings.noisy_mode(index)
        mode.dependent.clear()
        is_lowered = settings.lowered_to is not None
        inputs = _converted(values.inputs, lift.widened if is_lowered else lambda dtype: dtype)
        lifted = lift.Lift() if is_lowered or settings.is_lifted else nullcontext()
        try:
            with runtime.drawing_from():
                sources = [tensor for value in inputs.values() for tensor in tensors_of(value)]
                if values.is_exact:
                    mode.depend_on(sources)
                else:
                    mode.start_from(sources)
                with lifted, mode:
                    return leaves_of(values.again(inputs), values.path)
        except Exception as error:
            self._note(f"the noise of {values.path} is not known", error)
            return None

    def _note(self, finding: str, error: Exception) -> None:
        """Add a note to those of the judge: the finding, and the type and first line of the exception."""
        message = str(error).partition("\n")[0]
        self.settings.notes.add(f"{finding}: {type(error).__name__}: {message}")

    def _pass_few_ulps(self, comparison: Comparison) -> Comparison:
        """Return a divergence of float32 by up to `FEW_ULPS` units in the last place as EQUIVALENT, others unchanged.

        An error of float32 up to the `floor` of the values passes too. A comparison with a NaN or Inf out of place, or
        with a breach of the contract that is not excused, is returned unchanged.
        """
        leaf, measurement = self.reference.get(comparison.path), comparison.measurement
        if comparison.verdict is not Verdict.DIVERGED or measurement is None or _is_broken(comparison):
            return comparison
        is_few = measurement.max_ulp is not None and measurement.max_ulp <= FEW_ULPS
        is_few |= measurement.max_abs <= self.values.floor
        is_few &= not measurement.misplaced
        if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32 or not is_few:
            return comparison
        reason = f"{comparison.reason}; but correct functions may differ by a few units in the last place"
        return replace(comparison, verdict=Verdict.EQUIVALENT, reason=reason)


def _is_broken(comparison: Comparison) -> bool:
    """Tell whether a breach of the contract decides the comparison; an excused one does not."""
    return any(not breach.excused for breach in comparison.contract)


def cotangents_for(
    value: Any, path: str, seed: int, dtypes: dict[str, torch.dtype]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a (tensor, random cotangent) pair for each tensor in a value that requires grad; may be an empty list.

    The random numbers follow from `path`, which is the name of the value, the tensor's place in it, and the seed. They
    are exact in the dtype that `dtypes` has for the place; a place without one gets the tensor's.
    """
    return [
        (leaf, cotangent_for(leaf, place, seed, dtypes.setdefault(place, leaf.dtype)))
        for place, leaf in leaves_of(value, path).items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def gradients(
    run: RunRegion,
    inputs: Mapping[Any, Any],
    wanted: Iterable[Any],
    path: str,
    seed: int,
    dtypes: dict[str, torch.dtype],
) -> dict[str, torch.Tensor]:
    """Return the gradients of the float and complex tensors in the wanted inputs of a region, under random cotangents.

    `inputs` are the values that `run` takes, by key, and `wanted` are some of their keys. The result is by key and the
    tensor's number in that input: `x[0].grad`. The cotangents follow from `path` and `seed`, and are exact in `dtypes`,
    which the first call for a region fills, in place. A tensor that the result does not depend on has a gradient of
    zeros.
    """
    leaves: dict[Any, Any] = dict(inputs)
    trained: dict[str, torch.Tensor] = {}
    for key in wanted:

        def train(leaf: Any, name: str = str(key)) -> Any:
            if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                return leaf
            copied = leaf.detach().clone().requires_grad_()
            trained[f"{name}[{sum(known.startswith(name + '[') for known in trained)}].grad"] = copied
            return copied

        leaves[key] = map_leaves(inputs[key], train)
    with torch.enable_grad():
        roots = cotangents_for(run(leaves), path, seed, dtypes)
        if not roots or not trained:
            return {name: torch.zeros_like(leaf) for name, leaf in trained.items()}
        slopes = torch.autograd.grad(
            [root for root, _ in roots],
            list(trained.values()),
            [cotangent for _, cotangent in roots],
            allow_unused=True,
        )
    # of two correct nodes one may compute a zero gradient where the other has none
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(trained.items(), slopes, strict=True)
    }


def _converted(inputs: Mapping[Any, Any], convert: Callable[[torch.dtype], torch.dtype]) -> dict[Any, Any]:
    """Return a dict of the inputs with detached copies of their tensors; a tensor that comes twice is copied once.

    `convert` returns the dtype of a copy for that of the original. Values that are not tensors stay the same.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copies.setdefault(id(leaf), leaf.detach().to(convert(leaf.dtype), copy=True))

    return {key: map_leaves(value, copied) for key, value in inputs.items()}
