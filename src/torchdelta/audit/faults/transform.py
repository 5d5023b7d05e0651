"""A fault as a transform: export the program, plant the fault at one node, and pass the result on.

`Planted` is used like any other transform. With `then`, the faulty program goes through the transform under test. In
float64 the fault is planted at the same node as natively, so that both questions are about the same program. Start with
`Planted.applied`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from torchdelta._torch.compile.seams import HandedGraph, Seam, hand_on
from torchdelta._torch.graphs.nodes import drop_metadata_assertions
from torchdelta.audit.faults.base import Fault, NotPlantable, PlaceLost, eligible_nodes, place_of
from torchdelta.errors import UsageError
from torchdelta.program.sides import Side
from torchdelta.records.audit import Place
from torchdelta.transforms.base import Traits, Transform, TransformedSide
from torchdelta.transforms.export import Exports
from torchdelta.transforms.replacement import OtherModule, Replacement


class Planted(Transform):
    """Makes a program with one fault, and applies another transform to it, if there is one."""

    def __init__(
        self,
        fault: Fault,
        *,
        seed: int = 0,
        then: Transform | None = None,
        excluding: Collection[str] = (),
        exports: Exports | None = None,
    ) -> None:
        """Keep what the transform needs; nothing is planted before it is applied.

        The seed chooses the node, and nodes whose names are in `excluding` are left out. `exports` keeps the traced
        program for other faults. The traits are those of `then`, but with a seam. Raise UsageError if `then` does not
        start from the program.
        """
        if isinstance(then, (OtherModule, Replacement)):
            raise UsageError(
                f"{fault.name} cannot be planted under {type(then).__name__}, which runs something else than the "
                "program: name a transform that starts from the program"
            )
        self.fault = fault
        self.seed = seed
        self.then = then
        self.excluding = frozenset(excluding)
        self.exports = exports
        self.place: Place | None = None
        """The node with the fault; None before the transform was applied."""
        self.traits = replace(then.traits if then is not None else Traits(), has_seam=True)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Export the side, plant the fault at one node, apply `then` if there is one, and yield the transformed side.

        The seed chooses the node, which is kept in `place` and named in a note; but if `lifted` (in float64) and
        `place` is set already, that node is taken again. Without `then`, the seam gets the graph before the fault is
        planted. Raise NotPlantable if there is no place for the fault, and PlaceLost if the lifted program does not
        have the node.
        """
        exports = self.exports or Exports()
        module, faulty = exports.of(side, lifted=lifted)
        drop_metadata_assertions(module)
        if lifted and self.place is not None:
            node = self._find_again(module, self.place)
        else:
            node = self._choose_node(module)
            self.place = place_of(self.fault, node, faulty.names)
        name = node.name

        def make(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            self.fault.plant(next(node for node in graph.graph.nodes if node.name == name))
            graph.graph.lint()
            graph.recompile()
            return graph

        note = f"a fault was planted on purpose: {self.place}"
        if self.then is None:
            call = seam(HandedGraph(graph=module, example_inputs=side.args, make=make, level="export"))
            transformed = TransformedSide.counting_calls(replace(faulty, call=call), captured=1)
            yield replace(transformed, notes=[note])
            return
        make(module, side.args)
        names = faulty.names or {}
        # the next transform takes the graph module for the program, so the names are the module's own
        faulty_side = replace(faulty, names={name: name for name in names})
        with self.then.apply(faulty_side, draws_random=draws_random, lifted=lifted, seam=seam) as transformed:
            renamed_side = self._with_program_names(transformed.side, names)
            yield replace(transformed, side=renamed_side, notes=[note, *transformed.notes])

    def _with_program_names(self, side: Side, names: Mapping[str, str]) -> Side:
        """Return the side with the program's names for its state; `names` maps the graph module's names to them.

        State without such a name is left out. If the transform does not keep names, return the side itself.
        """
        if not self.traits.keeps_names:
            return side
        module_names = side.names if side.names is not None else {name: name for name in names}
        return replace(side, names={own: names[name] for own, name in module_names.items() if name in names})

    def _choose_node(self, module: GraphModule) -> Node:
        """Return the eligible node that the seed chooses, without those in `excluding`; NotPlantable if there is none.

        The choice is the same in every process.
        """
        eligible = eligible_nodes(self.fault, module.graph)
        if not eligible:
            raise NotPlantable(
                f"{self.fault.name} cannot be planted: it needs {self.fault.needs}, and the exported program has none "
                "that an output depends on"
            )
        candidates = [node for node in eligible if node.name not in self.excluding]
        if not candidates:
            raise NotPlantable(
                f"{self.fault.name} cannot be planted once more: all {len(eligible)} places of the program are excluded"
            )
        # a text as seed gives the same choice in every process; a hash does not
        return random.Random(f"{self.fault.name} {self.seed}").choice(candidates)

    def _find_again(self, module: GraphModule, place: Place) -> Node:
        """Return the node of a place, with the same name and operation, in the program exported in float64.

        Raise PlaceLost if there is no such node.
        """
        node: Node
        for node in module.graph.nodes:
            if node.name == place.node and place_of(self.fault, node).op == place.op:
                return node
        raise PlaceLost(
            f"{self.fault.name} was planted at {place.node} ({place.op}), and the program exported in float64 has no "
            "such node: the program takes another way there, so the fault cannot be held against its truth"
        )
