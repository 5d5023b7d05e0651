"""Does the judge still compute what it should? A candidate may have changed the operators that it computes with.

A pass runs in the process that compares its results. If it overrides the kernel of `aten::sub`, or replaces
`torch.Tensor.__sub__`, every error may come out as zero. So the judge judges the same small values before any candidate
ran and afterwards. All numbers of these values are exact in every dtype: a kernel that rounds otherwise passes, and one
that computes something else does not.

    expected = expectation()      # before the first candidate of the process
    …                             # the candidate runs
    if not still_holds(): …       # nothing that the judge says can be relied on

Start reading at `_judge_samples`.
"""

from __future__ import annotations

import functools

import torch

from torchdelta.compare.judge import Judge
from torchdelta.compare.noise import Noise
from torchdelta.compare.policy import Policy
from torchdelta.compare.semantic import Semantic

Outcome = tuple[str, ...]


@functools.cache
def expectation() -> Outcome:
    """Return what the judge says about the samples; the first call in a process has to come before any candidate."""
    return _judge_samples()


def still_holds() -> bool:
    """Tell whether the judge says the same as at the first call of `expectation`; False too if it raises."""
    expected = expectation()
    try:
        return _judge_samples() == expected
    except Exception:  # such as a type that an operator never returns
        return False


def _judge_samples() -> Outcome:
    """Return what the judge says about small tensors, right and wrong ones, of a few dtypes, as texts."""
    whole = torch.arange(1, 65, device="cpu").reshape(8, 8).remainder(7)
    values = whole.float()
    wrong, misplaced, masked = values.clone(), values.clone(), values.clone()
    wrong[3] = wrong[4]
    misplaced[0, 0] = torch.nan
    masked[0, 0] = -1e9
    samples = [
        (Noise(), values, values.clone()),
        (Noise(), values, wrong),
        (Noise(), values, misplaced),
        (Noise(), masked, masked * 2),
        (Noise(), values.bfloat16(), wrong.bfloat16()),
        (Noise(), whole, whole + (whole == 3)),
        (Semantic(), values.double(), wrong.double()),
        (Semantic(), values.double(), -values.double()),
    ]
    return tuple(_describe(*sample) for sample in samples)


def _describe(policy: Policy, reference: torch.Tensor, candidate: torch.Tensor) -> str:
    """Return verdict, error and counts of one comparison; the reference is its own truth, and its own noisy run."""
    truth = reference.double() if reference.is_floating_point() else reference
    sides = ({"value": reference}, {"value": candidate}, {"value": truth})
    (comparison,), _ = Judge(policy=policy).compare(*sides, noisy=[{"value": reference}])
    measurement = comparison.measurement
    assert measurement is not None
    counts = (measurement.mismatches, measurement.misplaced, measurement.max_abs, measurement.worst)
    return f"{comparison.verdict} {comparison.error} {counts}"
