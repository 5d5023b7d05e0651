"""Faults to plant in a program: does a check that says "equivalent" see them?

A new kind is one entry in the `FAULTS` of its family's file; a new family is one file and one name here.
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
from torchdelta.audit.faults.planted import Planted
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
    """Return a transform that plants a fault of that kind at one node of the exported program.

    The seed chooses the node among those that fit, but for the `excluding` ones, given by name; `place` tells which it
    was once the transform was applied. `then` is the transform under test, which is given the faulty program. `exports`
    may be shared by many faults in one program, which is then traced once.
    """
    onward = None if then is None else transforms.build(then, {})
    return Planted(FAULTS.get(kind), seed=seed, then=onward, excluding=excluding, exports=exports)


def eligible_places(kind: str, graph_module: GraphModule) -> tuple[Place, ...]:
    """Return every place in an exported program at which a fault of that kind can be planted."""
    return base.eligible_places(FAULTS.get(kind), graph_module)
