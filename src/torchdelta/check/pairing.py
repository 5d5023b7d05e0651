"""Which leaves of two observations are compared: parameters and buffers of another implementation may have other names.

A name that one side does not know at all is a matter of naming. A name that both sides know, and for which only one
side has a leaf, is a difference. Start with `pair_stage`.
"""

from __future__ import annotations

import re

import torch

from torchdelta._torch import tensors
from torchdelta.compare.leaves import Leaves, describe
from torchdelta.program.stages import Observation
from torchdelta.records.comparison import UnmatchedLeaf

_STATE = re.compile(
    r"(?:iterations\[\d+\]\.|steps\[\d+\]\.)?(?P<kind>parameters|buffers|attributes|optimizer)"
    r"(?P<key>\['(?:[^'\\]|\\.)*'\]|\[\"(?:[^\"\\]|\\.)*\"\])"
)


def pair_stage(
    stage: str, reference: Observation, candidate: Observation, *, keeps_names: bool
) -> tuple[Leaves, Leaves, list[UnmatchedLeaf]]:
    """Return the leaves of a stage to compare, of reference and candidate, and the state whose name one side lacks.

    With `keeps_names` these are all leaves, and the list of such state is empty. Without it, such state is left out of
    the leaves, as `common_state` does.
    """
    if keeps_names:
        return reference.stages.get(stage, {}), candidate.stages.get(stage, {}), []
    return common_state(stage, reference, candidate)


def has_differences(reference: Observation, candidate: Observation) -> bool:
    """Tell whether two tensors of the same stage and path differ, or may: without a difference no noise is needed.

    Leaves that are not tensors or have no partner do not count. Tensors that `_is_equal` does not compare count as
    different.
    """
    return any(
        isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor) and not _is_equal(leaf, other)
        for stage, leaves in reference.stages.items()
        for path, leaf in leaves.items()
        if (other := candidate.stages.get(stage, {}).get(path)) is not leaf
    )


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors are equal in shape, dtype, device and values; a NaN equals nothing.

    Also False for tensors that are not compared: those without a plain buffer, such as sparse ones, and dtypes of one
    byte, such as bool.
    """
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if not (tensors.has_own_buffer(first) and tensors.has_own_buffer(second)) or first.dtype.itemsize == 1:
        return False
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    return torch.equal(first, second)


def common_state(
    stage: str, reference: Observation, candidate: Observation
) -> tuple[Leaves, Leaves, list[UnmatchedLeaf]]:
    """Return the leaves of reference and candidate without the state whose name only one side knows, and that state.

    State means parameters, buffers, attributes and optimizer state, and what is below their paths, such as `.grad`. A
    name is known to a side if it is in its `state_names`. Other leaves, such as outputs, are returned even without a
    partner.
    """
    common: list[Leaves] = []
    renamed: list[UnmatchedLeaf] = []
    for side, own, other in (("reference", reference, candidate), ("candidate", candidate, reference)):
        leaves = own.stages.get(stage, {})
        unknown = {path for path in leaves if _name_of(path) not in (None, *other.state_names)}
        common.append({path: leaf for path, leaf in leaves.items() if path not in unknown})
        renamed += [
            UnmatchedLeaf(path=path, side=side, what=describe(leaves[path])) for path in leaves if path in unknown
        ]
    return common[0], common[1], renamed


def _name_of(path: str) -> str | None:
    """Return the name of the parameter, buffer or attribute at a path, or None for a leaf of another kind.

    It is the start of the path without the iteration or step, such as `buffers['mean']`. Optimizer state has the name
    of its parameter.
    """
    match = _STATE.match(path)
    if match is None:
        return None
    # the optimizer's state goes by the name of its parameter
    kind = "parameters" if match["kind"] == "optimizer" else match["kind"]
    return f"{kind}{match['key']}"
