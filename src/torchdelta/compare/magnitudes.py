"""Values of very different sizes in one tensor, taken apart: each part is judged by its own scale and its own noise.

A mask constant of −1e4 among attention scores, or one huge output beside small ones, would set the floor for all of
them: the scores could be lost, and the norm of the error would not show it. So a tensor whose largest values are far
beyond its small ones is cut into parts, from the smallest values upwards. Almost every tensor is one part.

    scores = torch.tensor([0.5, -1.5, 1.0, -1e9])
    [part.elements for part in parts_of(sample, scores)]       # [3, 1]

Elements of the other parts are zero in the tensors of a part, on all sides, so that they have no error there. Parts of
very large or very small values are scaled by a power of two, so that their squares stay within float64. Start with
`parts_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchdelta.compare.policy import Judgement, Sample
from torchdelta.compare.spread import MASK

APART = 2.0**10
"""Values more than so many times as large as the small values of their part belong to the next part."""
ZERO = 2.0**-40
"""Values so much smaller than others are zero but for the rounding of float64."""
_SMALL = 0.1
"""The small values of a part are at this quantile: fewer of them may be zero but for rounding."""
_MOST = 8
_SAMPLED = 2**14
"""So many elements tell the quantile well enough."""
_SAFE = 300
"""Values between 2 to the power of minus this and of plus this have squares that float64 holds."""


class Part(NamedTuple):
    """The elements of one range of sizes; all others are zero in its tensors."""

    sample: Sample
    elements: int
    ordinary: float
    """The median size of its values other than zero, scaled as its tensors are."""
    exponent: int = 0
    """The tensors are scaled by 2 to the power of minus this."""
    is_mask: bool = False
    """Whether these are mask constants: values beyond `MASK` that are not the most of the tensor."""

    def unscaled(self, judgement: Judgement) -> Judgement:
        """Return a judgement of the part with its error, noise and allowed error in the units of the tensor."""
        error, noise, allowed = (
            None if number is None else self.unscale(number)
            for number in (judgement.error, judgement.noise, judgement.allowed)
        )
        return judgement._replace(error=error, noise=noise, allowed=allowed)

    def unscale(self, number: float) -> float:
        """Return a number of the part in the units of the tensor: multiplied by 2 to the power of `exponent`."""
        # in two steps, because 2 to the power of 1024 is beyond float64
        half = self.exponent // 2
        return number * 2.0**half * 2.0 ** (self.exponent - half)


def parts_of(sample: Sample, by: torch.Tensor) -> list[Part]:
    """Return the parts of a sample, those of the smallest values first; `by` has the values that say which is where.

    `by` has the sample's shape; it is its truth or its reference. There is one part, the whole sample as it is, if all
    values are zero, or of about one size whose square float64 can hold, or if the reference has a dtype of one byte.
    Zeros and elements that are not finite do not prevent that. Otherwise elements that are not finite in `by` belong to
    no part, and zeros to the one with the most elements.
    """
    values = _components(by)
    sampled, largest = _sampled(values), _largest(values)
    small = _quantile(sampled, _SMALL)
    is_whole = largest == 0.0 or (small > 0.0 and largest <= APART * small and _is_safe(largest))
    if is_whole or sample.reference.itemsize == 1:  # so coarse a dtype is judged as a whole
        return [Part(sample, by.numel(), _quantile(sampled, 0.5))]
    sizes = values.abs()
    masks = _masks(sizes)
    counts = [int(mask.sum()) for mask in masks]
    most = max(range(len(counts)), key=lambda index: counts[index])
    # a value that should be zero has the rounding of most others
    masks[most] |= sizes == 0.0
    return [
        _part(sample, sizes, mask, is_exceptional=index != most and counts[index] > 0)
        for index, mask in enumerate(masks)
        if counts[index]
    ]


def coarsest_resolution(parts: Sequence[Part], judgements: Sequence[Judgement]) -> float | None:
    """Return the largest resolution of any part, or None without any; `judgements` has one for each part.

    A part that is zero but for the rounding of float64 does not count, because no error could be told from its values.
    It is zero beside the largest part that is not of mask constants.
    """
    sizes = [part.unscale(part.ordinary) for part in parts]
    largest = max((size for size, part in zip(sizes, parts, strict=True) if not part.is_mask), default=0.0)
    resolutions = [
        judgement.resolution
        for size, judgement in zip(sizes, judgements, strict=True)
        if judgement.resolution is not None and size > ZERO * largest
    ]
    return max(resolutions, default=None)


def _part(sample: Sample, sizes: torch.Tensor, mask: torch.Tensor, *, is_exceptional: bool) -> Part:
    """Return the part of the elements in `mask`; all others are zero in its tensors.

    Values too large or too small to be squared are scaled by a power of two, unless they are mask constants.
    `is_exceptional` says that another part has more elements. Of complex tensors the components are elements.
    """
    own = sizes[mask & (sizes > 0.0)]
    is_mask = is_exceptional and bool(own.numel()) and float(own.min()) > MASK
    exponent = math.frexp(float(own.max()))[1] if own.numel() else 0
    # mask constants are not squared, and are known by their size
    exponent = 0 if is_mask or abs(exponent) <= _SAFE else exponent

    def masked(tensor: torch.Tensor) -> torch.Tensor:
        real = _components(tensor)
        kept = torch.where(mask, real.double() if exponent else real, 0.0)
        return torch.ldexp(kept, torch.tensor(-exponent, device=kept.device)) if exponent else kept

    changed = sample._replace(
        reference=masked(sample.reference),
        candidate=masked(sample.candidate),
        truth=None if sample.truth is None else masked(sample.truth),
        noisy=tuple(masked(run) for run in sample.noisy),
    )
    return Part(
        sample=changed,
        elements=int(mask.sum()),
        ordinary=math.ldexp(float(own.median()), -exponent) if own.numel() else 0.0,
        exponent=exponent,
        is_mask=is_mask,
    )


def _masks(sizes: torch.Tensor) -> list[torch.Tensor]:
    """Return a mask for each part of these sizes, from the smallest values upwards; zeros and non-finites are in none.

    A part reaches up to `APART` times its own small values. There are at most `_MOST`, of which the last takes the
    rest.
    """
    masks: list[torch.Tensor] = []
    rest = sizes.isfinite() & (sizes > 0.0)
    for _ in range(_MOST - 1):
        values = sizes[rest]
        if not values.numel():
            return masks
        within = rest & (sizes <= APART * _quantile(_sampled(values), _SMALL))
        if not bool(within.any()):  # the product is beyond the dtype, or the sample missed all small values
            break
        masks.append(within)
        rest = rest & ~within
    return [*masks, rest] if bool(rest.any()) else masks


def _components(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor of real numbers: the components of a complex one are along a new last dimension.

    A float of one byte becomes float32.
    """
    detached = tensor.detach()
    if detached.is_complex():
        return torch.view_as_real(detached.resolve_conj())
    # a float of one byte has no arithmetic of its own
    return detached.float() if detached.itemsize == 1 else detached


def _largest(values: torch.Tensor) -> float:
    """Return the largest finite |value|, or 0 without any."""
    if not values.numel():
        return 0.0
    lowest, highest = map(float, torch.aminmax(values))
    if math.isfinite(lowest) and math.isfinite(highest):
        return max(-lowest, highest)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Return |value| of finite values other than zero, in order: of many, about `_SAMPLED` that are evenly spread.

    If none of these is finite and other than zero, all values are taken.
    """
    flat = values.reshape(-1)
    for chosen in (flat[:: max(flat.numel() // _SAMPLED, 1)], flat):
        sizes = chosen.abs()
        sizes = sizes[sizes.isfinite() & (sizes > 0.0)]
        if sizes.numel():
            break
    return sizes.sort().values


def _quantile(ordered: torch.Tensor, share: float) -> float:
    """Return the value at this share of sorted values, from 0 for the first to 1 for the last; 0 without any."""
    return float(ordered[int(share * (ordered.numel() - 1))]) if ordered.numel() else 0.0


def _is_safe(size: float) -> bool:
    """Tell whether float64 can hold the square of a number of this size."""
    return abs(math.frexp(size)[1]) <= _SAFE
