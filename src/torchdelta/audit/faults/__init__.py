"""Faults that can be planted in a program, to test whether a check catches them.

Each family of faults has a file with a table `FAULTS`. A new kind is one entry in such a table; a new family is one
file and one name in the loop below.

    faulty = plant("residual_dropped", seed=0, then="inductor")
    report = torchdelta.check(model, inputs, transform=faulty)
    faulty.place                            # the node that has the fault

Start with `plant`. `base` says what a fault is, `transform` plants it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.fx import GraphModule

from torchdelta import transforms
from torchdelta.audit.faults import (
    activations,
    arithmetic,
    attention,
    base,
    indexing,
    normalisation,
    precision,
    training,
)
from torchdelta.audit.faults.base import Fault, NotPlantable, PlaceLost
from torchdelta.audit.faults.transform import Planted
from torchdelta.records.audit import Place
from torchdelta.registry import Registry
from torchdelta.transforms.base import Transform
from torchdelta.transforms.export import Exports

__all__ = ["FAULTS", "Fault", "NotPlantable", "Place", "PlaceLost", "Planted", "eligible_places", "plant"]

FAULTS: Registry[Fault] = Registry("fault")
for _family in (activations, arithmetic, attention, indexing, normalisation, precision, training):
    for _fault in _family.FAULTS:
        FAULTS.add(_fault.name, _fault)


def plant(
    kind: str,
    seed: int = 0,
    then: str | Transform | Callable[..., Any] | None = None,
    *,
    excluding: Collection[str] = (),
    exports: Exports | None = None,
) -> Planted:
    """Return a transform that plants a fault of that kind at one node of the exported program; nothing is planted yet.

    The seed chooses the node among the eligible ones, without those whose names are in `excluding`. After the transform
    was applied, its `place` tells the node. `then` is the transform under test, which gets the faulty program; None
    runs that as it is. Faults that share `exports` need not trace the program anew. Raise UsageError if the kind is
    unknown, or if `then` does not start from the program.
    """
    following = None if then is None else transforms.build(then, {})
    return Planted(FAULTS.get(kind), seed=seed, then=following, excluding=excluding, exports=exports)


def eligible_places(kind: str, graph_module: GraphModule) -> tuple[Place, ...]:
    """Return every place in an exported program at which a fault of that kind can be planted; empty if there is none.

    Nodes that no output and no change of state depends on are left out. Raise UsageError if the kind is unknown.
    """
    return base.eligible_places(FAULTS.get(kind), graph_module)
