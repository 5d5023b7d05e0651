"""Which state of another implementation has a partner: its parameters and buffers may have names of their own.

A name that one side does not know at all is a matter of naming. One that both know, and only one side left something
behind for, is a difference.
"""

from __future__ import annotations

import re

import torch

from torchdelta._torch import tensors
from torchdelta.compare.leaves import Leaves, describe
from torchdelta.program.stages import Observation
from torchdelta.records.comparison import Unmatched

_STATE = re.compile(
    r"(?:iterations\[\d+\]\.|steps\[\d+\]\.)?(?P<kind>parameters|buffers|attributes|optimizer)"
    r"(?P<key>\['(?:[^'\\]|\\.)*'\]|\[\"(?:[^\"\\]|\\.)*\"\])"
)


def paired(
    stage: str, reference: Observation, candidate: Observation, *, keeps_names: bool
) -> tuple[Leaves, Leaves, list[Unmatched]]:
    """Return the leaves of a stage to hold against each other, and the state that another implementation has alone."""
    if keeps_names:
        return reference.stages.get(stage, {}), candidate.stages.get(stage, {}), []
    return common_state(stage, reference, candidate)


def differing(reference: Observation, candidate: Observation) -> bool:
    """Tell whether any tensor of the same path has other values: only then does anyone ask for noise."""
    return any(
        isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor) and not _is_equal(leaf, other)
        for stage, leaves in reference.stages.items()
        for path, leaf in leaves.items()
        if (other := candidate.stages.get(stage, {}).get(path)) is not leaf
    )


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if not (tensors.has_own_buffer(first) and tensors.has_own_buffer(second)) or first.dtype.itemsize == 1:
        return False
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    return torch.equal(first, second)


def common_state(stage: str, reference: Observation, candidate: Observation) -> tuple[Leaves, Leaves, list[Unmatched]]:
    """Return the leaves of a stage without the state that only one side has a name for, and that state apart."""
    kept: list[Leaves] = []
    nameless: list[Unmatched] = []
    for side, own, other in (("reference", reference, candidate), ("candidate", candidate, reference)):
        leaves = own.stages.get(stage, {})
        foreign = {path for path in leaves if _name_of(path) not in (None, *other.state_names)}
        kept.append({path: leaf for path, leaf in leaves.items() if path not in foreign})
        nameless += [Unmatched(path=path, side=side, what=describe(leaves[path])) for path in leaves if path in foreign]
    return kept[0], kept[1], nameless


def _name_of(path: str) -> str | None:
    match = _STATE.match(path)
    if match is None:
        return None
    # the optimizer's state goes by the name of its parameter
    kind = "parameters" if match["kind"] == "optimizer" else match["kind"]
    return f"{kind}{match['key']}"
