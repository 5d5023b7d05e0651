"""A quantized program is judged layer by layer: each is fed the reference's values, and may be off by its own steps.

What is right node by node is right as a whole, as far as quantizing allows: what the program returns is off by as much
as all of its steps together, and no single bound on that would tell a bad layer from a deep program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchdelta._torch.graphs.nodes import module_path, op_name
from torchdelta.compare.policy import Judgement, Policy, Sample, relative
from torchdelta.nodewise.local import NodeJudgement
from torchdelta.nodewise.lockstep_seam import GraphComparison, LockstepSeam
from torchdelta.nodewise.quantized import QuantizedJudge
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Questions, Report, reason_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.wrappers import ObservedTransform

COARSEST = 0.3
"""An error beyond this share of the values is too large to be called the same, however it came about."""


@dataclass(frozen=True)
class LayerwisePolicy:
    """Gives every tensor the verdict of the layers: none of them can be told from what the others did."""

    verdict: Verdict
    reason: str
    needs_truth = False
    judges_integers = False
    rtol = 0.0
    atol = 0.0

    def judge(self, sample: Sample) -> Judgement:
        """Judge as the layers were judged; what did not change is right, and what is out of place is wrong."""
        seen = sample.measurement
        share = relative(seen.rms_error, seen.rms_reference) or 0.0
        verdict, reason = self.verdict, f"{self.reason}; its SQNR is {seen.sqnr_db:.1f} dB"
        if not seen.mismatches:
            verdict, reason = Verdict.EQUIVALENT, "bitwise identical"
        elif seen.misplaced:
            verdict, reason = Verdict.DIVERGED, f"NaN or Inf out of place at {seen.misplaced} of {seen.numel} elements"
        elif verdict is Verdict.EQUIVALENT and share > COARSEST:
            verdict = Verdict.INCONCLUSIVE
            reason = f"{reason}: all of them together are so far off that nobody can tell that from a bug"
        return Judgement(
            verdict=verdict,
            reason=reason,
            error=seen.rms_error,
            details={"question": "local", "sqnr": seen.sqnr_db},
        )


@dataclass(frozen=True)
class LayerwiseCheck:
    """Who stands at the seam of a quantizer and judges layer by layer; nobody for another transform or policy."""

    inner: Transform
    ask: Callable[[Transform], Report]
    """Checks another transform of the same program."""
    seam: LockstepSeam | None = None

    @classmethod
    def of(cls, transform: Transform, policy: Policy, seed: int, ask: Callable[[Transform], Report]) -> LayerwiseCheck:
        """Stand there if this is a quantizer and noise is to be told from bugs."""
        if not (transform.traits.rounds_to_levels and policy.needs_truth):
            return cls(transform, ask)
        seam = LockstepSeam(judge=QuantizedJudge(seed=seed), with_gradients=False)
        return cls(transform, ask, seam)

    @property
    def transform(self) -> Transform:
        """The transform, with us at its seam."""
        return self.inner if self.seam is None else ObservedTransform(self.inner, self.seam)

    @cached_property
    def policy(self) -> LayerwisePolicy | None:
        """What the layers showed, once the candidate has run; None where they were not looked at."""
        if self.seam is None:
            return None
        found = judged_by_layers(self.seam.comparisons, sorted(self.seam.judge.notes))
        if found.verdict is Verdict.DIVERGED or not self.seam.comparisons:
            return found
        # the layers are held against the graph that is quantized, and that one against the program
        before = self.ask(NoQuantizedLayer(self.inner))
        if before.verdict is Verdict.EQUIVALENT:
            return found
        verdict = Verdict.DIVERGED if before.verdict.is_failure else Verdict.INCONCLUSIVE
        return LayerwisePolicy(verdict, f"{reason_of(before)}, in the graph that is quantized and before it is")

    @property
    def asked(self) -> str:
        """Whether every layer was judged by itself; otherwise why not."""
        return Questions.local if self.seam is None else "asked"


class NoQuantizedLayer(ObservedTransform):
    """A quantizer that is stopped before it quantizes: what runs is the graph that it would have."""

    def __init__(self, inner: Transform) -> None:
        super().__init__(inner, lambda handed: handed.graph)
        self.traits = replace(inner.traits, rounds_to_levels=False)


def judged_by_layers(seen: Sequence[GraphComparison], notes: Sequence[str] = ()) -> LayerwisePolicy:
    """Return the policy that says of the program what its layers showed."""
    judged = [each for graphs in seen for each in graphs.judgements]
    if not judged:
        return LayerwisePolicy(Verdict.INCONCLUSIVE, "no layer could be judged by itself")
    wrong = [each for each in judged if each.culprit is not None]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return LayerwisePolicy(Verdict.DIVERGED, f"{_named(wrong[0])}{more}")
    for graphs in seen:
        if graphs.notes:
            return LayerwisePolicy(
                Verdict.INCONCLUSIVE, f"not every layer could be judged by itself: {graphs.notes[0]}"
            )
    open_ones = [each for each in judged if any(one.verdict is not Verdict.EQUIVALENT for one in each.local)]
    if open_ones:
        more = f", and {len(open_ones) - 1} more" if len(open_ones) > 1 else ""
        why = f" ({notes[0]})" if notes else ""
        return LayerwisePolicy(Verdict.INCONCLUSIVE, f"{_named(open_ones[0])}{more}{why}")
    return LayerwisePolicy(
        Verdict.EQUIVALENT, f"fed the reference's values, each of {len(judged)} nodes is as right as its steps allow"
    )


def _named(judged: NodeJudgement) -> str:
    node = judged.culprit or judged.reference
    where = f" of {path}" if (path := module_path(node)) else ""
    return f"{op_name(node)}{where} by itself, fed the reference's values: {_worst(judged).reason}"


def _worst(judged: NodeJudgement) -> Comparison:
    return max(judged.local, key=lambda seen: seen.rank)
