"""Which leaves of two observations are compared: another implementation has parameters and buffers of its own.

A name that one side does not know at all is a matter of naming, and state that starts from other values is a matter of
the implementation: neither is compared. A name that both sides know, and for which only one side has a leaf, is a
difference. So is a name that a run made, if the transform keeps names. Another implementation may keep what it likes,
but what the reference's run made and the candidate lacks leaves a doubt (`is_undecided`). Start with `pair_stage`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta.compare.leaves import Leaves, describe
from torchdelta.compare.objects import as_tensor
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
    values, all leaves are returned, with an empty list. With `keeps_names`, state that a run made has to be there on
    both, too, if both sides start with the same names.
    """
    own, written = candidate.other_starts, frozenset[str]()
    if keeps_names:
        if reference.start_names == candidate.start_names:
            written |= reference.new_names | candidate.new_names
        written |= reference.written | candidate.written
        own = own - written
        if not own:
            return reference.stages.get(stage, {}), candidate.stages.get(stage, {}), []
        written |= {name for each in (reference, candidate) for name in each.state_names - own if is_state(name)}
    return common_state(stage, reference, candidate, own, kept=written)


def is_undecided(leaf: UnmatchedLeaf, reference: Observation) -> bool:
    """Tell whether the reference's run made the state of this leaf, which the candidate lacks or has elsewhere."""
    return leaf.side == "reference" and state_name(leaf.path) in reference.new_names


def complete(stage: str, observations: Sequence[Observation]) -> None:
    """Add to the stage of each observation, in place, the values that another one changed and it left as they were."""
    paths = dict.fromkeys(path for each in observations for path in each.stages.get(stage, {}))
    for each in observations:
        each.complete(stage, paths)


def is_state(path: str) -> bool:
    """Tell whether a path is one of unregistered state, such as `attributes['cache'][0]`."""
    return is_attribute(state_name(path) or "")


def has_differences(reference: Observation, candidate: Observation) -> bool:
    """Tell whether tensors, arrays or numbers of one stage and path differ, or may; if none does, no noise is needed.

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
    """Tell whether two leaves are tensors, or can be made tensors, that are not `_is_equal`; False for any other pair.

    Numbers, booleans and numeric arrays can. A NaN differs from everything.
    """
    first, second = (each if isinstance(each, torch.Tensor) else as_tensor(each) for each in (leaf, other))
    return first is not None and second is not None and not _is_equal(first, second)


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


Aliases = dict[str, frozenset[str]]
"""The paths of the values with which the value at a path shares memory."""


def common_aliases(reference: Observation, candidate: Observation) -> tuple[Aliases, Aliases]:
    """Return the aliases of both sides that have to be the same.

    Unregistered state has those with values whose names both sides know, and without those that the candidate lacks
    (`lost_aliases`).
    """
    lost = lost_aliases(reference, candidate)
    first = _known_aliases(reference, candidate, reference)
    first |= {path: first[path] - others for path, others in lost.items()}
    return first, _known_aliases(reference, candidate, candidate)


def lost_aliases(reference: Observation, candidate: Observation) -> Aliases:
    """Return with what unregistered state shares memory in the reference and not in the candidate, by path.

    A compiler returns copies where eager returns its operand, as a dropout in eval mode does. That is no difference
    until something is written in place.
    """
    first, second = (_known_aliases(reference, candidate, side) for side in (reference, candidate))
    lost = {path: others - second.get(path, frozenset()) for path, others in first.items() if is_state(path)}
    return {path: others for path, others in lost.items() if others}


def _known_aliases(reference: Observation, candidate: Observation, side: Observation) -> Aliases:
    """Return the aliases of one side; those of unregistered state are with values whose names both sides know."""
    known = reference.state_names & candidate.state_names

    def is_common(path: str) -> bool:
        name = state_name(path)
        return name is None or name in known

    return {
        path: frozenset(filter(is_common, others)) if is_state(path) else others
        for path, others in side.aliases.items()
    }


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
