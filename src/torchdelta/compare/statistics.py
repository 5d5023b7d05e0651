"""Statistics of a tensor, and the judgement of two tensors of which only statistics were kept.

The checksum shows that two tensors are identical. The other numbers give a lower bound of the error: no two tensors are
closer to each other than their means, norms and extremes are. There is no upper bound, so two tensors that differ a
little are inconclusive.

Start reading at `statistics_of` and `compare_statistics`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from torchdelta._torch import tensors
from torchdelta.compare.contract import Terms
from torchdelta.compare.policy import (
    Bitwise,
    ByFunction,
    Policy,
    Threshold,
    default_tolerance,
    relative,
    rms_within,
)
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict

_PIECE = 1 << 20
"""Elements that are reduced at a time, so that the float64 copies stay small."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The numbers that are kept of a tensor instead of its values; of a complex tensor, over its components."""

    dtype: str
    shape: tuple[int, ...]
    numel: int
    nan: int
    inf: int
    minimum: float
    maximum: float
    mean: float
    rms: float
    """Minimum, maximum, mean and rms are those of the finite elements; NaN if there are none."""
    checksum: str
    """A hash of every bit in order, in which all NaNs are the same."""


def statistics_of(tensor: torch.Tensor) -> Statistics:
    """Return dtype, shape, counts of NaN and Inf, extremes, mean, rms and checksum of an ordinary tensor.

    Extremes, mean and rms are those of the finite elements, and NaN if there are none. Of a complex tensor they, and
    the counts of NaN and Inf, are those of its components. The checksum does not tell one NaN from another.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(values) if values.is_complex() else values).contiguous().reshape(-1).cpu()
    digest = hashlib.blake2b(digest_size=16)
    nan = inf = finite = 0
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        wide = piece.to(torch.float64)
        is_nan = torch.isnan(wide)
        raw = piece.view(torch.uint8)
        if bool(is_nan.any()):
            raw = raw.reshape(piece.numel(), -1).clone()
            raw[is_nan] = 255
        digest.update(raw.contiguous().numpy().tobytes())
        numbers = wide[torch.isfinite(wide)]
        nan += int(is_nan.sum())
        inf += int(torch.isinf(wide).sum())
        if numbers.numel():
            finite += numbers.numel()
            low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))
            total += float(numbers.sum())
            squares += float(numbers.square().sum())
    return Statistics(
        dtype=tensors.dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        numel=tensor.numel(),
        nan=nan,
        inf=inf,
        minimum=low if finite else math.nan,
        maximum=high if finite else math.nan,
        mean=total / finite if finite else math.nan,
        rms=math.sqrt(squares / finite) if finite else math.nan,
        checksum=digest.hexdigest(),
    )


def compare_statistics(
    path: str, reference: Statistics, candidate: Statistics, policy: Policy, terms: Terms
) -> Comparison:
    """Return the comparison of two tensors at `path` by their statistics alone.

    Same dtype, shape and checksum are EQUIVALENT. Another dtype or shape that the terms do not excuse is DIVERGED, and
    so are integers that differ unless the terms excuse that, other counts of NaN or Inf, and an error of floats beyond
    what the policy allows. Any other difference, such as one of floats under a policy that needs a truth, is
    INCONCLUSIVE. The error of floats is a lower bound.
    """
    breaches = []
    if reference.dtype != candidate.dtype:
        breaches.append(terms.breach_of_dtype(_dtype(reference), _dtype(candidate)))
    if reference.shape != candidate.shape:
        breaches.append(terms.breach("shape", reference.shape, candidate.shape))
    is_identical = (reference.dtype, reference.shape, reference.checksum) == (
        candidate.dtype,
        candidate.shape,
        candidate.checksum,
    )
    if is_identical:
        verdict, reason, error, allowed = Verdict.EQUIVALENT, "bitwise identical, by checksum", 0.0, 0.0
    else:
        verdict, reason, error, allowed = _judge_gap(reference, candidate, policy)
        is_excused = terms.excuses("integers") and not policy.judges_integers
        if is_excused and not _is_inexact(reference) and reference.shape == candidate.shape:
            breaches.append(terms.breach("integers", "exact", reason))
            verdict, reason = Verdict.EQUIVALENT, f"ignored: {reason}"
    decisive = [str(breach) for breach in breaches if not breach.excused]
    if decisive:
        verdict, reason = Verdict.DIVERGED, "; ".join(decisive)
    return Comparison(
        path=path,
        verdict=verdict,
        reason=reason,
        leaf="statistics",
        dtype=reference.dtype,
        shape=reference.shape,
        contract=tuple(breaches),
        error=error,
        allowed=allowed,
        resolution=None if allowed is None else relative(allowed, reference.rms),
        details={"rms_of_reference": reference.rms, "rms_of_candidate": candidate.rms},
    )


def _judge_gap(reference: Statistics, candidate: Statistics, policy: Policy) -> tuple[Verdict, str, float, float]:
    """Return verdict, reason, a lower bound of the error, and the allowed error of two tensors whose checksums differ.

    DIVERGED, with an infinite error, if the counts of NaN or Inf differ or the reference is of integers; DIVERGED, too,
    under `Bitwise`, or if the lower bound exceeds what the policy allows. Otherwise INCONCLUSIVE. A policy that needs a
    truth, a function, and a `Threshold` other than `sqnr>=`, do not make floats DIVERGED by the lower bound.
    """
    if (reference.nan, reference.inf) != (candidate.nan, candidate.inf):
        counts = f"{reference.nan} NaN and {reference.inf} Inf in the reference, {candidate.nan} and {candidate.inf}"
        return Verdict.DIVERGED, f"{counts} in the candidate", math.inf, 0.0
    if not _is_inexact(reference):
        return Verdict.DIVERGED, "the checksums differ, and integers have no rounding noise", math.inf, 0.0
    if isinstance(policy, Bitwise):
        return Verdict.DIVERGED, "the checksums differ", _gap(reference.rms, candidate.rms), 0.0
    # no two tensors are closer to each other than their norms, their means or their extremes are
    by_rms = max(_gap(reference.rms, candidate.rms), _gap(reference.mean, candidate.mean))
    by_peak = max(by_rms, _gap(reference.minimum, candidate.minimum), _gap(reference.maximum, candidate.maximum))
    caveat = "of which only statistics were kept"
    if isinstance(policy, ByFunction):
        return (
            Verdict.INCONCLUSIVE,
            f"the checksums differ, {caveat}, and a function needs the values",
            by_rms,
            math.inf,
        )
    if isinstance(policy, Threshold):
        allowed = rms_within(policy, reference.rms)
        error, norm = by_rms, "rms"
    elif policy.needs_truth:
        return Verdict.INCONCLUSIVE, f"the checksums differ, {caveat}, and there is no truth", by_rms, 0.0
    else:
        rtol, atol = policy.rtol, policy.atol
        if rtol is None or atol is None:
            rtol, atol = default_tolerance(_dtype(reference), _dtype(candidate))
        allowed = atol + rtol * max(abs(reference.minimum), abs(reference.maximum))
        error, norm = by_peak, "largest"
    if error > allowed:
        reason = f"the {norm} error is at least {error:.3g}, and {allowed:.3g} is allowed"
        return Verdict.DIVERGED, reason, error, allowed
    reason = f"the values, {caveat}, differ by at least {error:.3g}; an upper bound is not known"
    return Verdict.INCONCLUSIVE, reason, error, allowed


def _gap(reference: float, candidate: float) -> float:
    """Return |candidate − reference|, or 0 if that is not finite."""
    gap = abs(candidate - reference)
    return gap if math.isfinite(gap) else 0.0


def _is_inexact(statistics: Statistics) -> bool:
    """Tell whether the tensor that was measured is of floats or complex numbers."""
    return _dtype(statistics).is_floating_point or _dtype(statistics).is_complex


def _dtype(statistics: Statistics) -> torch.dtype:
    """Return torch's dtype of the tensor that was measured."""
    dtype = getattr(torch, statistics.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
