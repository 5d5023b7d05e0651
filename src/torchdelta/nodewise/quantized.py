"""A quantized layer by itself: fed the reference's values, it may be off by what rounding those to its levels makes.

What the layer reads is rounded once more, to levels that lie elsewhere, and what that changes in its result is its
noise. The change alone counts: what is wrong about the layer is in it with and without, and does not become noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.graphs.handles import is_dequantizing, observed_by
from torchdelta._torch.graphs.quantization import Levels, levels_of
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.quantization_noise import RUNS, StepNoise, rounded
from torchdelta.nodewise.local import Again, LocalJudge
from torchdelta.nodewise.regions import Region, is_identical
from torchdelta.nodewise.trials import Trial
from torchdelta.records.comparison import Comparison


@dataclass(kw_only=True)
class QuantizedJudge(LocalJudge):
    """Judges what is quantized by its steps, and everything else by the noise of its roundings."""

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
        within: object = None,
    ) -> tuple[Comparison, ...]:
        """Hold the values of both regions against each other."""
        if (
            not isinstance(within, Trial)
            or self.policy is not None
            or is_identical(reference, candidate)
            or not _dequantizers(within.pair.candidate)
        ):
            return super().judge(path, reference, candidate, again, given, is_exact=is_exact, floor=floor)
        ours, theirs = leaves_of(reference, path), leaves_of(candidate, path)
        judge = Judge(policy=StepNoise(), terms=Terms(ignore=frozenset({"requires_grad", "device", "aliasing"})))
        found = judge.compare(ours, theirs, ours, noisy=self._runs(path, reference, within))[0]
        return tuple(replace(seen, reason=f"{seen.reason}{_what(within.pair.candidate)}") for seen in found)

    def _runs(self, path: str, reference: Any, trial: Trial) -> list[Leaves]:
        """Return the reference's value with what other roundings of the same would have changed in it."""
        region = trial.pair.candidate
        fed = {node: trial.values[trial.partners[node]] for node in region.reads}
        found = {node: levels_of(node) for node in _dequantizers(region)}
        for node in (node for node, levels in found.items() if levels is None):
            self.notes.add(f"how {node.name} ({node.target}) rounds is not known, and so what it may be off by")
        levels = {node: known for node, known in found.items() if known is not None}
        if len(levels) < len(found):
            return []
        before = {node: _before_rounding(node, reference, trial, fed) for node in levels}
        exact = leaves_of(_with(region, fed, {node: values for node, (values, _) in before.items()}), path)
        noisy = (_with(region, fed, self._again(run, levels, before)) for run in range(RUNS))
        return [_moved(leaves_of(reference, path), exact, leaves_of(run, path)) for run in noisy]

    def _again(
        self, run: int, levels: Mapping[Node, Levels], before: Mapping[Node, tuple[torch.Tensor, bool]]
    ) -> dict[Node, torch.Tensor]:
        # one seed for all runs: they differ by their number, and share what is drawn besides
        generator = torch.Generator().manual_seed(self.seed)
        return {
            node: rounded(values, levels[node], run, generator, apart=is_constant)
            for node, (values, is_constant) in before.items()
        }


def _dequantizers(region: Region) -> list[Node]:
    return [node for node in region.nodes if is_dequantizing(node)]


def _what(region: Region) -> str:
    """Return what was quantized, where it is not what the node computes but what others read of it."""
    node = region.result
    if not is_dequantizing(node):
        return ""
    return f" ({node.name}, as {', '.join(user.name for user in node.users)} reads it)"


def _before_rounding(node: Node, reference: Any, trial: Trial, fed: Mapping[Node, Any]) -> tuple[torch.Tensor, bool]:
    """Return what a dequantize node stands for in floats, and whether it is a constant."""
    source: Node | None = node
    while source is not None and source not in fed and (inner := observed_by(source)) is not None:
        source = inner
    is_constant = source is None or source.op == "get_attr"
    if node is trial.pair.candidate.result and isinstance(reference, torch.Tensor):
        return reference, is_constant
    if source is not None and isinstance(fed.get(source), torch.Tensor):
        return fed[source], is_constant
    # a weight that another was folded into is in floats nowhere: what is left of it has to do
    inside = Region.before(node, trial.pair.candidate.module, trial.partners)
    return inside.run(fed), True


def _with(region: Region, fed: Mapping[Node, Any], instead: Mapping[Node, torch.Tensor]) -> Any:
    if region.result in instead:
        return instead[region.result]
    return region.run(fed, {(node, user): values for node, values in instead.items() for user in node.users})


def _moved(reference: Leaves, exact: Leaves, noisy: Leaves) -> Leaves:
    moved: Leaves = {}
    for path, leaf in reference.items():
        before, after = exact.get(path), noisy.get(path)
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            moved[path] = leaf.double() + (after.double() - before.double())
    return moved
