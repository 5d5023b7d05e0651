"""What passes made of a graph, one version after the other, judged on the inputs of a real call.

The last version is held against the first; only where they differ are those between looked at, for the first pass that
introduces a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdelta._torch import modes, passes, runtime, stances
from torchdelta._torch.nodes import talks_to_others
from torchdelta._torch.noted import Chain, Version
from torchdelta.engine.introduced import Step, Succession
from torchdelta.engine.real_calls import TALKS, inputs_of
from torchdelta.engine.reasons import reason_of
from torchdelta.errors import TorchDeltaError
from torchdelta.execute.stages import cotangent_for
from torchdelta.records.passes import PassFinding
from torchdelta.records.verdict import Verdict

PACKED = "weights are packed for a library, and can be read by nobody else,"


@dataclass(kw_only=True)
class ChainJudge:
    """Judges one chain; what it finds and what it cannot tell is in its lists."""

    chain: Chain
    label: str
    """Which graph it is."""
    words: Mapping[str, Any]
    """What a check is told."""
    findings: list[PassFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_checked: bool = True
    """Whether an answer was found for all of it."""

    def judge(self, values: Mapping[str, Any]) -> None:
        """Judge on what the graph is called with, by the names of its inputs."""
        if talks_to_others(self.chain.versions[0].built):
            self._leave_open(f"not checked: {TALKS}")
            return
        with _aside(self.chain.phase):
            inputs = self._inputs(values)
            for part in self._comparable():
                if len(part) > 1:
                    self._judge_part(part, inputs)

    def _judge_part(self, part: list[Version], inputs: tuple[Any, ...]) -> None:
        words = dict(self.words)
        if self.chain.phase != passes.PRE_GRAD:
            # who shares memory with whom is settled by AOTAutograd, outside of its graphs
            words |= {"stages": ("forward",), "ignore": ("aliasing",)}
        succession = Succession(original=part[0].built, inputs=inputs, words=words)
        report = succession.held(part[-1].built)
        if report.verdict is Verdict.EQUIVALENT:
            return
        before, skipped = part[0], list[str]()
        for after in part[1:]:
            step = succession.step(before.built, after.built)
            if step.against_original is Verdict.CRASHED:
                self._leave_open(f"the graph behind {after.name} does not run eagerly ({step.reason})")
                skipped.append(after.name)
                continue
            if step.introduced is Verdict.DIVERGED:
                self.findings.append(self._finding(skipped, after.name, step))
                return
            before, skipped = after, []
        if report.verdict is not Verdict.CRASHED:
            self._leave_open(f"{report.verdict.value} together, and by no single one: {reason_of(report)}")

    def _finding(self, skipped: list[str], name: str, step: Step) -> PassFinding:
        unsure = f"; or {', '.join(skipped)} before it, whose graphs do not run eagerly" if skipped else ""
        return PassFinding(
            name=name,
            phase=self.chain.phase,
            graph=self.label,
            culprit=step.culprit,
            reason=f"{step.reason}{unsure}",
            error=step.worst.error if step.worst is not None else None,
            noise=step.worst.noise if step.worst is not None else None,
        )

    def _comparable(self) -> Iterator[list[Version]]:
        """Yield versions in a row that draw the same random numbers; who draws others cannot be held against them."""
        part: list[Version] = []
        for version in self.chain.versions:
            if version.is_packed:
                # copied, or run in float64, such a graph may end the process
                self._leave_open(f"{PACKED} from {version.name or 'the beginning'} on")
                break
            if part and version.draws != part[-1].draws:
                self._leave_open(f"{version.name} draws other random numbers than the graph before it")
                yield part
                part = []
            part.append(version)
        yield part

    def _inputs(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what the graphs are called with; a joint graph gets random tangents too."""
        chain, first = self.chain, self.chain.versions[0].inputs
        names = [node.name for node in first]
        for version in chain.versions[1:]:
            if [node.name for node in version.inputs] != names:
                raise TorchDeltaError(f"{version.name} changes what the graph is called with")
        given = dict(zip(values, inputs_of([*values.values()]), strict=True))
        for node in first:
            is_tensor = isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor)
            if node.name not in given and chain.phase == passes.JOINT:
                room = passes.room_for(node, first, given)
                given[node.name] = room.copy_(cotangent_for(room, node.name, self.words["seed"]))
            elif node.name not in given or (is_tensor and given[node.name] is None):
                # a compiler that makes constants of the parameters drops them
                raise TorchDeltaError(f"{node.name} is among its inputs, and is not there when it is called")
        return tuple(given[name] for name in names)

    def _leave_open(self, why: str) -> None:
        self.is_checked = False
        self.notes.append(f"{self.chain.phase} passes of {self.label}: {why}")


@contextmanager
def _aside(phase: str) -> Iterator[None]:
    """Run graphs out of sight of the user's modes, and leave generators, flags and settings as they were."""
    is_recorded = phase == passes.PRE_GRAD and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    casts = nullcontext() if phase == passes.PRE_GRAD else passes.without_autocast()
    with (
        runtime.preserved(),
        torch.set_grad_enabled(is_recorded),
        modes.as_nobody(),
        casts,
        stances.eager_here(),
    ):
        yield
