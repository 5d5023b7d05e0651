"""A quantized program is judged layer by layer: each is given the reference's values, and may be off by its own steps.

The outputs of the program are off by all of its steps together, and no single bound on that would distinguish a bad
layer from a deep program. So a program whose layers are right is right, as far as quantizing allows. `LayerwiseCheck`
observes the graphs at the quantizer's seam; `LayerwisePolicy` gives every leaf the verdict of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchdelta._torch.graphs.nodes import module_path, op_name
from torchdelta.compare.policy import IDENTICAL, Judgement, Policy, Sample, describe_misplaced, relative
from torchdelta.nodewise.local import NodeJudgement
from torchdelta.nodewise.lockstep_seam import GraphComparison, LockstepSeam
from torchdelta.nodewise.quantized import QuantizedJudge
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Questions, Report, reason_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.wrappers import ObservedTransform

COARSEST = 0.3
"""An error beyond this share of the values is too large to pass, whatever its cause."""


@dataclass(frozen=True)
class LayerwisePolicy(Policy):
    """Gives every leaf the verdict of the layers, because a leaf does not show which layer it is wrong for."""

    verdict: Verdict
    reason: str

    def judge(self, sample: Sample) -> Judgement:
        """Return the verdict of the layers as that of the leaf, with its error and SQNR; there are three exceptions.

        Identical values are EQUIVALENT, and a NaN or Inf out of place is DIVERGED, whatever the layers are. If the
        layers are EQUIVALENT and the leaf's error is more than `COARSEST` of the reference's values, it is
        INCONCLUSIVE.
        """
        pair = sample.measurement
        share = relative(pair.rms_error, pair.rms_reference) or 0.0
        verdict, reason = self.verdict, f"{self.reason}; its SQNR is {pair.sqnr_db:.1f} dB"
        if not pair.mismatches:
            verdict, reason = Verdict.EQUIVALENT, IDENTICAL
        elif pair.misplaced:
            verdict, reason = Verdict.DIVERGED, describe_misplaced(pair)
        elif verdict is Verdict.EQUIVALENT and share > COARSEST:
            verdict = Verdict.INCONCLUSIVE
            reason = f"{reason}: all of them together are so far off that this may as well be a bug"
        return Judgement(
            verdict=verdict,
            reason=reason,
            error=pair.rms_error,
            details={"question": "local", "sqnr": pair.sqnr_db},
        )


@dataclass(frozen=True)
class LayerwiseCheck:
    """Observes a quantizer at its seam and judges its layers; for another transform or policy it does nothing."""

    inner: Transform
    ask: Callable[[Transform], Report]
    """Checks another transform of the same program."""
    seam: LockstepSeam | None = None

    @classmethod
    def of(cls, transform: Transform, policy: Policy, seed: int, ask: Callable[[Transform], Report]) -> LayerwiseCheck:
        """Return an observer of the layers of a quantizer whose policy needs a truth, or else one that does nothing.

        `seed` is that of the judge of the layers, and `ask` checks another transform of the same program.
        """
        if not (transform.traits.rounds_to_levels and policy.needs_truth):
            return cls(transform, ask)
        seam = LockstepSeam(judge=QuantizedJudge(seed=seed), with_gradients=False)
        return cls(transform, ask, seam)

    @property
    def is_observed(self) -> bool:
        """Whether the layers are observed, and decide."""
        return self.seam is not None

    @property
    def transform(self) -> Transform:
        """The transform, observed at its seam, or as it is if the layers are not observed."""
        return self.inner if self.seam is None else ObservedTransform(self.inner, self.seam)

    @cached_property
    def policy(self) -> LayerwisePolicy | None:
        """The policy with the verdict of the layers, or None if they are not observed.

        Read it only after the candidate has run. Unless a layer diverged or no graph was observed, `ask` also
        checks the graph before it is quantized. If that check fails, the policy is diverged; if it is inconclusive, so
        is the policy.
        """
        if self.seam is None:
            return None
        policy = policy_of_layers(self.seam.comparisons, sorted(self.seam.judge.notes))
        if policy.verdict is Verdict.DIVERGED or not self.seam.comparisons:
            return policy
        # the layers are compared with the graph before it is quantized, and that graph with the program
        before = self.ask(NoQuantizedLayer(self.inner))
        if before.verdict is Verdict.EQUIVALENT:
            return policy
        verdict = Verdict.DIVERGED if before.verdict.is_failure else Verdict.INCONCLUSIVE
        return LayerwisePolicy(verdict, f"{reason_of(before)}, in the graph that is quantized and before it is")

    @property
    def asked(self) -> str:
        """The text `asked` if the layers are observed, or else that no node was looked at by itself."""
        return Questions.local if self.seam is None else "asked"


class NoQuantizedLayer(ObservedTransform):
    """A quantizer that is stopped before it quantizes: the graph that it would quantize runs."""

    def __init__(self, inner: Transform) -> None:
        """Put a seam before the quantizer that runs its graph as it is; by its traits nothing is rounded to levels."""
        super().__init__(inner, lambda handed: handed.graph)
        self.traits = replace(inner.traits, rounds_to_levels=False)


def policy_of_layers(comparisons: Sequence[GraphComparison], notes: Sequence[str] = ()) -> LayerwisePolicy:
    """Return the policy that gives the program the verdict of its layers, from the comparisons of its graphs.

    It is INCONCLUSIVE if no node was judged; DIVERGED if a node is wrong by itself; INCONCLUSIVE if a graph has a note,
    or if a comparison of a node is not equivalent, for which the first of `notes` is given as explanation; and else
    EQUIVALENT.
    """
    judged = [each for graphs in comparisons for each in graphs.judgements]
    if not judged:
        return LayerwisePolicy(Verdict.INCONCLUSIVE, "no layer could be judged by itself")
    wrong = [each for each in judged if each.culprit is not None]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return LayerwisePolicy(Verdict.DIVERGED, f"{_describe(wrong[0])}{more}")
    for graphs in comparisons:
        if graphs.notes:
            return LayerwisePolicy(
                Verdict.INCONCLUSIVE, f"not every layer could be judged by itself: {graphs.notes[0]}"
            )
    undecided = [each for each in judged if any(one.verdict is not Verdict.EQUIVALENT for one in each.local)]
    if undecided:
        more = f", and {len(undecided) - 1} more" if len(undecided) > 1 else ""
        why = f" ({notes[0]})" if notes else ""
        return LayerwisePolicy(Verdict.INCONCLUSIVE, f"{_describe(undecided[0])}{more}{why}")
    return LayerwisePolicy(
        Verdict.EQUIVALENT, f"fed the reference's values, each of {len(judged)} nodes is as right as its steps allow"
    )


def _describe(judgement: NodeJudgement) -> str:
    """Return in words which node it is, in which module, and the reason of its worst comparison."""
    node = judgement.culprit or judgement.reference
    where = f" of {path}" if (path := module_path(node)) else ""
    return f"{op_name(node)}{where} by itself, fed the reference's values: {_worst(judgement).reason}"


def _worst(judgement: NodeJudgement) -> Comparison:
    """Return the comparison of a node that has the highest rank."""
    return max(judgement.local, key=lambda comparison: comparison.rank)
