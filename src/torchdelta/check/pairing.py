"""Which leaves of two observations are compared: another implementation has parameters and buffers of its own.

A name that one side does not know at all is a matter of naming, and state that starts from other values is a matter of
the implementation: neither is compared. A name that both sides know, and for which only one side has a leaf, is a
difference. So is a name that the run of one side made, if both sides start with the same names; if they do not, it may
be either (`is_undecided`). Start with `pair_stage`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.compare.leaves import Leaves, describe
from torchdelta.program.stages import Observation
from torchdelta.program.unregistered import is_attribute
from torchdelta.records.comparison import UnmatchedLeaf

_STATE = re.compile(
    r"(?:iterations\[\d+\]\.|steps\[\d+\]\.)?(?P<kind>parameters|buffers|attributes|optimizer|gradients)"
    r"(?P<key>\['(?:[^'\\]|\\.)*'\]|\[\"(?:[^\"\\]|\\.)*\"\])"
)


def pair_stage(
    stage: str, reference: Observation, candidate: Observation, *, keeps_names: bool
) -> tuple[Leaves, Leaves, list[UnmatchedLeaf]]:
    """Return the leaves of a stage to compare, of reference and candidate, and the state that is not compared.

    Without `keeps_names`, state that `common_state` does not find on both sides, or that starts from other values in
    the candidate, is left out of the leaves. With `keeps_names`, a pass may have weights of its own: if a parameter or
    buffer that neither side writes to starts from other values, it is left out, and so are those that one side alone
    has. State that a side writes to, and unregistered state, has to be there on both. If nothing starts from other
    values, all leaves are returned, with an empty list. State that a run made has to be there on both, too, if both
    sides start with the same names.
    """
    has_same_names = reference.start_names == candidate.start_names
    own, written = candidate.other_starts, _new_names(reference, candidate) if has_same_names else frozenset[str]()
    if keeps_names:
        written |= reference.written | candidate.written
        own = own - written
        if not own:
            return reference.stages.get(stage, {}), candidate.stages.get(stage, {}), []
        written |= {name for each in (reference, candidate) for name in each.state_names - own if is_state(name)}
    return common_state(stage, reference, candidate, own, kept=written)


def _new_names(reference: Observation, candidate: Observation) -> frozenset[str]:
    """Return the names of state that the run of either side made."""
    return frozenset(reference.new_names | candidate.new_names)


def is_undecided(leaf: UnmatchedLeaf, reference: Observation, candidate: Observation) -> bool:
    """Tell whether state of one side only was made by its run, and may be the same as other state of the other side."""
    return state_name(leaf.path) in _new_names(reference, candidate)


def complete(stage: str, observations: Sequence[Observation]) -> None:
    """Add to the stage of each observation, in place, the values that another one changed and it left as they were."""
    paths = dict.fromkeys(path for each in observations for path in each.stages.get(stage, {}))
    for each in observations:
        each.complete(stage, paths)


def is_state(path: str) -> bool:
    """Tell whether a path is one of unregistered state, such as `attributes['cache'][0]`."""
    return is_attribute(state_name(path) or "")


def has_differences(reference: Observation, candidate: Observation) -> bool:
    """Tell whether two tensors or floats of the same stage and path differ, or may; if none does, no noise is needed.

    Other leaves, and those without a partner, do not count. Tensors that `_is_equal` does not compare count as
    different. State that only one observation changed is added to the other, in place.
    """
    for stage in reference.stages:
        complete(stage, (reference, candidate))
    return any(
        _differs(leaf, other)
        for stage, leaves in reference.stages.items()
        for path, leaf in leaves.items()
        if (other := candidate.stages.get(stage, {}).get(path)) is not leaf
    )


def _differs(leaf: Any, other: Any) -> bool:
    """Tell whether two leaves are tensors that are not `_is_equal`, or unequal floats or complex numbers.

    Any other pair, such as two integers, is False. A NaN differs from everything.
    """
    if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
        return not _is_equal(leaf, other)
    return isinstance(leaf, (float, complex)) and isinstance(other, (float, complex)) and leaf != other


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
    stage: str, reference: Observation, candidate: Observation, own: Set[str], *, kept: Set[str] = frozenset()
) -> tuple[Leaves, Leaves, list[UnmatchedLeaf]]:
    """Return the leaves of reference and candidate without the state that only one side has, and that state.

    State means parameters, buffers, attributes and optimizer state, and what is below their paths, such as `.grad`. A
    side has it if its name is in `state_names`; names in `own` count as if neither side had them. Other leaves, such as
    outputs, and state whose name is in `kept`, are returned even without a partner.
    """
    common: list[Leaves] = []
    renamed: list[UnmatchedLeaf] = []
    for side, this, other in (("reference", reference, candidate), ("candidate", candidate, reference)):
        leaves = this.stages.get(stage, {})
        known = (other.state_names - own) | kept
        unknown = {path for path in leaves if (name := state_name(path)) is not None and name not in known}
        common.append({path: leaf for path, leaf in leaves.items() if path not in unknown})
        listed = {leaf.path for leaf in renamed}
        renamed += [
            UnmatchedLeaf(path=path, side=side, what=describe(leaf))
            for path, leaf in leaves.items()
            if path in unknown and path not in listed
        ]
    return common[0], common[1], renamed


def common_aliases(
    reference: Observation, candidate: Observation
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """Return the aliases of both sides; those of unregistered state are with values whose names both sides know."""
    sides = reference, candidate
    known = reference.state_names & candidate.state_names

    def is_common(path: str) -> bool:
        name = state_name(path)
        return name is None or name in known

    first, second = (
        {
            path: frozenset(filter(is_common, others)) if is_state(path) else others
            for path, others in side.aliases.items()
        }
        for side in sides
    )
    return first, second


def state_name(path: str) -> str | None:
    """Return the name of the parameter, buffer or attribute at a path, or None for a leaf of another kind.

    It is the start of the path without the iteration or step, such as `buffers['mean']`. The gradient of a step and the
    optimizer's state have the name of their parameter.
    """
    match = _STATE.match(path)
    if match is None:
        return None
    # gradients and the optimizer's state go by the name of their parameter
    kind = "parameters" if match["kind"] in ("optimizer", "gradients") else match["kind"]
    return f"{kind}{match['key']}"
