"""The local question for a quantized layer: given the reference's values, it may be off by its own steps.

The noise of such a layer is measured by rounding the values that it reads once more, to levels that lie elsewhere, and
taking the change in its result. Only the change counts: a mistake in the layer is in its result with and without the
other rounding, so that it does not become noise. Start with `LevelJudging`.
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
from torchdelta.compare.protocol import JudgingSteps, Yardstick
from torchdelta.compare.quantization_noise import RUNS, StepNoise, rounded
from torchdelta.nodewise.local import LocalJudge, NodeJudging, RegionValues
from torchdelta.nodewise.regions import Region
from torchdelta.nodewise.trials import Trial
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Stage


@dataclass(kw_only=True)
class QuantizedJudge(LocalJudge):
    """Judges quantized regions by their steps, and all others by the noise of their roundings."""

    def judging(self, values: RegionValues) -> JudgingSteps[Leaves]:
        """Return the steps in which these values are judged: by levels if the candidate's region has a dequantize node.

        Regions without one, values that do not come from a `Trial`, and all regions if the user named a policy, are
        judged as `LocalJudge` does.
        """
        trial = values.within
        if self.policy is None and isinstance(trial, Trial) and _dequantizers(trial.pair.candidate):
            return LevelJudging(settings=self, values=values, trial=trial)
        return super().judging(values)


@dataclass(kw_only=True)
class LevelJudging(NodeJudging):
    """One quantized region that is being judged; its truth is the reference's value in floats."""

    trial: Trial

    rounds = ()

    def truth(self) -> Leaves:
        """Return the leaves of the reference's own value."""
        return self.reference

    def noisy(self, count: int) -> list[Leaves]:  # noqa: ARG002 — the runs divide one step between them
        """Return `RUNS` noisy runs: the reference's value, moved as other roundings of the inputs would move it.

        The candidate's region runs on values that are not rounded, and on values that are rounded to other levels; the
        difference is added to the reference's value. `count` is ignored. Return an empty list if the levels of a
        dequantize node are not known; a note names each such node.
        """
        path, region = self.values.path, self.trial.pair.candidate
        reads = {node: self.trial.values[self.trial.partners[node]] for node in region.reads}
        levels: dict[Node, Levels] = {}
        for node in _dequantizers(region):
            if (known := levels_of(node)) is not None:
                levels[node] = known
            else:
                self.settings.notes.add(
                    f"the levels of {node.name} ({node.target}) are not known, so its noise is not known either"
                )
        if len(levels) < len(_dequantizers(region)):
            return []
        before = {node: self._before_rounding(node, reads) for node in levels}
        exact = leaves_of(_run_with(region, reads, {node: values for node, (values, _) in before.items()}), path)
        runs = (_run_with(region, reads, self._round_again(run, levels, before)) for run in range(RUNS))
        return [_moved(self.reference, exact, leaves_of(run, path)) for run in runs]

    def compare(self, stage: str, yardstick: Yardstick[Leaves]) -> tuple[Comparison, ...]:  # noqa: ARG002 — there is one
        """Return the comparison of each leaf of the candidate with the yardstick, by the noise of its steps.

        `stage` is not used. If the region ends in a dequantize node, each reason names that node and its readers.
        """
        judge = Judge(policy=StepNoise(), terms=Terms(ignore=frozenset({"requires_grad", "device", "aliasing"})))
        comparisons, _ = judge.compare(yardstick.reference, self._candidate, yardstick.truth, noisy=yardstick.noisy)
        readers = _readers_of(self.trial.pair.candidate)
        return tuple(replace(comparison, reason=f"{comparison.reason}{readers}") for comparison in comparisons)

    def excuse_integers(self, stages: list[Stage], yardstick: Yardstick[Leaves]) -> list[Stage]:  # noqa: ARG002
        """Return the stages as they are: no noisy run of a quantized region has integers."""
        return stages

    def _round_again(
        self, run: int, levels: Mapping[Node, Levels], before: Mapping[Node, tuple[torch.Tensor, bool]]
    ) -> dict[Node, torch.Tensor]:
        """Return the values of the dequantize nodes as another quantizer might have rounded them, by node.

        `before` has the values before rounding, and whether they are a constant. They are rounded to levels that `run`,
        the number of the run, shifts. The elements of a constant are moved instead, each by a random share of up to
        half a step, which is the same in every run.
        """
        # one seed for all runs: they differ by their number, and share all other random numbers
        generator = torch.Generator().manual_seed(self.settings.seed)
        return {
            node: rounded(values, levels[node], run, generator, apart=is_constant)
            for node, (values, is_constant) in before.items()
        }

    def _before_rounding(self, node: Node, reads: Mapping[Node, Any]) -> tuple[torch.Tensor, bool]:
        """Return the values of a dequantize node before they were rounded, and whether they are a constant.

        The last node of the region has the reference's value, and another one the value in `reads` that is quantized
        for it. If there is none, as for a folded weight, return the node's own rounded values, as a constant.
        """
        region, reference = self.trial.pair.candidate, self.values.reference
        source: Node | None = node
        while source is not None and source not in reads and (inner := observed_by(source)) is not None:
            source = inner
        is_constant = source is None or source.op == "get_attr"
        if node is region.result and isinstance(reference, torch.Tensor):
            return reference, is_constant
        if source is not None and isinstance(reads.get(source), torch.Tensor):
            return reads[source], is_constant
        # a weight into which another was folded does not exist in floats: take its rounded values
        inside = Region.before(node, region.module, self.trial.partners)
        return inside.run(reads), True


def _dequantizers(region: Region) -> list[Node]:
    return [node for node in region.nodes if is_dequantizing(node)]


def _readers_of(region: Region) -> str:
    """Return words that name the readers of a region that ends in a dequantize node; empty for other regions."""
    node = region.result
    if not is_dequantizing(node):
        return ""
    return f" ({node.name}, as {', '.join(user.name for user in node.users)} reads it)"


def _run_with(region: Region, reads: Mapping[Node, Any], replaced: Mapping[Node, torch.Tensor]) -> Any:
    """Return the result of a region in which the readers of some nodes read the values in `replaced` instead.

    If the last node of the region is one of these nodes, its value there is returned, and nothing is run.
    """
    if region.result in replaced:
        return replaced[region.result]
    return region.run(reads, {(node, user): values for node, values in replaced.items() for user in node.users})


def _moved(reference: Leaves, exact: Leaves, noisy: Leaves) -> Leaves:
    """Return the reference's floating-point leaves in float64, each moved by `noisy` minus `exact`.

    A leaf that one of the two runs does not have as a tensor is left out.
    """
    moved: Leaves = {}
    for path, leaf in reference.items():
        before, after = exact.get(path), noisy.get(path)
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            moved[path] = leaf.double() + (after.double() - before.double())
    return moved
