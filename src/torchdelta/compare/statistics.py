"""A tensor in a few numbers: enough to say that two are the same, or that they are at least so far apart."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from torchdelta._torch import tensors
from torchdelta.compare.contract import Terms
from torchdelta.compare.policy import Bitwise, Policy, Threshold, default_tolerance, relative
from torchdelta.records.comparison import Comparison
from torchdelta.records.verdict import Verdict

_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What is kept of a tensor whose values are not; of a complex one, over its components."""

    dtype: str
    shape: tuple[int, ...]
    numel: int
    nan: int
    inf: int
    minimum: float
    maximum: float
    mean: float
    rms: float
    """These four are of the finite elements; NaN where there are none."""
    checksum: str
    """Of every bit in order, except that any NaN is like any other."""


def statistics_of(tensor: torch.Tensor) -> Statistics:
    """Reduce an ordinary tensor to its statistics, piece by piece."""
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
    """Say what statistics can tell: the same bits, an error of at least so much, or nothing."""
    broken = []
    if reference.dtype != candidate.dtype:
        broken.append(terms.breach_of_dtype(_dtype(reference), _dtype(candidate)))
    if reference.shape != candidate.shape:
        broken.append(terms.breach("shape", reference.shape, candidate.shape))
    is_same = (reference.dtype, reference.shape, reference.checksum) == (
        candidate.dtype,
        candidate.shape,
        candidate.checksum,
    )
    if is_same:
        verdict, reason, error, allowed = Verdict.EQUIVALENT, "bitwise identical, by checksum", 0.0, 0.0
    else:
        verdict, reason, error, allowed = _held_apart(reference, candidate, policy)
    decisive = [str(breach) for breach in broken if not breach.excused]
    if decisive:
        verdict, reason = Verdict.DIVERGED, "; ".join(decisive)
    return Comparison(
        path=path,
        verdict=verdict,
        reason=reason,
        kind="statistics",
        dtype=reference.dtype,
        shape=reference.shape,
        contract=tuple(broken),
        error=error,
        allowed=allowed,
        resolution=None if allowed is None else relative(allowed, reference.rms),
        details={"rms_of_reference": reference.rms, "rms_of_candidate": candidate.rms},
    )


def _held_apart(reference: Statistics, candidate: Statistics, policy: Policy) -> tuple[Verdict, str, float, float]:
    """Judge two tensors of which only the statistics are there, and differ."""
    if (reference.nan, reference.inf) != (candidate.nan, candidate.inf):
        counts = f"{reference.nan} NaN and {reference.inf} Inf in the reference, {candidate.nan} and {candidate.inf}"
        return Verdict.DIVERGED, f"{counts} in the candidate", math.inf, 0.0
    if not _dtype(reference).is_floating_point and not _dtype(reference).is_complex:
        return Verdict.DIVERGED, "the checksums differ, and integers have no rounding noise", math.inf, 0.0
    if isinstance(policy, Bitwise):
        return Verdict.DIVERGED, "the checksums differ", _gap(reference.rms, candidate.rms), 0.0
    # no two tensors are closer than their means, their sizes or their extremes are
    by_rms = max(_gap(reference.rms, candidate.rms), _gap(reference.mean, candidate.mean))
    by_peak = max(by_rms, _gap(reference.minimum, candidate.minimum), _gap(reference.maximum, candidate.maximum))
    known = "of which only statistics were kept"
    if isinstance(policy, Threshold):
        allowed = reference.rms * math.pow(10.0, -policy.bound / 20.0) if policy.metric == "sqnr" else math.inf
        error, what = by_rms, "rms"
    elif policy.needs_truth:
        return Verdict.INCONCLUSIVE, f"the checksums differ, {known}, and there is no truth", by_rms, 0.0
    else:
        rtol, atol = policy.rtol, policy.atol
        if rtol is None or atol is None:
            rtol, atol = default_tolerance(_dtype(reference), _dtype(candidate))
        allowed = atol + rtol * max(abs(reference.minimum), abs(reference.maximum))
        error, what = by_peak, "largest"
    if error > allowed:
        reason = f"the {what} error is at least {error:.3g}, and {allowed:.3g} is allowed"
        return Verdict.DIVERGED, reason, error, allowed
    reason = f"the values, {known}, differ by {error:.3g} at least; by how much at most cannot be told"
    return Verdict.INCONCLUSIVE, reason, error, allowed


def _gap(reference: float, candidate: float) -> float:
    gap = abs(candidate - reference)
    return gap if math.isfinite(gap) else 0.0


def _dtype(statistics: Statistics) -> torch.dtype:
    found = getattr(torch, statistics.dtype)
    assert isinstance(found, torch.dtype)
    return found
