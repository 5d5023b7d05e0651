"""A fault as a transform: the program is exported, the fault planted at one node, and the result handed on."""

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
from torchdelta.transforms.base import Traits, Transform, Transformed
from torchdelta.transforms.export import Exports
from torchdelta.transforms.replacement import OtherModule, Replacement


class Planted(Transform):
    """The program with one fault in it, and then another transform of that, if any."""

    def __init__(
        self,
        fault: Fault,
        *,
        seed: int = 0,
        then: Transform | None = None,
        excluding: Collection[str] = (),
        exports: Exports | None = None,
    ) -> None:
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
        """Where the fault was planted; None until the transform was applied."""
        self.traits = replace(then.traits if then is not None else Traits(), has_seam=True)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Export the side and plant the fault: in the lifted program where it was planted in the native one."""
        exports = self.exports or Exports()
        module, faulty = exports.of(side, lifted=lifted)
        drop_metadata_assertions(module)
        if lifted and self.place is not None:
            node = self._found_again(module, self.place)
        else:
            node = self._chosen(module)
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
            transformed = Transformed.counting_calls(replace(faulty, call=call), captured=1)
            yield replace(transformed, notes=[note])
            return
        make(module, side.args)
        names = faulty.names or {}
        # what follows takes the graph module for the program: its names are the module's own
        own = replace(faulty, names={name: name for name in names})
        with self.then.apply(own, draws_random=draws_random, lifted=lifted, seam=seam) as transformed:
            made = self._renamed(transformed.side, names)
            yield replace(transformed, side=made, notes=[note, *transformed.notes])

    def _renamed(self, side: Side, names: Mapping[str, str]) -> Side:
        """Give the state of a side the names of the program, where they are to be kept."""
        if not self.traits.keeps_names:
            return side
        between = side.names if side.names is not None else {name: name for name in names}
        return replace(side, names={own: names[name] for own, name in between.items() if name in names})

    def _chosen(self, module: GraphModule) -> Node:
        eligible = eligible_nodes(self.fault, module.graph)
        if not eligible:
            raise NotPlantable(
                f"{self.fault.name} cannot be planted: it needs {self.fault.needs}, and the exported program has none "
                "that an output depends on"
            )
        left = [node for node in eligible if node.name not in self.excluding]
        if not left:
            raise NotPlantable(
                f"{self.fault.name} cannot be planted once more: all {len(eligible)} places of the program are excluded"
            )
        # a text as seed gives the same choice in every process, which a hash would not
        return random.Random(f"{self.fault.name} {self.seed}").choice(left)

    def _found_again(self, module: GraphModule, place: Place) -> Node:
        node: Node
        for node in module.graph.nodes:
            if node.name == place.node and place_of(self.fault, node).op == place.op:
                return node
        raise PlaceLost(
            f"{self.fault.name} was planted at {place.node} ({place.op}), and the program exported in float64 has no "
            "such node: the program takes another way there, so the fault cannot be held against its truth"
        )
