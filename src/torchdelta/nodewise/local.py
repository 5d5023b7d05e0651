"""What came of one pair of nodes.

The local question: is a node right, given the same inputs? Nothing accumulates, so nothing hides.

The rule is that of whole programs, asked of a region: its own truth in float64 and its own noise, both computed only
where the two sides are not the same to the bit, which is rare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from torchdelta.compare.semantic import Semantic
from torchdelta.nodewise.regions import is_identical, map_leaves, tensors_of
from torchdelta.program.stages import cotangent_for
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class NodeJudgement:
    """A pair, with its errors."""

    reference: Node
    candidate: Node
    how: str
    local: tuple[Comparison, ...] = ()
    local_gradients: tuple[Comparison, ...] = ()
    inherited: tuple[Comparison, ...] = ()
    culprit: Node | None = None
    """The reference's node whose work is not done, where the pair is wrong by itself."""


def inherited_from(name: str, reference: Any, own: Any) -> tuple[Comparison, ...]:
    """Return how far apart both sides are, each on its own values."""
    return tuple(Judge(policy=Tolerance()).compare(leaves_of(reference, name), leaves_of(own, name))[0])


Again = Callable[[Mapping[Any, Any]], Any]
"""Runs the reference's region on other values than it was given."""
RUNS = 3
"""Noisy runs before a region is said to have diverged."""
FAR = 64.0
"""What is so many times beyond what is allowed needs no second noisy run."""
FEW_ULPS = 4
"""By so much may two correct implementations of one function differ in float32."""


@dataclass(kw_only=True)
class LocalJudge:
    """Judges regions, natively or in float64, and by the noise of their own roundings."""

    seed: int = 0
    is_lifted: bool = False
    """Whether both sides run in float64, where a difference is no rounding."""
    lowered_to: torch.dtype | None = None
    policy: Policy | None = None
    """What else than noise to judge by."""
    notes: set[str] = field(default_factory=set)
    _modes: dict[int, Noisy] = field(default_factory=dict)

    def judge(
        self,
        path: str,
        reference: Any,
        candidate: Any,
        again: Again,
        given: Mapping[Any, Any],
        *,
        is_exact: bool = False,
        floor: float = 0.0,
        within: object = None,  # noqa: ARG002 — who judges by more than the values needs what they come from
    ) -> tuple[Comparison, ...]:
        """Hold the values of both regions against each other; `again` runs the reference's anew, on what was given.

        Where what was given is exact, a noisy run rounds only what is computed from it. An error
        up to the floor is none.
        """
        if is_identical(reference, candidate):
            return ()
        ours, theirs = leaves_of(reference, path), leaves_of(candidate, path)
        if self.policy is not None and not self.policy.needs_truth:
            return tuple(self._judge().compare(ours, theirs)[0])
        truth = self._truth(path, again, given)
        if self.is_lifted:
            truth = ours
        comparisons: tuple[Comparison, ...] = ()
        noisy: list[Leaves] = []
        for index in range(RUNS):
            if (run := self._noisy(path, again, given, index, is_exact)) is not None:
                noisy.append(run)
            found, _ = self._judge().compare(ours, theirs, truth, noisy=noisy)
            comparisons = tuple(_excused(seen, ours, noisy, truth, floor) for seen in found)
            doubtful = [seen for seen in comparisons if seen.verdict is Verdict.DIVERGED]
            if not doubtful or all(seen.ratio > FAR for seen in doubtful):
                break
        return comparisons

    def _judge(self) -> Judge:
        policy = self.policy or (Semantic() if self.is_lifted else Noise())
        terms = Terms(ignore=frozenset({"requires_grad", "device"}), lowered_to=self.lowered_to)
        return Judge(policy=policy, terms=terms)

    def _truth(self, path: str, again: Again, given: Mapping[Any, Any]) -> Leaves | None:
        if self.is_lifted:
            return None
        unlifted: set[str] = set()
        try:
            with runtime.drawing_from(), lift.Lift(unlifted=unlifted):
                return leaves_of(again(_converted(given, lift.widened)), path)
        except Exception as error:  # what has no float64 cannot be held against it; the verdict is then inconclusive
            self.notes.add(f"{path} has no truth of its own: {type(error).__name__}: {str(error).splitlines()[0]}")
            return None

    def _noisy(self, path: str, again: Again, given: Mapping[Any, Any], index: int, is_exact: bool) -> Leaves | None:
        mode = self._modes.get(index) or self._mode(index)
        mode.dependent.clear()
        values = _converted(given, lift.widened if self.lowered_to is not None else lambda dtype: dtype)
        lifted = lift.Lift() if self.lowered_to is not None or self.is_lifted else nullcontext()
        try:
            with runtime.drawing_from():
                sources = [tensor for value in values.values() for tensor in tensors_of(value)]
                if is_exact:
                    mode.depend_on(sources)
                else:
                    mode.start_from(sources)
                with lifted, mode:
                    return leaves_of(again(values), path)
        except Exception as error:
            self.notes.add(f"the noise of {path} is not known: {type(error).__name__}: {str(error).splitlines()[0]}")
            return None

    def _mode(self, index: int) -> Noisy:
        # one for all regions: making its supply of random steps takes longer than most of them
        unit = None if self.lowered_to is None else float(torch.finfo(self.lowered_to).eps)
        mode = self._modes[index] = Noisy(seed=self.seed + index, unit=unit)
        # steps are read from random places of the supply, which differ from mode to mode
        mode.steps.pools = self._modes[min(self._modes)].steps.pools
        return mode


