"""Does the judge still compute what it should? A candidate may have changed the operators that it computes with.

A pass runs in the process that compares its results. If it overrides the kernel of `aten::sub`, or replaces
`torch.Tensor.__sub__`, every error may come out as zero. So the judge judges the same small values before any candidate
ran and afterwards. All numbers of these values are exact in every dtype: a kernel that rounds otherwise passes, and one
that computes something else does not.

    require()             # before the candidate runs
    …
    if not holds(): …     # nothing that the judge says can be relied on

Start reading at `_judge_samples`.
"""

from __future__ import annotations

import torch

from torchdelta.compare.judge import Judge
from torchdelta.compare.noise import Noise
from torchdelta.compare.policy import Policy
from torchdelta.compare.semantic import Semantic
from torchdelta.errors import EnvironmentUnfit

Outcome = tuple[str, ...]
_EXPECTED: Outcome = (
    "Verdict.EQUIVALENT 0.0 (0, 0, 0.0, 0)",
    "Verdict.DIVERGED 6.0 (8, 0, 6.0, 26)",
    "Verdict.DIVERGED inf (1, 1, 0.0, 0)",
    "Verdict.DIVERGED 6.0 (55, 0, 1000000000.0, 0)",
    "Verdict.DIVERGED 6.0 (8, 0, 6.0, 26)",
    "Verdict.DIVERGED 1.0 (9, 0, 1.0, 2)",
    "Verdict.DIVERGED 6.0 (8, 0, 6.0, 26)",
    "Verdict.DIVERGED 12.0 (64, 0, 12.0, 5)",
)
"""What `_judge_samples` returns; written down, because a file may change operators as soon as it is imported."""


def require() -> None:
    """Raise EnvironmentUnfit if the judge does not work before a candidate runs."""
    if not holds():
        raise EnvironmentUnfit(
            "operators of torch give wrong results in this process before the candidate runs, because an earlier "
            "candidate or an import changed them: check in a fresh process, and change operators in the pass alone"
        )


def holds() -> bool:
    """Tell whether the judge says what it should about the samples; False too if it raises."""
    try:
        return _judge_samples() == _EXPECTED
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