def cotangents_for(value: Any, path: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return every tensor of a value that depends on something trained, with its random cotangent."""
    return [
        (leaf, cotangent_for(leaf, place, seed))
        for place, leaf in leaves_of(value, path).items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def gradients(
    run: Callable[[Mapping[Any, Any]], Any], given: Mapping[Any, Any], wanted: Iterable[Any], path: str, seed: int
) -> dict[str, torch.Tensor]:
    """Return the gradients of what is wanted among the given, under the random cotangent of that path."""
    leaves: dict[Any, Any] = dict(given)
    trained: dict[str, torch.Tensor] = {}
    for key in wanted:

        def train(leaf: Any, name: str = str(key)) -> Any:
            if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                return leaf
            taken = leaf.detach().clone().requires_grad_()
            trained[f"{name}[{sum(known.startswith(name + '[') for known in trained)}].grad"] = taken
            return taken

        leaves[key] = map_leaves(given[key], train)
    with torch.enable_grad():
        roots = cotangents_for(run(leaves), path, seed)
        if not roots or not trained:
            return {name: torch.zeros_like(leaf) for name, leaf in trained.items()}
        found = torch.autograd.grad(
            [root for root, _ in roots],
            list(trained.values()),
            [cotangent for _, cotangent in roots],
            allow_unused=True,
        )
    # of two correct nodes one may compute a zero where the other does not depend on it
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(trained.items(), found, strict=True)
    }


def _converted(given: Mapping[Any, Any], convert: Callable[[torch.dtype], torch.dtype]) -> dict[Any, Any]:
    made: dict[int, torch.Tensor] = {}

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return made.setdefault(id(leaf), leaf.detach().to(convert(leaf.dtype), copy=True))

    return {key: map_leaves(value, change) for key, value in given.items()}


def _excused(
    seen: Comparison, reference: Leaves, noisy: list[Leaves], truth: Leaves | None, floor: float
) -> Comparison:
    """Leave open what a rounding decides: integers and booleans that differ among correct runs of the same node.

    An error function or an exponential that is off by a few units in the last place is another correct one.
    """
    if seen.verdict is not Verdict.DIVERGED or seen.measurement is None or seen.contract:
        return seen
    ours = reference.get(seen.path)
    ulps = seen.measurement.max_ulp
    is_few = (ulps is not None and ulps <= FEW_ULPS) or (
        not seen.measurement.misplaced and seen.measurement.max_abs <= floor
    )
    if isinstance(ours, torch.Tensor) and ours.dtype is torch.float32 and is_few:
        reason = f"{seen.reason}; but by a few units in the last place correct functions may differ"
        return replace(seen, verdict=Verdict.EQUIVALENT, reason=reason)
    if not isinstance(ours, torch.Tensor) or ours.is_floating_point() or ours.is_complex():
        return seen
    others = [run.get(seen.path) for run in (*noisy, truth or {})]
    flips = max(
        (
            int((other != ours).sum())
            for other in others
            if isinstance(other, torch.Tensor) and other.shape == ours.shape
        ),
        default=0,
    )
    if seen.measurement.mismatches > 2 * flips:
        return seen
    reason = f"{seen.reason}; but {flips} differ among correct runs too: a rounding decides them"
    return replace(seen, verdict=Verdict.INCONCLUSIVE, reason=reason)
